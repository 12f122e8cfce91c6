"""x-transformers' `Attention`: its submodule `attend`, the attention between its projections, is converted.

Rotary embeddings, norms of queries and keys, value gates, caches and memories belong to the outer module and stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..._attend import attend
from ._rule import Candidate, Converted, ancestors, check_lengths, pattern_of_call

_WEIGHTS = "attention weights, which are never formed"
_BIAS = "adds a bias to each pair's score"

# Unsupported attributes of an `Attention`, its `attend`, and its enclosing layers: attribute -> reason.
_NOT_IN_ATTENTION = {
    "num_mem_kv": "num_mem_kv puts keys that have no position before the others",
    "max_attend_past": "max_attend_past is a rule of its own: write it as masks.local_window in the pattern",
    "data_dependent_alibi": f"data_dependent_alibi {_BIAS}",
    "rel_proj_pos_bias": f"rel_proj_pos_bias {_BIAS}",
}
_NOT_IN_ATTEND = {
    "pre_softmax_talking_heads": f"talking heads mix {_WEIGHTS}",
    "post_softmax_talking_heads": f"talking heads mix {_WEIGHTS}",
    "pre_scale_post_talking_heads": f"talking heads mix {_WEIGHTS}",
    "selective": "selective attention changes scores by other scores",
    "cog_signed": f"cog_signed gives signs to {_WEIGHTS}",
    "l2_distance": "l2_distance has scores that are no dot products",
    "add_zero_kv": "add_zero_kv puts a key that has no position before the others",
    "softclamp_logits": "softclamp_logits caps scores",
    "cope": f"CoPE {_BIAS}",
    "inverted_attention": "inverted_attention takes its softmax over queries",
    "flash_pack_seq": "flash_pack_seq calls another package: masks.documents is the pattern of packed sequences",
}
_NOT_IN_LAYERS = {
    "rel_pos": f"the position bias of its layers (ALiBi, T5's and the like) {_BIAS}",
    "polar_pos_emb": "polar_pos_emb gives queries and keys twice the width of values",
    "residual_attn": f"residual_attn hands on {_WEIGHTS}",
    "cross_residual_attn": f"cross_residual_attn hands on {_WEIGHTS}",
}


class Attend(Converted):
    """x-transformers' `Attend`, with a pattern: it takes the same arguments, but returns no scores or weights."""

    causal: bool
    flash: bool
    dropout: float
    attn_dropout: nn.Dropout
    scale: float | None
    head_attn_sink: nn.Parameter | None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        prev_attn: Tensor | None = None,
        attn_delta: Tensor | None = None,
        row_mask: Tensor | None = None,
        flash_pack_seq_kwargs: dict[str, Any] | None = None,
        causal: bool | None = None,
    ) -> tuple[Tensor, Any]:
        """Return (output (B, H, N, D), x-transformers' `Intermediates` without scores and weights).

        Arguments as in x-transformers. row_mask and flash_pack_seq_kwargs are ignored: `candidate_of` refuses the
        options that use them. causal: None for the module's attribute; if True, the N queries have the last N of the M
        key positions, as with a cache. In training, dropout is applied to the attention weights. Raises ValueError for
        attn_bias, prev_attn and attn_delta other than None, for a mask that is neither padding nor causal, and, without
        causal order, for N != M unless a function chose the pattern.
        """
        given = self._flexdilated
        assert given is not None
        for name, value in (("attn_bias", attn_bias), ("prev_attn", prev_attn), ("attn_delta", attn_delta)):
            if value is not None:
                raise ValueError(
                    f"{given.label} was called with {name}, which needs scores or {_WEIGHTS}: leave {name} out"
                )
        dropout_p = (self.dropout if self.flash else self.attn_dropout.p) if self.training else 0.0
        is_causal = self.causal if causal is None else causal
        if not is_causal:
            check_lengths(given, q.shape[2], k.shape[2])
        mask = mask[:, None, None] if mask is not None and mask.dim() == 2 else mask
        rule = pattern_of_call(given.pattern, mask, (q.shape[0], q.shape[2], k.shape[2]), is_causal=is_causal)
        if 1 < k.shape[1] < q.shape[1]:  # here query head h reads key head h mod G, unlike with enable_gqa
            k, v = (x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v))
        offset = k.shape[2] - q.shape[2] if is_causal else 0
        options: dict[str, Any] = {"scale": self.scale, "sinks": self.head_attn_sink, "q_offset": offset}
        out = attend(q, k, v, rule, dropout_p=dropout_p, enable_gqa=True, **options)
        return out, sys.modules[self.original.__module__].Intermediates()


def candidate_of(name: str, module: Any, model: nn.Module) -> Candidate | None:
    """Return the `Candidate` of a module of x-transformers' class `Attention`; None for any other module.

    name: name of the module in `model`.

    For unsupported options, `refusal` of the result is the reason.
    """
    library = sys.modules.get("x_transformers.x_transformers")
    if library is None or not isinstance(module, library.Attention):
        return None
    above = ancestors(name, model)
    layers: Any = next((each for each in reversed(above) if isinstance(each, library.AttentionLayers)), None)
    is_cross = layers is not None and _layer_type(module, layers) == "c"
    return Candidate(
        name,
        module,
        module.heads,
        module.attend,
        converted_class=Attend,
        refusal=_refusal_reason(module, layers, is_cross=is_cross),
        cross_reason="cross-attention of its layers" if is_cross else "",
    )


def _layer_type(module: nn.Module, layers: Any) -> str | None:
    """Return the type of the layer that contains `module`, such as "a" or "c" for self- or cross-attention.

    Returns None if no layer contains it.

    layers: an AttentionLayers of x-transformers.
    """
    held = zip(layers.layer_types, layers.layers, strict=False)
    return next((kind for kind, layer in held if any(each is module for each in layer.modules())), None)


def _refusal_reason(module: Any, layers: Any, *, is_cross: bool) -> str:
    not_in_layers = {name: why for name, why in _NOT_IN_LAYERS.items() if name.startswith("cross") == is_cross}
    for held, reasons in ((module, _NOT_IN_ATTENTION), (module.attend, _NOT_IN_ATTEND), (layers, not_in_layers)):
        for name, why in reasons.items():
            if getattr(held, name, None):  # a flag, a number, a module
                return why
    if not _is_softmax(module.attend.attn_fn):
        return "its weights are no softmax of the scores"
    if module.to_q.out_features // module.heads != module.to_v.out_features // module.kv_heads:
        return "its values have another width than its keys"
    return ""


def _is_softmax(function: Callable[..., Any]) -> bool:
    return isinstance(function, partial) and function.func is F.softmax and function.keywords.get("dim") == -1
