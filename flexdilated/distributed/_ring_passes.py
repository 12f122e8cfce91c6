"""The two passes of a ring on one rank: attention over all shards that come, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines._gather import merge_
from ..engines._placed_call import WholeRows
from ..engines._sinks import add_sinks
from ._autograd_on import autograd_on
from ._ring_call import RingCall
from ._ring_transfers import Gradients, Shard, rotate

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


def run_forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out (B, H, L, D) in q's dtype, lse (B, H, L)); the sums over shards are kept in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if not len(call.own):  # nobody sends to a rank without queries, nor waits for one without keys
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide)
    queries = q.to(call.dtype)
    sums: list[Tensor] = []

    def visit(shard: Shard) -> None:
        if not len(shard.part):
            return
        placed, bindings = call.with_keys_of(shard.part), list(call.bindings)
        out, lse = placed.forward(queries, shard.k, shard.v, None, bindings, wide=True)
        assert lse is not None
        if sums:
            merge_(sums[0], sums[1], out, lse)
        else:
            sums.extend((out.to(wide), lse.to(wide)))

    rotate(call, k, v, visit)
    out, lse = sums
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return _as(out, q), lse.contiguous()


def run_backward(call: RingCall, q: Tensor, k: Tensor, v: Tensor, whole: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): the shards come again, and the gradients of each go straight back to its owner."""
    if not len(call.own):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    gradients = Gradients(call, dk, dv)
    queries = q.to(call.dtype)
    rows = WholeRows(whole.out.to(call.dtype), whole.lse, whole.grad_out.to(call.dtype), whole.grad_lse)

    def visit(shard: Shard) -> None:
        found: list[Tensor] = []
        if len(shard.part):
            placed, bindings = call.with_keys_of(shard.part), list(call.bindings)
            with autograd_on():
                of_queries, *found = placed.backward(queries, shard.k, shard.v, bindings, rows)
            dq.add_(of_queries)
        if shard.turn is not None:
            gradients.exchange(shard.turn, [x.to(wide) for x in found])
        else:
            dk.add_(found[0])
            dv.add_(found[1])

    try:
        rotate(call, k, v, visit)
        gradients.settle()
    finally:
        gradients.close()
    return _as(dq, q), _as(dk, k), _as(dv, v)


def _as(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype and memory format of `like`: what the op's shape rule promises."""
    promised = torch.empty_like(like)
    return x if x.dtype == like.dtype and x.stride() == promised.stride() else promised.copy_(x)
