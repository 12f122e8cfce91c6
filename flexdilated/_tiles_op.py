"""The tiles engine as a custom op: opaque to torch.compile, which sees its shapes and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ._tiles import Program, Result, make_program, run_backward, run_forward
from .masks import from_json
from .masks._cache import cache
from .masks._layout import Layout
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


def _program(
    q: Tensor,
    k: Tensor,
    pattern: str,
    q_offset: int,
    head_offset: int,
    num_heads_global: int,
    rate: int,
    block_size: list[int],
) -> Program:
    """The cached program for these sizes."""
    num_heads, num_queries = q.shape[1:3]
    num_kv_heads, num_keys = k.shape[1:3]
    sides = (block_size[0], block_size[1])

    def build() -> Program:
        bound = from_json(pattern).bind(
            num_heads=num_heads,
            num_queries=num_queries,
            num_keys=num_keys,
            head_offset=head_offset,
            num_heads_global=num_heads_global,
            q_offset=q_offset,
        )
        given = Layout(num_queries, rate)
        return make_program(plan(bound, layout=given), given, num_kv_heads=num_kv_heads, block_size=sides)

    sizes = (num_heads, num_kv_heads, num_queries, num_keys, q_offset, head_offset, num_heads_global)
    return cache().get(("tiles", pattern, sizes, rate, sides), build, lambda program: program.nbytes)
