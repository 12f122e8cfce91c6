"""Engine "portable": runs the programs of engine flex by plain torch operations, with one gradient for all steps.

The backward keeps only q, k, v, the output and its lse. A call without a score_mod is a custom op, so torch.compile can
take it. A score_mod is a Python function, which ops cannot take, so calls with one run eagerly only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .._call import Call, check_heads
from .._dropout import Dropout, with_seed, without_seed
from .._gather import merge_
from .._merge import WholeRows, add_sinks, nothing, sinks_gradient, sum_dtype
from .._ops import autograd_on, own_op, refuse, set_gradient
from .._score_mod import ScoreMod, checked
from ..kernels._portable import Scores, attention, captured_by, gradients
from ._flex import entered, operands_of
from ._flex_op import run_time_program, static_program
from ._program import FlexProgram, FlexStep, tables_of

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values

_NO_SECOND = (
    "the portable engine has no second derivative; for double backward use engine='reference' (dense, small inputs)"
)


def portable(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    sinks: Float[Tensor, " H"] | None,
    bindings: list[Tensor],
    call: Call,
    scale: float,
    *,
    score_mod: ScoreMod | None = None,
    dropout: Dropout | None = None,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Compute a call by engine "portable"; returns (out in the dtype of q, natural lse in float32 or wider).

    bindings: the pattern's run-time tensors, sorted by name. sinks: one logit for each head, or None. Gradients reach
    q, k, v, sinks and every tensor that score_mod captures.
    """
    if score_mod is None:
        tensors, p = with_seed(bindings, dropout)
        return portable_op(q, k, v, sinks, tensors, *call.arguments, scale, p)
    return run_with_score_mod(Portable(_program(call, q, bindings), scale, score_mod, dropout), q, k, v, sinks)


def run_with_score_mod(
    run: Portable, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Run a program with a score_mod, eagerly; returns (out in the dtype of q, natural lse in float32 or wider)."""
    assert run.score_mod is not None
    out, lse = _WithScoreMod.apply(run, q, k, v, sinks, *captured_by(run.score_mod, q))
    return out, lse


def _program(call: Call, q: Tensor, bindings: list[Tensor]) -> FlexProgram:
    if bindings:
        return run_time_program(call, q.device, bindings, len(q), call.operands(q))
    return static_program(call, q.device, None, call.operands(q))


@dataclass(frozen=True, eq=False)
class Portable:
    """A program with the options of one call: scale of the scores, score_mod and dropout."""

    program: FlexProgram
    scale: float
    score_mod: ScoreMod | None = None
    dropout: Dropout | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out in the dtype of q, natural lse in float32 or wider), without autograd."""
        steps, wide = self.program.steps, sum_dtype(q)
        if not steps:
            out, lse = nothing(q, k, v, sinks)
            return out.contiguous(), lse
        operands, total = entered(self.program.enter, q.to(wide), k.to(wide), v.to(wide)), None
        for step in steps:
            hidden, (slots, rows, start) = step.hidden, step.queries
            out, lse = attention(step.mask, self._scores(step), *operands_of(step, tables_of(step), *operands))
            out, lse = hidden.clear_queries(out, dim=2), hidden.clear_queries(lse, dim=2, value=-torch.inf)
            lse = lse + log(step.structure.multiplicity)
            part = slots.put(out, rows, start, q.shape[2], 0.0), slots.put(lse, rows, start, q.shape[2], -torch.inf)
            if total is None:
                total = part
            else:
                merge_(*total, *part)
        assert total is not None
        out, lse = total if sinks is None else add_sinks(*total, sinks)
        if self.program.enter is not None:
            slots, rows, start = self.program.enter[0]
            out, lse = (slots.put(x, rows, start, q.shape[2], 0.0) for x in (out, lse))
        return out.to(q.dtype).contiguous(), lse.contiguous()

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: WholeRows, captured: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Return (dq, dk, dv, gradient of each captured tensor), each in its tensor's dtype.

        whole: results of the rows over all keys, with their gradients; k and v may contain only a part of these keys.
        """
        wide = sum_dtype(q)
        lse = whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf)
        grad_out, delta = whole.grad_out.to(wide), whole.delta()
        if self.program.enter is not None:
            slots, rows, start = self.program.enter[0]
            lse, grad_out, delta = (slots.take(x, rows, start, q.shape[2]) for x in (lse, grad_out, delta))
        with autograd_on():  # gradients pass the gathers by autograd
            leaves = [x.detach().to(wide).requires_grad_() for x in (q, k, v)]
            ordered = entered(self.program.enter, leaves[0], leaves[1], leaves[2])
        inner = [x.detach().requires_grad_() for x in ordered]
        of_captured = [torch.zeros_like(x) for x in captured]
        for step in self.program.steps:
            hidden, (slots, rows, start) = step.hidden, step.queries
            with autograd_on():
                operands = [*operands_of(step, tables_of(step), inner[0], inner[1], inner[2])]
            taken = (slots.take(x, rows, start, operands[0].shape[2]) for x in (lse, grad_out, delta))
            whole_rows = (
                hidden.clear_queries(x, dim=2, value=value)
                for x, value in zip(taken, (torch.inf, 0.0, 0.0), strict=True)
            )
            found = self._gradients(step, operands, captured, *whole_rows)
            for total in reversed(of_captured):
                total += found.pop()
            while operands:  # one at a time, each freed before the next gather
                torch.autograd.backward([operands.pop()], [found.pop()])
        grads: Sequence[Tensor] = [torch.zeros_like(x) if x.grad is None else x.grad for x in inner]
        if self.program.enter is not None:
            grads = torch.autograd.grad(ordered, leaves, grads)
        return *(x.to(like.dtype).contiguous() for x, like in zip(grads, (q, k, v), strict=True)), *of_captured

    def _gradients(
        self,
        step: FlexStep,
        operands: Sequence[Tensor],
        captured: Sequence[Tensor],
        lse: Tensor,
        grad_out: Tensor,
        delta: Tensor,
    ) -> list[Tensor]:
        """Gradients of a step's operands and of the captured tensors; the other arguments: as in `gradients`."""
        q, k, v = (x.detach() for x in operands)
        lse = lse - log(step.structure.multiplicity)
        return [*gradients(step.mask, self._scores(step, captured), q, k, v, lse, grad_out, delta)]

    def _scores(self, step: FlexStep, captured: Sequence[Tensor] = ()) -> Scores:
        at, shares, factor = step.indices.at_positions, None, 1.0
        if self.dropout is not None:
            places = step.structure.places
            shares, factor = at(self.dropout.shares(places)), 1 / (1 - self.dropout.p) / len(places)
        return Scores(self.scale, self.score_mod and at(checked(self.score_mod)), captured, shares, factor)


class _WithScoreMod(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Portable, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *captured: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = run.forward(q, k, v, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *captured)
        ctx.run = run
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks, out, lse, *captured = ctx.saved_tensors
        whole = WholeRows(out, lse, *grads)
        with torch.autocast(q.device.type, enabled=False), torch.no_grad():
            found = ctx.run.backward(q, k, v, whole, captured)
            of_sinks = None if sinks is None else sinks_gradient(sinks, whole)
        found = [*found[:3], of_sinks, *found[3:]]
        if torch.is_grad_enabled():  # create_graph=True
            given = [x for x in ctx.saved_tensors if x is not None]
            found = [x if x is None else _Final.apply(x, *grads, *given) for x in found]
        return None, *found


class _Final(torch.autograd.Function):
    """Autograd function (x, *inputs) -> copy of x, where x is a gradient computed from `inputs`.

    Autograd thereby records that x depends on them: a second derivative reaches this function, and raises RuntimeError.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        return x.clone()

    backward = staticmethod(refuse(_NO_SECOND))


def portable_gradients(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    whole: WholeRows,
    scale: float,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of a call, in the dtypes of q, k and v.

    bindings: the pattern's run-time tensors, sorted by name. whole: out, lse and their gradients for the rows, possibly
    over more keys than those of the call, and with sinks.
    """
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = Portable(_program(call, q, bindings), scale, None, dropout).backward(q, k, v, whole)
    return dq, dk, dv


@own_op("flexdilated::portable")
def portable_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
    k_offset: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Compute a call without a score_mod; returns (out in the dtype of q, natural lse in float32 or wider).

    bindings: run-time tensors, if dropout_p > 0 followed by the seed of dropout. constants, q_offset, k_offset: as from
    `Call.arguments`.
    """
    call = Call.of(q, k, constants, q_offset, k_offset)
    bindings, dropout = without_seed(bindings, dropout_p)
    with torch.autocast(q.device.type, enabled=False):
        return Portable(_program(call, q, bindings), scale, None, dropout).forward(q, k, v, sinks)


@portable_op.register_fake
def _(q, k, v, sinks, bindings, constants, *options):
    check_heads(constants)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=sum_dtype(q))


@own_op("flexdilated::portable_backward")
def portable_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
    k_offset: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of `portable_op`, in the dtypes of q, k and v."""
    call, whole = Call.of(q, k, constants, q_offset, k_offset), WholeRows(out, lse, grad_out, grad_lse)
    bindings, dropout = without_seed(bindings, dropout_p)
    return portable_gradients(call, q, k, v, bindings, whole, scale, dropout)


@portable_backward.register_fake
def _(grad_out, grad_lse, q, k, v, *options):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


set_gradient(portable_op, portable_backward, refusal=_NO_SECOND)
