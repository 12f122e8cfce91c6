"""The tiles engine as a custom op: opaque to torch.compile, which sees its shapes and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ._call_key import CallKey
from ._tiles import Program, Result, make_program, run_backward, run_forward
from .masks import cache
from .masks._planner import plan


@torch.library.custom_op("flexdilated::tiles", mutates_args=())
def tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: str,
    scale: float,
    q_offset: int,
    head_offset: int,
    num_heads_global: int,
    rate: int,
    block_size: list[int],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a pattern in JSON; the plan is looked up when the op runs, so any size needs no retracing."""
    program = _program(q, k, pattern, q_offset, head_offset, num_heads_global, rate, block_size)
    return run_forward(program, q, k, v, scale)


@tiles.register_fake
def _(q, k, v, pattern, scale, q_offset, head_offset, num_heads_global, rate, block_size):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse


@torch.library.custom_op("flexdilated::tiles_backward", mutates_args=())
def tiles_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: str,
    scale: float,
    q_offset: int,
    head_offset: int,
    num_heads_global: int,
    rate: int,
    block_size: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `tiles`."""
    program = _program(q, k, pattern, q_offset, head_offset, num_heads_global, rate, block_size)
    return run_backward(program, q, k, v, Result(out, lse, grad_out, grad_lse), scale)


@tiles_backward.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, pattern, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx, inputs, output) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * (3 + len(ctx.options))
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = tiles_backward(grad_out, grad_lse, q, k, v, out, lse, *ctx.options)
    return *grads, *[None] * len(ctx.options)


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "the tiles engine has no second derivative; for double backward use engine='reference' (dense, small inputs)"
    )


tiles.register_autograd(_backward, setup_context=_setup)
tiles_backward.register_autograd(_no_double_backward)


def _program(q: Tensor, k: Tensor, pattern: str, *options) -> Program:
    """The cached program for these sizes."""
    q_offset, head_offset, num_heads_global, rate, block_size = options
    sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    key = CallKey(pattern, *sizes, q_offset, head_offset, num_heads_global, rate, tuple(block_size))

    def build() -> Program:
        best = plan(key.bound(), layout=key.layout)
        return make_program(best, key.layout, num_kv_heads=key.num_kv_heads, block_size=key.block_size)

    return cache().get(("tiles", key), build, lambda program: program.nbytes)
