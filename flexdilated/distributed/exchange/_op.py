"""The exchange as custom ops: a whole call for tiles, only the transfer of keys for engines that are traced."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ...engines import WholeRows, copies, flat_op, no_gradients, refuse, set_gradient
from ...masks.core import own_modes
from ..group import PlainCall
from ._call import ExchangeCall, Pair

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


@flat_op("flexdilated::exchange_attention")
def exchange_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    call: ExchangeCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, received k, received v) of this rank's queries over the keys of all ranks."""
    return call.forward(q, k, v, sinks, bindings)


@exchange_op.register_fake
def _(q, k, v, sinks, bindings, *options):
    call = ExchangeCall.of(*options)
    return *call.rows_of(q), *_empty_keys(q, k, bindings, call, own=False)


@flat_op("flexdilated::exchange_attention_backward")
def exchange_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_others: Tensor,
    v_others: Tensor,
    bindings: list[Tensor],
    call: ExchangeCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's tensors; k_others and v_others are the received keys that the forward returned."""
    return call.backward(q, k, v, (k_others, v_others), bindings, WholeRows(out, lse, grad_out, grad_lse))


@exchange_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, *others):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@flat_op("flexdilated::exchange_keys")
def exchange_keys_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    call: ExchangeCall,
) -> tuple[Tensor, Tensor]:
    """(k, v) of this rank followed by the received ones that its queries need; of q only the shape is used."""
    return call.bring(k, v, call.plan(q.shape[1], k.shape[1], bindings))


@exchange_keys_op.register_fake
def _(q, k, v, bindings, *options):
    return _empty_keys(q, k, bindings, ExchangeCall.of(*options), own=True)


@flat_op("flexdilated::exchange_keys_backward")
def exchange_keys_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    bindings: list[Tensor],
    call: ExchangeCall,
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of this rank's keys, from the gradients of own and received keys."""
    found = call.give_back(k, v, dk, dv, call.plan(q.shape[1], k.shape[1], bindings))
    return found[0].to(dk.dtype), found[1].to(dv.dtype)


@exchange_keys_backward_op.register_fake
def _(q, k, v, dk, dv, bindings, *options):
    return torch.empty_like(k, memory_format=torch.contiguous_format), v.new_empty(v.shape)


def _empty_keys(q: Tensor, k: Tensor, bindings: list[Tensor], call: ExchangeCall, *, own: bool) -> Pair:
    """Fake (k, v) received, preceded by this rank's if `own`; run-time tensors make their number data-dependent."""
    if bindings:
        num_keys = torch.library.get_ctx().new_dynamic_size()
    else:
        with own_modes():
            plan = call.plan(int(q.shape[1]), int(k.shape[1]), [])
            num_keys = (plan.both if own else plan.others).num_keys
    return tuple(k.new_empty(k.shape[0], k.shape[1], num_keys, k.shape[3]) for _ in range(2))  # pyright: ignore[reportReturnType]


def _setup_keys(ctx, inputs, output) -> None:
    q, k, v, bindings, *options = inputs
    ctx.save_for_backward(q, k, v, *copies(bindings))
    ctx.options = options


def _keys_backward(ctx, dk, dv):
    q, k, v, *bindings = ctx.saved_tensors
    grads = exchange_keys_backward_op(q, k, v, dk.contiguous(), dv.contiguous(), bindings, *ctx.options)
    return None, *grads, *no_gradients(bindings, ctx.options)


_REFUSAL = "the exchange has no second derivative; engine='reference' has one, on one rank (dense, small inputs)"

set_gradient(exchange_op, exchange_backward_op, refusal=_REFUSAL, over_ranks=True)
exchange_keys_op.register_autograd(_keys_backward, setup_context=_setup_keys)
exchange_keys_backward_op.register_autograd(refuse(_REFUSAL))


def exchange(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    sinks: Float[Tensor, " H"] | None,
    bindings: list[Tensor],
    call: PlainCall,
    *,
    return_lse: bool,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"] | None]:
    """(out, lse if requested) of this rank's queries over all ranks' keys; every rank must call it, and its backward.

    bindings: the pattern's run-time tensors, for the whole sequence, ordered by name. One all-to-all brings each
    (key/value head, token) that some query of this rank may attend to; in the backward another returns the gradients,
    which the owners add up in float32 or wider. With tiles the call is one op, which overlaps each transfer with work
    on this rank's keys; other engines are traced, and only the transfers are ops.

    Raises ValueError if the engine cannot serve the call, torch.distributed.DistError if another rank fails.
    """
    if call.engine != "tiles":
        return ExchangeCall(*call).traced(q, k, v, sinks, bindings, return_lse=return_lse)
    out, lse, _, _ = exchange_op(q, k, v, sinks, bindings, *call)
    return out, lse
