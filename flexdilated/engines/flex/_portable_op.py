"""Engine "portable": runs the programs of engine flex by plain torch operations, with one gradient for all steps.

For the backward are kept q, k, v, the output, its lse, and small tensors: sinks, run-time tensors, dropout's seed. A
call without a score_mod is a custom op. Ops take no functions: eagerly, a call with a score_mod is an autograd function
of the recorded operations, which also keeps the tensors that they read; torch.compile traces the score_mod into its
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...masks.core import Recorded
from ...masks.planning import KeyLists, lists_keys
from .._call import Call, check_heads
from .._dropout import with_seed, without_seed
from .._features import Features
from .._gather import merge_
from .._merge import OutAndLse, WholeRows, add_sinks, merge, nothing, sinks_gradient, sum_dtype, with_sinks
from .._ops import autograd_on, copies, functions_in, no_gradients, own_op, refuse, set_gradient
from .._score_mod import ScoreMod
from .._tables import table_problems, table_split_of, without_table
from ..kernels._key_lists import ListProblems
from ..kernels._portable import BlockProblems, ListLengths, Scores, Span, attention, gradients, spans_of
from ._flex import entered, operands_of
from ._flex_op import run_time_program, run_time_tables, static_program, with_tables
from ._program import NO_STEPS, FlexProgram, FlexStep, longest_lists, tables_of
from ._traced import MAKERS, traced

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values

_NO_THIRD = "the portable engine has no third derivative; engine='reference' has (dense, small inputs)"


def portable(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    bindings: list[Tensor],
    call: Call,
    features: Features,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Compute a call by engine "portable"; returns (out in the dtype of q, natural lse in float32 or wider).

    bindings: the pattern's run-time tensors, sorted by name.

    Gradients reach q, k, v, sinks and every tensor that score_mod reads.
    """
    if features.score_mod is None:
        tensors, p = with_seed(bindings, features.dropout)
        return portable_op(q, k, v, features.sinks, tensors, *call.arguments, features.scale, p)
    if torch.compiler.is_compiling():
        program, spans = traced("portable", q, k, bindings, call)
        program = with_tables(program, run_time_tables(q, k, bindings, *call.arguments)) if bindings else program
        with torch.autocast(q.device.type, enabled=False):
            return Portable(program, features, spans).forward(q, k, v, recorded=True)
    return run_with_score_mod(_run_of(call, q, bindings, features), q, k, v)


def _to_trace(call: Call, q: Tensor, bindings: list[Tensor]) -> tuple[FlexProgram, tuple[tuple[Span, ...], ...]]:
    """Return (program, spans of each step) for a graph, which cannot read the lengths of block lists from tables."""
    program = MAKERS["program"](call, q, bindings)

    def spans(step: FlexStep) -> tuple[Span, ...]:
        lengths = step.list_lengths
        if bindings:
            longest = [longest_lists(step.term, step.structure.sides)[0]] * len(lengths.counts)
            lengths = ListLengths(longest, longest)
        return spans_of(step.mask, lengths, int(q.shape[0]) * len(step.term.heads), in_graph=True)

    return program, tuple(map(spans, program.steps))


MAKERS["portable"] = _to_trace


def run_with_score_mod(
    run: Portable, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Run a program with a score_mod, eagerly; returns (out in the dtype of q, natural lse in float32 or wider)."""
    out, lse = _WithScoreMod.apply(run.reading(()).with_sinks(None), q, k, v, run.features.sinks, *run.tensors)
    return out, lse


def _run_of(call: Call, q: Tensor, bindings: list[Tensor], features: Features) -> Portable:
    selection = table_split_of(call)
    if selection is None or not lists_keys(selection.leaf.block):
        return Portable(_program(call, bindings, q), features)
    lists = KeyLists.of(table_problems(call, selection, bindings, len(q))).on(q.device)
    program = NO_STEPS if selection.others is None else _program(*without_table(call, selection, bindings), q)
    return Portable(program, features, of_table=ListedKeys(lists, call.first, selection.place, selection.places))


def _program(call: Call, bindings: list[Tensor], q: Tensor) -> FlexProgram:
    if bindings:
        return run_time_program(call, q.device, bindings, len(q), call.operands(q))
    return static_program(call, q.device, None, call.operands(q))


class ListedKeys(NamedTuple):
    """The pairs of a table of single keys, which are computed without a step of the program.

    first: (global index of the first head, position of the first query, position of the first key) of the call.
    place: index of the branch with the table among the branches of the pattern.
    places: the same index for each branch of the program.
    """

    lists: KeyLists
    first: tuple[int, int, int]
    place: int
    places: tuple[int, ...]

    def problems(self, q: Tensor, k: Tensor, v: Tensor) -> ListProblems:
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        row_bytes = (k.shape[3] + v.shape[3]) * k.element_size()
        return ListProblems(self.lists, sizes, self.first, row_bytes, is_meta=q.is_meta)


@dataclass(frozen=True, eq=False)
class Portable:
    """A program with the features of one call.

    features: its score_mod is a `Recorded`, or in a graph a function.
    spans: spans of each step, in a graph; None to read them from the steps' tables.
    of_table: further pairs, which are not in the program; None for none.
    """

    program: FlexProgram
    features: Features
    spans: tuple[tuple[Span, ...], ...] | None = None
    of_table: ListedKeys | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that score_mod reads; empty in a graph."""
        score_mod = self.features.score_mod
        return score_mod.tensors if isinstance(score_mod, Recorded) else ()

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that score_mod reads and that require a gradient."""
        return tuple(x for x in self.tensors if x.requires_grad)

    def reading(self, tensors: Sequence[Tensor]) -> Portable:
        """Return this Portable with other tensors in place of those that its score_mod reads."""
        score_mod = self.features.score_mod
        if not isinstance(score_mod, Recorded):
            return self
        return replace(self, features=self.features._replace(score_mod=score_mod.reading(tensors)))

    def with_sinks(self, sinks: Tensor | None) -> Portable:
        return replace(self, features=self.features._replace(sinks=sinks))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, recorded: bool = False) -> tuple[Tensor, Tensor]:
        """Return (out in the dtype of q, natural lse in float32 or wider).

        recorded: True where autograd or a graph records the operations, of which otherwise some work in place.
        """
        wide, sinks = sum_dtype(q), self.features.sinks
        x, found = (q.to(wide), k.to(wide), v.to(wide)), []
        if self.program.steps:
            found.append(self._of_steps(*x, recorded=recorded))
        if self.of_table is not None:
            found.append(attention(self.of_table.problems(*x), self._scores_of_table(), *x, recorded=recorded))
        if not found:
            out, lse = nothing(q, k, v, sinks)
            return out.contiguous(), lse
        out, lse = found[0] if len(found) == 1 else _merged(*found, recorded=recorded)
        if sinks is not None:
            out, lse = (with_sinks if recorded else add_sinks)(out, lse, sinks)
        return out.to(q.dtype).contiguous(), lse.contiguous()

    def _of_steps(self, q: Tensor, k: Tensor, v: Tensor, *, recorded: bool) -> tuple[Tensor, Tensor]:
        operands, total = entered(self.program.enter, q, k, v), None
        for index, step in enumerate(self.program.steps):
            hidden, (slots, rows, start) = step.hidden, step.queries
            own = operands_of(step, tables_of(step), *operands)
            spans = _spans(step, own[0]) if self.spans is None else self.spans[index]
            out, lse = attention(
                BlockProblems.of(step.mask, spans, *own[:2]), self._scores(step), *own, recorded=recorded
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

        The tensors in `learned` are leaves.

        whole: results of the rows over all keys, with their gradients; k and v may contain only a part of these keys.
        """
        wide = sum_dtype(q)
        rows = whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf), whole.grad_out.to(wide), whole.delta()
        of_learned = [torch.zeros_like(x) for x in self.learned]
        x, grads = [x.detach().to(wide) for x in (q, k, v)], None
        if self.of_table is not None:
            table = self.of_table.problems(x[0], x[1], x[2])
            found = gradients(table, self._scores_of_table(), x[0], x[1], x[2], *rows)
            grads, of_learned = found[:3], [*found[3:]]
        if grads is None or self.program.steps:
            beside = self._gradients_of_steps(x, rows, of_learned)
            grads = beside if grads is None else [total.add_(part) for total, part in zip(grads, beside, strict=True)]
        return *(x.to(like.dtype).contiguous() for x, like in zip(grads, (q, k, v), strict=True)), *of_learned

    def _gradients_of_steps(
        self, x: Sequence[Tensor], rows: tuple[Tensor, Tensor, Tensor], of_learned: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the gradients of x (q, k, v) in the program's pairs; those of `learned` are added to of_learned.

        rows: (lse, gradient of out, delta) of the whole rows.
        """
        if self.program.enter is not None:
            slots, at, start = self.program.enter[0]
            lse, grad_out, delta = (slots.take(each, at, start, x[0].shape[2]) for each in rows)
            rows = lse, grad_out, delta
        with autograd_on():  # gradients pass the gathers by autograd
            leaves = [each.requires_grad_() for each in x]
            ordered = entered(self.program.enter, leaves[0], leaves[1], leaves[2])
        inner = [each.detach().requires_grad_() for each in ordered]
        for step in self.program.steps:
            hidden, (slots, at, start) = step.hidden, step.queries
            with autograd_on():
                operands = [*operands_of(step, tables_of(step), inner[0], inner[1], inner[2])]
            taken = (slots.take(each, at, start, operands[0].shape[2]) for each in rows)
            whole_rows = (
                hidden.clear_queries(each, dim=2, value=value)
                for each, value in zip(taken, (torch.inf, 0.0, 0.0), strict=True)
            )
            found = self._gradients(step, operands, *whole_rows)
            for total in reversed(of_learned):
                total += found.pop()
            while operands:  # one at a time, each freed before the next gather
                torch.autograd.backward([operands.pop()], [found.pop()])
        grads: Sequence[Tensor] = [torch.zeros_like(each) if each.grad is None else each.grad for each in inner]
        return grads if self.program.enter is None else torch.autograd.grad(ordered, leaves, grads)

    def _gradients(
        self,
        step: FlexStep,
        operands: Sequence[Tensor],
        lse: Tensor,
        grad_out: Tensor,
        delta: Tensor,
    ) -> list[Tensor]:
        """Gradients of a step's operands (q, k, v) and of `learned`; lse, grad_out and delta: as in `gradients`."""
        q, k, v = (x.detach() for x in operands)
        lse = lse - log(step.structure.multiplicity)
        problems = BlockProblems.of(step.mask, _spans(step, q), q, k)
        return [*gradients(problems, self._scores(step), q, k, v, lse, grad_out, delta)]

    def _scores(self, step: FlexStep) -> Scores:
        places = step.structure.places
        if self.of_table is not None:
            places = tuple(self.of_table.places[place] for place in places)
        return self._scores_at(places, step.indices.at_positions)

    def _scores_of_table(self) -> Scores:
        assert self.of_table is not None
        return self._scores_at((self.of_table.place,), lambda function: function)

    def _scores_at(self, places: tuple[int, ...], at: Callable[[ScoreMod], ScoreMod]) -> Scores:
        """Return the `Scores` of some branches.

        places: indices of the branches.
        at: turns a function of heads and positions into one of the kernel's indices.
        """
        shares, factor = None, 1.0
        dropout, score_mod = self.features.dropout, self.features.score_mod
        if dropout is not None:
            shares, factor = at(dropout.shares(places)), 1 / (1 - dropout.p) / len(places)
        score_mod = None if score_mod is None else at(score_mod)
        return Scores(self.features.scale, score_mod, self.learned, shares, factor)


def _merged(first: OutAndLse, second: OutAndLse, *, recorded: bool) -> OutAndLse:
    """Merge two parts by lse, unless `recorded` in place of the first."""
    if recorded:
        return merge([first, second])
    merge_(*first, *second)
    return first


def _spans(step: FlexStep, q: Float[Tensor, "B H N D"]) -> tuple[Span, ...]:
    return spans_of(step.mask, step.list_lengths, q.shape[0] * q.shape[1])


class _WithScoreMod(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Portable, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *read: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = run.reading(read).with_sinks(sinks).forward(q, k, v)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *read)
        ctx.run = run
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks, out, lse, *read = ctx.saved_tensors
        learned = ctx.needs_input_grad[5:]
        found = _Gradients.apply(ctx.run, learned, *grads, q, k, v, out, lse, *read)
        of_sinks = None if sinks is None else sinks_gradient(sinks, WholeRows(out, lse, *grads))
        of_read = iter(found[3:])
        return None, *found[:3], of_sinks, *(next(of_read) if each else None for each in learned)


class _Gradients(torch.autograd.Function):
    """The gradient of `_WithScoreMod` for q, k, v and tensors that score_mod reads, which itself has a gradient.

    learned: True for each tensor of `read` that gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Portable,
        learned: Sequence[bool],
        grad_out: Tensor,
        grad_lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *read: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(grad_out, grad_lse, q, k, v, out, lse, *read)
        ctx.run, ctx.learned = run, learned
        with torch.autocast(q.device.type, enabled=False):
            run = run.reading(_leaves(read, learned))
            return run.backward(q, k, v, WholeRows(out, lse, grad_out, grad_lse))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        return None, None, *_second_gradients(ctx.run, ctx.saved_tensors, incoming, ctx.learned)


def _leaves(tensors: Sequence[Tensor], learned: Sequence[bool]) -> list[Tensor]:
    return [x.detach().requires_grad_(each) for x, each in zip(tensors, learned, strict=True)]


def _second_gradients(
    run: Portable, given: Sequence[Tensor], incoming: Sequence[Tensor], learned: Sequence[bool] = ()
) -> list[Tensor | None]:
    """Return the gradients of `Portable.backward` for `given`; None for 0.

    given: (grad_out, grad_lse, q, k, v, out, lse, *tensors that score_mod reads).
    incoming: gradients of the results of the backward.
    learned: True for each tensor that score_mod reads and that gets a gradient.
    """
    with torch.enable_grad(), torch.autocast(incoming[0].device.type, enabled=False):
        leaves = _leaves(given, (*[True] * (len(given) - len(learned)), *learned))
        grad_out, grad_lse, q, k, v, out, lse, *read = leaves
        run = run.reading(read)
        parts = run.forward(q, k, v, recorded=True)
        if not parts[0].requires_grad:  # no pair is allowed
            return [None] * len(given)
        grads = WholeRows(out, lse, grad_out, grad_lse).gradients_of(*parts)
        inputs = (q, k, v, *run.learned)
        first = torch.autograd.grad(parts, inputs, grads, create_graph=True, materialize_grads=True)
    kept = [index for index, x in enumerate(first) if x.requires_grad]
    outputs, of_outputs = ([each[index] for index in kept] for each in (first, incoming))
    wanted = [index for index, x in enumerate(leaves) if x.requires_grad]
    some = torch.autograd.grad(outputs, [leaves[index] for index in wanted], of_outputs, allow_unused=True)
    found: list[Tensor | None] = [None] * len(given)
    for index, x in zip(wanted, some, strict=True):
        # With create_graph=True, a derivative of this one is refused.
        found[index] = _Final.apply(x, *given, *incoming) if x is not None and torch.is_grad_enabled() else x
    return found


class _Final(torch.autograd.Function):
    """Autograd function (x, *inputs) -> copy of x, where x is a derivative computed from `inputs`.

    Autograd thereby records that x depends on them: a further derivative reaches this function, and raises
    RuntimeError.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        return x.clone()

    backward = staticmethod(refuse(_NO_THIRD))


def portable_gradients(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    whole: WholeRows,
    features: Features,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of a call, in the dtypes of q, k and v.

    bindings: the pattern's run-time tensors, sorted by name.
    whole: out, lse and their gradients for the rows, possibly over more keys than those of the call, and with sinks.
    """
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = _run_of(call, q, bindings, features).backward(q, k, v, whole)
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

    bindings: run-time tensors, if dropout_p > 0 followed by the seed of dropout.
    constants, q_offset, k_offset: as from `Call.arguments`.
    """
    call = Call.of(q, k, constants, q_offset, k_offset)
    bindings, dropout = without_seed(bindings, dropout_p)
    with torch.autocast(q.device.type, enabled=False):
        features = Features(scale, sinks=sinks).with_dropout(dropout)
        return _run_of(call, q, bindings, features).forward(q, k, v)


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
    return portable_gradients(call, q, k, v, bindings, whole, Features(scale).with_dropout(dropout))


@portable_backward.register_fake
def _(grad_out, grad_lse, q, k, v, *options):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    tensors, (bindings, *options) = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *copies(bindings))
    ctx.options, ctx.kept = options, functions_in(options[0])


def _second(ctx: Any, *incoming: Tensor) -> Any:
    (grad_out, grad_lse, q, k, v, out, lse), bindings = ctx.saved_tensors[:7], [*ctx.saved_tensors[7:]]
    constants, q_offset, k_offset, scale, p = ctx.options
    call = Call.of(q, k, constants, q_offset, k_offset)
    values, dropout = without_seed(bindings, p)
    run = _run_of(call, q, values, Features(scale).with_dropout(dropout))
    given = grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse, q, k, v, out, lse
    of_out, of_lse, *others = _second_gradients(run, given, incoming)
    return of_out, None if grad_lse is None else of_lse, *others, *no_gradients(bindings, ctx.options)


set_gradient(portable_op, portable_backward, refusal=None)
portable_backward.register_autograd(_second, setup_context=_remember)
