"""timm's attention over one sequence of tokens: its forward, with `scaled_dot_product_attention` replaced by `attend`.

Projections, norms of queries and keys, rotary embeddings, gates and grouped keys run the code of the installed version;
only the attention call is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..._attend import attend
from ._rule import Candidate, Converted, GivenPattern, check_lengths, class_name, original_class, pattern_of_call

# Some classes have moved between versions.
_SUPPORTED = (
    ("timm.layers.attention", "Attention"),
    ("timm.layers.attention", "AttentionRope"),
    ("timm.models.vision_transformer", "Attention"),
    ("timm.models.vision_transformer", "ParallelScalingBlock"),
    ("timm.models.eva", "EvaAttention"),
    ("timm.models.beit", "Attention"),
    ("timm.models.gemma4_vit", "Gemma4Attention"),
)
_WINDOWS = "attends within windows, with a bias for each offset: the closest is a ViT with masks.neighborhood"
_POOLING = "pools all tokens by a few queries, to which no pattern of positions applies"
_UNSUPPORTED = {
    **dict.fromkeys(("WindowAttention", "WindowMultiHeadAttention", "WindowAttentionGlobal"), _WINDOWS),
    **dict.fromkeys(("PartitionAttentionCl", "ParallelPartitionAttention", "PartitionAttention2d"), _WINDOWS),
    **dict.fromkeys(("AttentionPoolLatent", "AttentionPoolPrr", "AttentionPool2d", "RotAttentionPool2d"), _POOLING),
    **dict.fromkeys(("ClassAttn", "ClassAttention", "ClassAttentionBlock"), "attends from the class token alone"),
    "DiffAttention": "its values are twice as wide as its keys",
    "DiffParallelScalingBlock": "its values are twice as wide as its keys",
    "RelPosAttention": "adds a bias for each offset to the scores",
    "TalkingHeadAttn": "mixes the heads' attention weights, which are never formed",
}


class ScaledDotProduct(Converted):
    """Converted module that runs its original forward with `scaled_dot_product_attention` replaced by `attend`."""

    @property
    def fused_attn(self) -> bool:
        """True: timm's modules then call `scaled_dot_product_attention`."""
        return True

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the original forward, with attention by the pattern.

        Raises ValueError if that forward does not call `scaled_dot_product_attention`.
        """
        assert self._flexdilated is not None
        served = _AttendMode(self._flexdilated)
        with served:
            out = super().forward(*args, **options)
        if not served.calls:
            raise ValueError(
                f"{self._flexdilated.name} did not call scaled_dot_product_attention, which convert replaces: "
                f"{class_name(self.original)} cannot be converted with these settings; give convert a function that "
                "returns None for it"
            )
        return out


class _AttendMode(TorchFunctionMode):
    """Mode that replaces `scaled_dot_product_attention` by `attend` with the module's pattern; counts the calls."""

    def __init__(self, given: GivenPattern) -> None:
        super().__init__()
        self.given = given
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return _attend_by_pattern(self.given, *args, **(kwargs or {}))


def _attend_by_pattern(
    given: GivenPattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    check_lengths(given, query.shape[2], key.shape[2])
    shape = (query.shape[0], query.shape[2], key.shape[2])
    pattern = pattern_of_call(given, attn_mask, shape, is_causal=is_causal)
    return attend(query, key, value, pattern, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)


def find(name: str, module: Any) -> Candidate | None:
    """Describe a module of timm that computes attention; None for any other module.

    name: name of the module in its model.

    A supported class is recognized by its forward, an unsupported one by its class name. For an unsupported class or
    option, `refusal` of the result is the reason.
    """
    kind = original_class(module)
    forwards = [getattr(getattr(sys.modules.get(file), own, None), "forward", None) for file, own in _SUPPORTED]
    if kind.forward in forwards:
        refusal = (
            "" if getattr(module, "relative_position_bias_table", None) is None else _UNSUPPORTED["RelPosAttention"]
        )
        return Candidate(name, module, module.num_heads, module, converted_class=ScaledDotProduct, refusal=refusal)
    if kind.__module__.startswith("timm.") and kind.__name__ in _UNSUPPORTED:
        return Candidate(name, module, refusal=_UNSUPPORTED[kind.__name__])
    return None
