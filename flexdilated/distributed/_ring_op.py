"""The ring as a custom op: opaque to torch.compile, which sees its shapes and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from .._placed_call import WholeRows
from .._sinks import sinks_gradient
from ..masks._json import kept_functions, read_text
from ._codec_choice import codec_for
from ._pools import pool_named
from ._ranks import Ranks
from ._ring_call import RingCall
from ._ring_passes import run_backward, run_forward
from ._sharding import Sharding


@torch.library.custom_op("flexdilated::ring", mutates_args=())
def ring_op(
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
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks."""
    where, sending = (head_offset, num_heads_global), (group, codec, error_bound, pool)
    call = _call(q, k, v, bindings, pattern, scale, *where, engine, block_size, sharding, *sending)
    return run_forward(call, q, k, v, sinks)


@ring_op.register_fake
def _(q, k, v, sinks, bindings, pattern, scale, head_offset, num_heads_global, *options):
    read_text(pattern).check_heads(int(num_heads_global))  # `attend` leaves it to this rule where it is traced
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse


@torch.library.custom_op("flexdilated::ring_backward", mutates_args=())
def ring_backward_op(
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
    """(dq, dk, dv) of `ring_op`, from the out and lse over all keys."""
    where, sending = (head_offset, num_heads_global), (group, codec, error_bound, pool)
    call = _call(q, k, v, bindings, pattern, scale, *where, engine, block_size, sharding, *sending)
    return run_backward(call, q, k, v, WholeRows(out, lse, grad_out, grad_lse))


@ring_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _call(
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
) -> RingCall:
    ranks = Ranks.named(group, q.device.type)
    return RingCall(
        ranks,
        Sharding.of(sharding),
        pattern,
        bindings,
        scale,
        q.shape[1],
        head_offset,
        num_heads_global,
        engine,
        tuple(block_size),
        # The CPU's kernels round what they give to the type of what they get, a time for each shard. They take as long
        # in float32 as in bfloat16.
        torch.promote_types(q.dtype, torch.float32) if engine == "tiles" else q.dtype,
        codec_for(codec, error_bound, k, v, ranks),  # pyright: ignore[reportArgumentType]
        pool_named(pool, q.device),
    )


def _setup(ctx, inputs, output) -> None:
    q, k, v, sinks, bindings, *options = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, *bindings)
    ctx.options = options
    ctx.kept = kept_functions(options[0])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, sinks, out, lse, *bindings = ctx.saved_tensors
    # An empty list, such as a block size that was left open, counts as a list of tensors there.
    without = [None] * len(bindings), *([] if option == [] else None for option in ctx.options)
    if grad_out is None and grad_lse is None:
        return None, None, None, None, *without
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = ring_backward_op(grad_out, grad_lse, q, k, v, out, lse, bindings, *ctx.options)
    grad_sinks = None
    if sinks is not None and ctx.needs_input_grad[3]:
        grad_sinks = sinks_gradient(sinks, out, lse, grad_out, grad_lse)
    return *grads, grad_sinks, *without


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "the ring has no second derivative; engine='reference' has one, on one rank (dense, small inputs)"
    )


ring_op.register_autograd(_backward, setup_context=_setup)
ring_backward_op.register_autograd(_no_double_backward)
