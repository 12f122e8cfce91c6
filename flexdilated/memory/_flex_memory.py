"""Allocations of the flex engine's compiled program: its gathers, kernels and merge, run on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..engines import CallKey, FlexProgram, FlexSide, FlexStep, allowed_on, make_flex_program
from ..masks.core import Expression
from ..masks.planning import Choice, Operands, plan

# B batch, H query heads of a term, G its key/value heads, N tokens, S slots, D head dim

_PLAIN_MERGE = 2  # parts up to which Inductor merges without a separate float32 sum

Attention = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v) -> (out, lse)


def flex_attention_of(
    key: CallKey, rule: Expression, operands: Operands, *, device: str, choice: Choice | None = None
) -> tuple[Attention, int]:
    """(a function (q, k, v) -> (out, lse) with the allocations of the compiled program, bytes of the program's tables).

    Inductor fuses everything around attention: a gather makes one tensor, and so does a merge. The plan is for
    `device`; tables and rows are built on the CPU, so no such device is needed.
    """
    how = {"device": device, "allowed": allowed_on(torch.device(device)), "choice": choice, "operands": operands}
    best = plan(key.bound(rule), **how)
    sizes = {"num_kv_heads": key.num_kv_heads, "block_size": key.sides}
    program = make_flex_program(best, key.layout, **sizes, device=torch.device("cpu"))
    return lambda q, k, v: _attention(program, q, k, v), program.nbytes


def _attention(program: FlexProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if not program.steps:
        return torch.zeros_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    parts, lses = zip(*_parts(program.steps, q, k, v), strict=True)
    whole = [step.queries.slots.kind == "all" for step in program.steps]
    if len(parts) == 1 and whole[0] and program.steps[0].hidden.queries is None:
        return parts[0], lses[0]
    return _Merge.apply(q.shape, whole, torch.is_grad_enabled(), *parts, *lses)


def _parts(steps: Sequence[FlexStep], q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(out, lse) of each step. Inductor gathers for two steps at once, so the next step's operands are alive too."""
    later = _operands(steps[0], q, k, v)
    for following in (*steps[1:], None):
        operands, later = later, () if following is None else _operands(following, q, k, v)
        part = _Kernel.apply(*operands)
        del operands
        yield part


def _operands(step: FlexStep, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    by_column, (q_side, k_side) = step.mask.q_num_blocks, step.structure.sides
    assert by_column is not None
    q_slots, k_slots = step.mask.kv_num_blocks.shape[2] * q_side, by_column.shape[2] * k_side
    queries = _gathered(step.queries, q, q_slots, step.hidden.queries is not None)
    keys, values = (_gathered(step.keys, x, k_slots, step.hidden.keys is not None) for x in (k, v))
    return queries, keys, values


def _gathered(side: FlexSide, x: Float[Tensor, "B X N D"], slots: int, cleared: bool) -> Float[Tensor, "B H S D"]:
    """One side of a term as its kernel reads it: x itself if every token is a slot and none is cleared."""
    kind, rows = side.slots.kind, side.rows
    if kind == "all":
        return _Gather.apply(x, x.shape) if cleared else x
    heads = x.shape[1] * side.slots.numbers[0] if rows.heads is None else len(rows.heads)
    if kind != "segments":
        slots = x.shape[2] if rows.listed is None else rows.listed.shape[1]
    return _Gather.apply(x, (x.shape[0], heads, slots, x.shape[3]))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int]) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return grad_outputs[0].new_empty(ctx.shape), None


class _Kernel(torch.autograd.Function):
    """Allocations of FlexAttention: out with the strides of q, float32 lse, and delta in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del delta
        return grads


class _Merge(torch.autograd.Function):
    """The merged rows. For the backward it keeps the rows of each gathered part, if there are several parts.

    For more than two parts it also keeps a float32 sum, and its backward has float32 rows for each gathered part,
    because Inductor makes separate kernels for them.
    """

    @staticmethod
    def forward(
        ctx: Any, shape: Sequence[int], whole: Sequence[bool], keeps: bool, *parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = len(whole)
        rows = whole.count(False) if count > 1 else 0
        ctx.parts = [(x.shape, x.dtype) for x in parts[:count]]
        ctx.wide = rows if count > _PLAIN_MERGE else 0
        ctx.shape, ctx.kept = shape, []
        ctx.set_materialize_grads(False)
        if keeps:
            ctx.kept = [parts[0].new_empty(shape) for _ in range(rows)]
            ctx.kept += [parts[0].new_empty(shape, dtype=torch.float32)] if ctx.wide else []
        return parts[0].new_empty(shape), parts[0].new_empty(shape[:3], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0]
        wide = [grad.new_empty(ctx.shape, dtype=torch.float32) for _ in range(ctx.wide)]
        grads = [grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.parts]
        ctx.kept.clear()
        del wide
        return None, None, None, *grads, *(None for _ in ctx.parts)
