"""timm's attention over one sequence of tokens: its forward, with `scaled_dot_product_attention` replaced by `attend`.

Projections, norms of queries and keys, rotary embeddings, gates and grouped keys run the code of the installed version;
only the attention call is replaced.
"""

from __future__ import annotations

import sys
from typing import Any

from ._rule import Candidate, original_class
from ._scaled_dot_product import ScaledDotProduct

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


class Attention(ScaledDotProduct):
    """Converted attention module of timm."""

    @property
    def fused_attn(self) -> bool:
        """True, so that timm's modules call `scaled_dot_product_attention`."""
        return True


def candidate_of(name: str, module: Any) -> Candidate | None:
    """Return the `Candidate` of a module of a class in `_SUPPORTED` or `_UNSUPPORTED`; None for any other module.

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
        return Candidate(name, module, module.num_heads, module, converted_class=Attention, refusal=refusal)
    if kind.__module__.startswith("timm.") and kind.__name__ in _UNSUPPORTED:
        return Candidate(name, module, refusal=_UNSUPPORTED[kind.__name__])
    return None
