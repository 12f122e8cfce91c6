"""The exchange as custom ops: as a whole for tiles, the transfer of keys alone for engines that trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .._placed_call import WholeRows
from .._sinks import sinks_gradient
from ..masks._json import kept_functions, read_text
from ._exchange_call import ExchangeCall

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, M own and received tokens, D head dim


@torch.library.custom_op("flexdilated::exchange", mutates_args=())
def exchange_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    pattern: str,
    scale: float,
    head_offset: int,
    num_heads_global: int,
    engine: str,
    block_size: list[int],
    sharding: list[int],
    group: str,
    codec: str | None,
    error_bound: float,
    pool: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks; and the keys and values that were used."""
    heads, sending = (head_offset, num_heads_global), (sharding, group, codec, error_bound, pool)
    return _call(pattern, scale, *heads, engine, block_size, *sending).forward(q, k, v, sinks, bindings)


@exchange_op.register_fake
def _(q, k, v, sinks, bindings, *options):
    read_text(options[0]).check_heads(int(options[3]))  # `attend` leaves it to this rule where it is traced
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse, *_empty_keys(q, k, bindings, _call(*options))


@torch.library.custom_op("flexdilated::exchange_backward", mutates_args=())
def exchange_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bindings: list[Tensor],
    pattern: str,
    scale: float,
    head_offset: int,
    num_heads_global: int,
    engine: str,
    block_size: list[int],
    sharding: list[int],
    group: str,
    codec: str | None,
    error_bound: float,
    pool: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's own tensors; k and v are those that the forward returned."""
    heads, sending = (head_offset, num_heads_global), (sharding, group, codec, error_bound, pool)
    return _call(pattern, scale, *heads, engine, block_size, *sending).backward(
        q, k, v, bindings, WholeRows(out, lse, grad_out, grad_lse)
    )


@exchange_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, bindings, *options):
    own = (k.shape[0], k.shape[1], q.shape[2], k.shape[3])
    return torch.empty_like(q), k.new_empty(own), v.new_empty(own)


@torch.library.custom_op("flexdilated::exchange_keys", mutates_args=())
def exchange_keys_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    pattern: str,
    scale: float,
    head_offset: int,
    num_heads_global: int,
    engine: str,
    block_size: list[int],
    sharding: list[int],
    group: str,
    codec: str | None,
    error_bound: float,
    pool: str,
) -> tuple[Tensor, Tensor]:
    """(k, v) with those that the queries need of other ranks; of q only its shape is used."""
    heads, sending = (head_offset, num_heads_global), (sharding, group, codec, error_bound, pool)
    call = _call(pattern, scale, *heads, engine, block_size, *sending)
    return call.bring(k, v, call.wires(q.shape[1], k.shape[1], bindings))


@exchange_keys_op.register_fake
def _(q, k, v, bindings, *options):
    return _empty_keys(q, k, bindings, _call(*options))


@torch.library.custom_op("flexdilated::exchange_keys_backward", mutates_args=())
def exchange_keys_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    bindings: list[Tensor],
    pattern: str,
    scale: float,
    head_offset: int,
    num_heads_global: int,
    engine: str,
    block_size: list[int],
    sharding: list[int],
    group: str,
    codec: str | None,
    error_bound: float,
    pool: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's own k and v from those of own and received ones."""
    heads, sending = (head_offset, num_heads_global), (sharding, group, codec, error_bound, pool)
    call = _call(pattern, scale, *heads, engine, block_size, *sending)
    found = call.give_back(k, v, dk, dv, call.wires(q.shape[1], k.shape[1], bindings))
    return found[0].to(dk.dtype), found[1].to(dv.dtype)


@exchange_keys_backward_op.register_fake
def _(q, k, v, dk, dv, bindings, *options):
    return torch.empty_like(k, memory_format=torch.contiguous_format), v.new_empty(v.shape)


def _call(*options: Any) -> ExchangeCall:
    """From an op's arguments: tracing hands over sizes that are no plain integers."""
    pattern, scale, head_offset, num_heads_global, engine, sides, sharding, *sending = options
    heads = int(head_offset), int(num_heads_global)
    numbers = tuple(map(int, sides)), tuple(map(int, sharding))
    return ExchangeCall(pattern, scale, *heads, engine, *numbers, *sending)


def _empty_keys(q: Tensor, k: Tensor, bindings: list[Tensor], call: ExchangeCall) -> tuple[Tensor, Tensor]:
    """Own and received keys and values: how many depends on the values of run-time tensors, if there are any."""
    if bindings:
        num_keys = torch.library.get_ctx().new_dynamic_size()
    else:
        with unset_fake_temporarily():
            num_keys = call.wires(int(q.shape[1]), int(k.shape[1]), []).num_keys
    return tuple(k.new_empty(k.shape[0], k.shape[1], num_keys, k.shape[3]) for _ in range(2))  # pyright: ignore[reportReturnType]


def _setup(ctx, inputs, output) -> None:
    q, _, _, sinks, bindings, *options = inputs
    out, lse, k, v = output
    ctx.save_for_backward(q, k, v, sinks, out, lse, *bindings)
    ctx.options = options
    ctx.kept = kept_functions(options[0])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse, *_):
    q, k, v, sinks, out, lse, *bindings = ctx.saved_tensors
    without = _no_gradients(bindings, ctx.options)
    if grad_out is None:
        grad_out = torch.zeros_like(out)  # other ranks wait for what this one returns
    grads = exchange_backward_op(grad_out, grad_lse, q, k, v, out, lse, bindings, *ctx.options)
    grad_sinks = None
    if sinks is not None and ctx.needs_input_grad[3]:
        grad_sinks = sinks_gradient(sinks, out, lse, grad_out, grad_lse)
    return *grads, grad_sinks, *without


def _setup_keys(ctx, inputs, output) -> None:
    q, k, v, bindings, *options = inputs
    ctx.save_for_backward(q, k, v, *bindings)
    ctx.options = options


def _keys_backward(ctx, dk, dv):
    q, k, v, *bindings = ctx.saved_tensors
    grads = exchange_keys_backward_op(q, k, v, dk.contiguous(), dv.contiguous(), bindings, *ctx.options)
    return None, *grads, *_no_gradients(bindings, ctx.options)


def _no_gradients(bindings: list[Tensor], options: list[Any]) -> list[Any]:
    # An empty list, such as a block size that was left open, counts as a list of tensors there.
    return [[None] * len(bindings), *([] if option == [] else None for option in options)]


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "the exchange has no second derivative; engine='reference' has one, on one rank (dense, small inputs)"
    )


exchange_op.register_autograd(_backward, setup_context=_setup)
exchange_backward_op.register_autograd(_no_double_backward)
exchange_keys_op.register_autograd(_keys_backward, setup_context=_setup_keys)
exchange_keys_backward_op.register_autograd(_no_double_backward)
