"""Dispatch of an attention call to the chosen engine."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..masks import Bound, Layout
from ..masks.core import Expression, device_kind, outside_torch_modes
from ._call import Call
from ._features import Features
from ._merge import merge, sum_dtype, without_keys
from ._operands import one_width
from ._reference import exports_to_onnx, reference_attention
from ._tables import ListedParts, listed_parts
from .aten import aten
from .flex import flash_sides, flex, on_flash, portable

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


def run(
    engine: str,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    bindings: list[Tensor],
    call: Call,
    features: Features,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"] | None]:
    """Return (out, natural lse) of attention, computed by the named engine, which must support the call.

    bindings: the pattern's run-time tensors, sorted by name.
    call: pattern and sizes.

    The lse may be None without features.return_lse. Without queries, keys or batch entries, out is 0 and lse is -inf,
    or the sinks if there are any. Otherwise raises ValueError for an unknown engine.
    """
    if 0 in q.shape or 0 in k.shape:
        return without_keys(q, k, v, features.sinks)
    if engine in ("aten", "flash") and q.shape[-1] != v.shape[-1]:
        out, lse = run(engine, *one_width(q, k, v), bindings, call, features)
        return out[..., : v.shape[-1]], lse
    if engine == "aten":
        return aten(q, k, v, features.sinks, bindings, *call.arguments, features.scale)
    if engine == "reference":
        return _run_reference(q, k, v, bindings, call, features)
    if engine == "portable":
        return portable(q, k, v, bindings, call, features)
    if engine not in ("flex", "flash"):
        raise ValueError(f"no engine is called {engine!r}")
    if engine == "flash":
        call = call._replace(block_size=call.block_size or flash_sides(q.device, q.shape[-1]))
        features = features._replace(kernel_options=on_flash(features.kernel_options))
    listed = _split_by_key_table(call, features) if device_kind(q.device).flex_trains else None
    if listed is None:
        return flex(q, k, v, bindings, call, features)
    return _run_with_listed_keys(listed, q, k, v, bindings, call, features)


def _split_by_key_table(call: Call, features: Features) -> ListedParts | None:
    """Return the split of a call's pattern by its table of single keys; None if engine flex computes all pairs."""
    if call.placement or call.rate > 1 or (features.score_mod is not None and torch.compiler.is_compiling()):
        return None
    listed = listed_parts(call.pattern)
    return None if listed is None or (features.drops and not listed.keeps_places) else listed


def _run_with_listed_keys(
    listed: ListedParts,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    call: Call,
    features: Features,
) -> tuple[Tensor, Tensor]:
    """Return (out, natural lse) of a call: pairs of the table by engine portable, other pairs by flex, merged.

    listed: split of the call's pattern.
    """
    if not listed.others:
        return portable(q, k, v, bindings, call, features)
    plain = features._replace(sinks=None, return_lse=True)
    own, others = ([bindings[at] for at in some] for some in (listed.own_bindings, listed.other_bindings))
    out, lse = portable(q, k, v, own, call._replace(pattern=listed.own), plain)
    beside, beside_lse = flex(q, k, v, others, call._replace(pattern=listed.others), plain)
    assert beside_lse is not None
    sinks = [] if features.sinks is None else [features.sinks[:, None]]
    out, lse = merge([(out, lse), (beside, beside_lse)], sinks)
    return out.to(q.dtype), lse


def _run_reference(
    q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], call: Call, features: Features
) -> tuple[Tensor, Tensor]:
    queries, keys = call.layout, Layout(call.num_keys, call.rate)
    natural = queries.invert(q), keys.invert(k), keys.invert(v)
    rule = call.rules(bindings)  # reads values of run-time tensors
    if exports_to_onnx():
        out, lse = reference_attention(*natural, _bound_of_any_size(call, rule), features, dtype=sum_dtype(q))
    else:
        out, lse = reference_attention(*natural, outside_torch_modes(call.bound)(rule), features)
    return queries.apply(out), queries.apply(lse, dim=-1).to(sum_dtype(q))


def _bound_of_any_size(call: Call, rule: Expression) -> Bound:
    """Return a Bound of `rule` with the call's sizes, of which symbolic ones stay symbolic.

    `bind` checks positions, which would make symbolic sizes constant.
    """
    if not any(isinstance(number, torch.SymInt) for number in call):
        return outside_torch_modes(call.bound)(rule)
    heads = (call.num_heads, call.head_offset, call.num_heads_global)
    return Bound(rule, call.num_queries, call.num_keys, *heads, call.q_offset, call.k_offset, batch=1)
