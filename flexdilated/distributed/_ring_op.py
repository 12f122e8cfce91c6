"""The ring as a custom op: attention over all ranks' tokens, whose keys and values come to a rank shard by shard.

It is opaque to torch.compile, which sees its shapes and its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines._flat_op import flat_op
from ..engines._op_gradient import set_gradient
from ..engines._placed_call import WholeRows
from ..masks.text._json import read_text
from ._plain_call import PlainCall
from ._ring_call import RingCall
from ._ring_passes import run_backward, run_forward


@flat_op("flexdilated::ring")
def ring_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    call: PlainCall,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks; every rank takes part, and in the backward too.

    `bindings` are the pattern's run-time tensors, of the whole sequence, in the order of their names. A shard goes
    straight from its owner to each rank that needs a key of it, while that rank computes with the one before; in the
    backward it goes again, and its gradients come back. The ranks' gradients of sinks add up to the whole.

    Two other ranks' shards are held at most. Sums are kept in float32 or wider, and added in one order. Codec "auto"
    keeps its error bound, for one collective of 8 bytes in each pass. Raises torch.distributed.DistError where another
    rank fails.
    """
    return run_forward(RingCall.of(call, q, k, v, bindings), q, k, v, sinks)


@ring_op.register_fake
def _(q, k, v, sinks, bindings, *options):
    call = PlainCall.of(*options)
    read_text(call.pattern).check_heads(call.num_heads_global)  # `attend` leaves it to this rule where it is traced
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse


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
    """(dq, dk, dv) of `ring_op`, from the out and lse over all keys."""
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
