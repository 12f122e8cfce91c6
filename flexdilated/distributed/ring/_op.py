"""The ring as a custom op: attention over all ranks' tokens, whose keys and values arrive shard by shard.

It is opaque to torch.compile, which traces only its shapes and its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import WholeRows, add_sinks, autograd_on, flat_op, merge_, set_gradient
from ..group import PlainCall, as_promised, empty_rows
from ._plan import RingCall
from ._transfers import Gradients, Shard, rotate


@flat_op("flexdilated::ring")
def ring_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    call: PlainCall,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks; every rank must call it, and its backward.

    bindings: the pattern's run-time tensors, for the whole sequence, ordered by name. Each shard is sent directly from
    its owner to every rank that needs a key of it, while that rank computes with the previous shard. The backward sends
    it again, and its gradients return to the owner. The gradients of sinks must be summed over the ranks.

    A rank holds at most two shards of other ranks. Sums are in float32 or wider and in a fixed order. Codec "auto"
    keeps its error bound, for one collective of 8 bytes in each pass. Raises torch.distributed.DistError if another
    rank fails.
    """
    return run_forward(RingCall.of(call, q, k, v, bindings), q, k, v, sinks)


@ring_op.register_fake
def _(q, k, v, sinks, bindings, *options):
    return PlainCall.of(*options).rows_of(q)


@flat_op("flexdilated::ring_backward")
def ring_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bindings: list[Tensor],
    call: PlainCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `ring_op`, from out and lse over all keys."""
    return run_backward(RingCall.of(call, q, k, v, bindings), q, k, v, WholeRows(out, lse, grad_out, grad_lse))


@ring_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


set_gradient(
    ring_op,
    ring_backward_op,
    refusal="the ring has no second derivative; engine='reference' has one, on one rank (dense, small inputs)",
    over_ranks=True,
)


def run_forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out (B, H, L, D) in q's dtype, lse (B, H, L)); sums over shards are in float32 or wider."""
    if not len(call.own):  # no other rank sends to a rank without tokens, or waits for it
        return empty_rows(q)
    wide = torch.promote_types(q.dtype, torch.float32)
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
    return as_promised(out, q), lse.contiguous()


def run_backward(call: RingCall, q: Tensor, k: Tensor, v: Tensor, whole: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); receives the shards again, and sends the gradients of each directly to its owner."""
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
    return as_promised(dq, q), as_promised(dk, k), as_promised(dv, v)
