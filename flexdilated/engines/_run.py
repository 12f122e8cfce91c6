"""Dispatch of an attention call to the chosen engine."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..masks import Bound, Layout
from ..masks.core import Expression, outside_torch_modes
from ._call import Call
from ._dropout import Dropout
from ._merge import nothing, sum_dtype
from ._operands import one_width
from ._reference import exports_to_onnx, reference_attention
from ._score_mod import ScoreMod
from .aten import aten
from .flex import BACKEND, Options, flash_sides, flex, options_text, portable

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


def run(
    engine: str,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    sinks: Float[Tensor, " H"] | None,
    bindings: list[Tensor],
    call: Call,
    scale: float,
    *,
    score_mod: ScoreMod | None = None,
    dropout: Dropout | None = None,
    return_lse: bool = True,
    kernel_options: Options = (),
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"] | None]:
    """Compute attention by the named engine, which must support the call; returns (out, natural lse).

    sinks: one logit per head, or None. bindings: the pattern's run-time tensors, sorted by name. call: pattern and
    sizes. scale: factor of q · k. return_lse: without it the lse may be None. kernel_options: FlexAttention's, for
    engines "flex" and "flash". Without queries or keys, out is 0 and lse is -inf, or the sinks if there are any.
    """
    if 0 in q.shape or 0 in k.shape:
        return nothing(q, k, v, sinks)
    features: dict[str, Any] = {"score_mod": score_mod, "return_lse": return_lse}
    if engine in ("aten", "flash") and q.shape[-1] != v.shape[-1]:
        features["kernel_options"] = kernel_options
        out, lse = run(engine, *one_width(q, k, v), sinks, bindings, call, scale, **features)
        return out[..., : v.shape[-1]], lse
    if engine == "aten":
        return aten(q, k, v, sinks, bindings, *call.arguments, scale)
    if engine == "reference":
        return _reference(q, k, v, sinks, bindings, call, scale, score_mod, dropout)
    if engine == "portable":
        return portable(q, k, v, sinks, bindings, call, scale, score_mod=score_mod, dropout=dropout)
    if engine == "flash":
        kernel_options = (*kernel_options, (BACKEND, "FLASH"))
        call = call._replace(block_size=call.block_size or flash_sides(q.device, q.shape[-1]))
    features |= {"sinks": sinks, "dropout": dropout, "kernel_options": options_text(kernel_options)}
    return flex(q, k, v, bindings, call, scale=scale, **features)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    call: Call,
    scale: float,
    score_mod: ScoreMod | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    queries, keys = call.layout, Layout(call.num_keys, call.rate)
    natural = queries.invert(q), keys.invert(k), keys.invert(v)
    rule = call.rules(bindings)  # reads values of run-time tensors
    features: dict[str, Any] = {"score_mod": score_mod, "dropout": dropout, "sinks": sinks}
    if exports_to_onnx():
        bound, features["dtype"] = _bound_of_any_size(call, rule), sum_dtype(q)
    else:
        bound = outside_torch_modes(call.bound)(rule)
    out, lse = reference_attention(*natural, bound, scale=scale, **features)
    return queries.apply(out), queries.apply(lse, dim=-1).to(sum_dtype(q))


def _bound_of_any_size(call: Call, rule: Expression) -> Bound:
    """Return the call's Bound. Symbolic sizes of a graph are kept; `bind` would specialize them to check positions."""
    if not any(isinstance(number, torch.SymInt) for number in call):
        return outside_torch_modes(call.bound)(rule)
    heads = (call.num_heads, call.head_offset, call.num_heads_global)
    return Bound(rule, call.num_queries, call.num_keys, *heads, call.q_offset, call.k_offset, batch=1)
