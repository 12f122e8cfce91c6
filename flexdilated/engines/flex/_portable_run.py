"""`Portable` runs a program of engine flex by plain torch operations; single keys of a table by these or by Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from ...masks.core import Recorded
from .._features import Features
from .._gather import merge_
from .._merge import OutAndLse, WholeRows, add_sinks, merge, sum_dtype, with_sinks, without_keys
from .._ops import autograd_on
from .._score_mod import ScoreMod
from ..kernels._portable import BlockProblems, Span, Weighting, attention, gradients, spans_of
from ._flex import in_plan_order, operands_of
from ._listed_keys import ListedKeys
from ._program import FlexProgram, FlexStep, tables_of

# B batch, H query heads, N queries, D head dim


@dataclass(frozen=True, eq=False)
class Portable:
    """Executable call of engine "portable": a program, features, and the pairs of a table of single keys.

    features: their score_mod is None, a `Recorded` or, in a graph, a function.
    spans: in a graph, the spans of each step; None eagerly, where the lengths of a step's block lists give its spans.
    of_table: the table's pairs, which are not in the program; None if the program has all pairs.
    """

    program: FlexProgram
    features: Features
    spans: tuple[tuple[Span, ...], ...] | None = None
    of_table: ListedKeys | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that score_mod reads; empty without a score_mod, and in a graph."""
        score_mod = self.features.score_mod
        return score_mod.tensors if isinstance(score_mod, Recorded) else ()

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that score_mod reads and that require a gradient."""
        return tuple(x for x in self.tensors if x.requires_grad)

    def reading(self, tensors: Sequence[Tensor]) -> Portable:
        """Return this Portable with other tensors in place of those that its score_mod reads.

        Without a score_mod, and in a graph, it is returned unchanged.
        """
        score_mod = self.features.score_mod
        if not isinstance(score_mod, Recorded):
            return self
        return replace(self, features=self.features._replace(score_mod=score_mod.reading(tensors)))

    def with_sinks(self, sinks: Tensor | None) -> Portable:
        return replace(self, features=self.features._replace(sinks=sinks))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, recorded: bool = False) -> tuple[Tensor, Tensor]:
        """Return (out in the dtype of q, natural lse in float32 or wider) of attention, sinks included.

        recorded: True where autograd or a graph records the operations; if False, some of them work in place.
        """
        sinks, parts = self.features.sinks, []
        if self.program.steps:
            wide = sum_dtype(q)
            parts.append(self._attention_of_steps(q.to(wide), k.to(wide), v.to(wide), recorded=recorded))
        if self.of_table is not None:
            dtype = q.dtype if not parts and sinks is None else None  # the result, if nothing is added to it
            weighting = self._weighting_of_table()
            parts.append(self.of_table.attention(weighting, q, k, v, dtype=dtype, recorded=recorded))
        if not parts:
            out, lse = without_keys(q, k, v, sinks)
            return out.contiguous(), lse
        out, lse = parts[0] if len(parts) == 1 else _merged(*parts, recorded=recorded)
        if sinks is not None:
            out, lse = (with_sinks if recorded else add_sinks)(out, lse, sinks)
        return out.to(q.dtype).contiguous(), lse.contiguous()

    def _attention_of_steps(self, q: Tensor, k: Tensor, v: Tensor, *, recorded: bool) -> tuple[Tensor, Tensor]:
        operands, total = in_plan_order(self.program.enter, q, k, v), None
        for index, step in enumerate(self.program.steps):
            hidden, (slots, rows, start) = step.hidden, step.queries
            own = operands_of(step, tables_of(step), *operands)
            spans = _spans(step, own[0]) if self.spans is None else self.spans[index]
            out, lse = attention(
                BlockProblems.of(step.mask, spans, *own[:2]), self._weighting_of_step(step), *own, recorded=recorded
            )
            out, lse = hidden.clear_queries(out, dim=2), hidden.clear_queries(lse, dim=2, value=-torch.inf)
            lse = lse + log(step.structure.multiplicity)
            part = slots.put(out, rows, start, q.shape[2], 0.0), slots.put(lse, rows, start, q.shape[2], -torch.inf)
            total = part if total is None else _merged(total, part, recorded=recorded)
        assert total is not None
        if self.program.enter is None:
            return total
        slots, rows, start = self.program.enter[0]
        out, lse = (slots.put(x, rows, start, q.shape[2], 0.0) for x in total)
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, whole: WholeRows) -> tuple[Tensor, ...]:
        """Return (dq, dk, dv, gradient of each tensor in `learned`), each in its tensor's dtype.

        The tensors in `learned` must be leaves.

        whole: results of the rows over all their keys, with the gradients of these results; k and v may have only some
            of the keys.
        """
        wide, grads = sum_dtype(q), None
        lse, delta = whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf), whole.delta()
        of_learned = [torch.zeros_like(x) for x in self.learned]
        if self.of_table is not None:
            x = q.detach(), k.detach(), v.detach()
            *grads, of_learned = self.of_table.gradients(self._weighting_of_table(), *x, lse, whole.grad_out, delta)
        if grads is None or self.program.steps:
            rows = lse, whole.grad_out.to(wide), delta
            of_steps = self._gradients_of_steps([x.detach().to(wide) for x in (q, k, v)], rows, of_learned)
            grads = of_steps if grads is None else [a.add_(b) for a, b in zip(grads, of_steps, strict=True)]
        return *(x.to(like.dtype).contiguous() for x, like in zip(grads, (q, k, v), strict=True)), *of_learned

    def _gradients_of_steps(
        self, x: Sequence[Tensor], rows: tuple[Tensor, Tensor, Tensor], of_learned: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return (dq, dk, dv) of x = (q, k, v) through the program's pairs.

        The gradients of the tensors in `learned` are added to of_learned, in place.

        rows: (lse, gradient of out, delta) of the whole rows, in the order of the tokens in x; lse is inf for rows
            without keys.
        """
        if self.program.enter is not None:
            slots, at, start = self.program.enter[0]
            lse, grad_out, delta = (slots.take(each, at, start, x[0].shape[2]) for each in rows)
            rows = lse, grad_out, delta
        with autograd_on():  # gradients pass the gathers by autograd
            leaves = [each.requires_grad_() for each in x]
            ordered = in_plan_order(self.program.enter, leaves[0], leaves[1], leaves[2])
        inner = [each.detach().requires_grad_() for each in ordered]
        for step in self.program.steps:
            with autograd_on():
                operands = [*operands_of(step, tables_of(step), inner[0], inner[1], inner[2])]
            *of_operands, of_read = self._gradients_of_step(step, operands, rows)
            for total, part in zip(of_learned, of_read, strict=True):
                total += part
            while operands:  # one at a time, each freed before the next gather
                torch.autograd.backward([operands.pop()], [of_operands.pop()])
        grads: Sequence[Tensor] = [torch.zeros_like(each) if each.grad is None else each.grad for each in inner]
        return grads if self.program.enter is None else torch.autograd.grad(ordered, leaves, grads)

    def _gradients_of_step(
        self, step: FlexStep, operands: Sequence[Tensor], rows: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return (dq, dk, dv, [gradient of each tensor in `learned`]) through a step's pairs.

        operands: the step's queries, keys and values, whose gradients are dq, dk and dv.
        rows: (lse, gradient of out, delta) of the whole rows, of all queries in the plan's order; lse is inf for rows
            without keys.
        """
        (slots, at, start), hidden = step.queries, step.hidden
        lse, grad_out, delta = (
            hidden.clear_queries(slots.take(each, at, start, operands[0].shape[2]), dim=2, value=value)
            for each, value in zip(rows, (torch.inf, 0.0, 0.0), strict=True)
        )
        q, k, v = (x.detach() for x in operands)
        problems = BlockProblems.of(step.mask, _spans(step, q), q, k)
        lse = lse - log(step.structure.multiplicity)
        return gradients(problems, self._weighting_of_step(step), q, k, v, lse, grad_out, delta)

    def _weighting_of_step(self, step: FlexStep) -> Weighting:
        places = step.structure.places
        if self.of_table is not None:
            places = tuple(self.of_table.places[place] for place in places)
        return self._weighting_at(places, step.indices.at_positions)

    def _weighting_of_table(self) -> Weighting:
        assert self.of_table is not None
        return self._weighting_at((self.of_table.place,), lambda function: function)

    def _weighting_at(self, places: tuple[int, ...], at: Callable[[ScoreMod], ScoreMod]) -> Weighting:
        """Return the `Weighting` of equal branches that are computed as one.

        places: indices of the branches in the call's pattern.
        at: turns a function of heads and positions into one of the kernel's indices.
        """
        shares, factor = None, 1.0
        dropout, score_mod = self.features.dropout, self.features.score_mod
        if dropout is not None:
            shares, factor = at(dropout.kept_counter(places)), 1 / (1 - dropout.p) / len(places)
        score_mod = None if score_mod is None else at(score_mod)
        return Weighting(self.features.scale, score_mod, self.learned, shares, factor)


def _merged(first: OutAndLse, second: OutAndLse, *, recorded: bool) -> OutAndLse:
    """Return (out, lse) of two parts, merged by lse.

    recorded: True if autograd or a graph records the merge; if False, `first` is overwritten with the result.
    """
    if recorded:
        return merge([first, second])
    merge_(*first, *second)
    return first


def _spans(step: FlexStep, q: Float[Tensor, "B H N D"]) -> tuple[Span, ...]:
    return spans_of(step.mask, step.list_lengths, q.shape[0] * q.shape[1])
