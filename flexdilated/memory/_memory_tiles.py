"""The tiles engine as a function of q, k and v in which every allocation can be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines import GATHERED_BYTES, CallKey, Calls, Program, Result, Step, program_of, run_backward, run_forward
from ..masks.core import Expression

# Enough of what repeats: this many steps of a kind, so that one has neighbours on both sides, and twice the problems
# of a call that the engine gathers at once.
_STEPS, _GATHERED_BYTES = 3, 2 * GATHERED_BYTES


def tiles_attention_of(
    key: CallKey, rule: Expression, *, key_bytes: int
) -> tuple[Callable[..., tuple[Tensor, Tensor]], int]:
    """(q, k, v) -> (out, lse) by the engine's own steps, without its operator around them; and its tables' bytes.

    `key_bytes` are those of a key and its value over the batch. Of steps that are alike only a few are taken, as
    what they hold is freed before others of their kind begin.
    """
    program = program_of(key, rule, "cpu", None, written=key.pattern)
    few = _few_of_each_kind(program, key_bytes)
    return lambda q, k, v: _Tiles.apply(q, k, v, few), program.nbytes


class _Tiles(torch.autograd.Function):
    """Keeps what the operator keeps."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, program: Program) -> tuple[Tensor, Tensor]:
        out, lse = run_forward(program, q, k, v, 1.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.program = program
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *run_backward(ctx.program, q, k, v, Result(out, lse, *grad_outputs), 1.0), None


def _few_of_each_kind(program: Program, key_bytes: int) -> Program:
    taken: Counter[object] = Counter()
    steps = []
    for step in program.steps:
        kind = _kind(step)
        taken[kind] += 1
        if taken[kind] <= _STEPS:
            few = None if step.calls is None else _few_problems(step.calls, key_bytes)
            steps.append(replace(step, calls=few))
    return replace(program, steps=tuple(steps))


def _kind(step: Step) -> object:
    """Sizes of all that a step allocates."""
    term = step.term
    sizes = len(term.heads), term.folds, term.q.num_slots, term.k.num_slots
    return term.shape, sizes, term.multiplicity, step.fresh, type(step.queries), id(step.calls)


def _few_problems(calls: Calls, key_bytes: int) -> Calls:
    few = (next(call.parts(1 + _GATHERED_BYTES // (call.keys.length * key_bytes)), call) for call in calls.calls)
    return replace(calls, calls=tuple(few))
