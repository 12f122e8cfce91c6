"""timm's attention over one sequence of tokens: its forward, with `scaled_dot_product_attention` replaced by `attend`.

So projections, norms of queries and keys, rotary embeddings, gates and grouped keys run the code of the installed
version; only the attention call is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..._attend import attend
from ._rule import Converted, Found, Given, call_rule, check_lengths, class_name, original_class, refuse_dropout

# Some classes have moved between versions.
_SERVED = (
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
_REFUSED = {
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
    """A module whose forward calls `scaled_dot_product_attention`; the call is computed with the pattern."""

    @property
    def fused_attn(self) -> bool:
        """True: timm's modules then call `scaled_dot_product_attention`."""
        return True

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the module's original forward with attention by the pattern."""
        assert self._flexdilated is not None
        served = _ByPattern(self._flexdilated)
        with served:
            out = super().forward(*args, **options)
        if not served.calls:
            raise ValueError(
                f"{self._flexdilated.name} did not call scaled_dot_product_attention, in whose place the pattern is "
                f"computed: {class_name(self.original)} is not served in this form; leave it out of convert"
            )
        return out


class _ByPattern(TorchFunctionMode):
    """Mode in which `scaled_dot_product_attention` calls `attend` with the pattern; counts the calls."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.given = given
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return _attended(self.given, *args, **(kwargs or {}))


def _attended(
    given: Given,
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
    refuse_dropout(given, dropout_p, "attn_drop.p")
    check_lengths(given, query.shape[2], key.shape[2])
    shape = (query.shape[0], query.shape[2], key.shape[2])
    pattern = call_rule(given, attn_mask, shape, is_causal=is_causal)
    return attend(query, key, value, pattern, scale=scale, enable_gqa=enable_gqa)


def find(name: str, module: Any) -> Found | None:
    """Attention module of timm, recognized by its forward or by its class name."""
    kind = original_class(module)
    forwards = [getattr(getattr(sys.modules.get(file), own, None), "forward", None) for file, own in _SERVED]
    if kind.forward in forwards:
        refused = "" if getattr(module, "relative_position_bias_table", None) is None else _REFUSED["RelPosAttention"]
        return Found(name, module, module.num_heads, module, by=ScaledDotProduct, refused=refused)
    if kind.__module__.startswith("timm.") and kind.__name__ in _REFUSED:
        return Found(name, module, refused=_REFUSED[kind.__name__])
    return None
