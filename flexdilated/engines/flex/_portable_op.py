"""Engine "portable": runs the programs of engine flex by plain torch operations, with one gradient for all steps.

A call without a score_mod is a custom op, which keeps q, k, v, the output, its lse, sinks, copies of run-time tensors,
and dropout's seed for the backward. Ops take no functions: an eager call with a score_mod is an autograd function of
the recorded operations, which also keeps the tensors that they read. In a graph of torch.compile, score_mod is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...masks.patterns import lists_keys
from .._call import Call, check_heads
from .._dropout import with_seed, without_seed
from .._features import Features
from .._merge import WholeRows, sum_dtype
from .._ops import copies, functions_in, no_gradients, own_op, set_gradient
from .._tables import listed_parts, table_split_of, without_table
from ..kernels._key_lists import PaddedRows
from ..kernels._portable import ListLengths, Span, spans_of
from ._flex_op import run_time_program, run_time_tables, static_program, with_tables
from ._listed_keys import ListedKeys, listed_rows
from ._portable_gradients import run_with_score_mod, second_gradients
from ._portable_run import Portable
from ._program import NO_STEPS, FlexProgram, FlexStep, longest_lists
from ._traced import MAKERS, traced

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


def portable(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    bindings: list[Tensor],
    call: Call,
    features: Features,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Return (out in the dtype of q, natural lse in float32 or wider) of a call, by engine "portable".

    bindings: the pattern's run-time tensors, sorted by name.

    Gradients reach q, k, v, sinks and the tensors that score_mod reads.
    """
    if features.score_mod is None:
        tensors, p = with_seed(bindings, features.dropout)
        return portable_op(q, k, v, features.sinks, tensors, *call.arguments, features.scale, p)
    if torch.compiler.is_compiling():
        run = _portable_in_graph(q, k, bindings, call, features)
        with torch.autocast(q.device.type, enabled=False):
            return run.forward(q, k, v, recorded=True)
    return run_with_score_mod(portable_run(call, q, bindings, features), q, k, v)


def _portable_in_graph(q: Tensor, k: Tensor, bindings: list[Tensor], call: Call, features: Features) -> Portable:
    """Return the `Portable` of a call in a graph of torch.compile.

    Single keys are gathered if tokens are in natural order and the table's shape bounds the keys of a query, else they
    are computed by block lists.
    """
    listed = listed_parts(call.pattern) if call.rate == 1 and not call.placement else None
    of_table = None
    if listed is not None and listed.width:
        own = [bindings[at] for at in listed.own_bindings]
        rows = listed_rows(q, k, own, *call._replace(pattern=listed.own).arguments, listed.width)
        of_table = ListedKeys(PaddedRows(rows), call.offsets, listed.place, listed.places)
        if not listed.others:
            return Portable(NO_STEPS, features, (), of_table)
        call, bindings = call._replace(pattern=listed.others), [bindings[at] for at in listed.other_bindings]
    program, spans = traced("portable", q, k, bindings, call)
    program = with_tables(program, run_time_tables(q, k, bindings, *call.arguments)) if bindings else program
    return Portable(program, features, spans, of_table)


def _program_and_spans(
    call: Call, q: Tensor, bindings: list[Tensor]
) -> tuple[FlexProgram, tuple[tuple[Span, ...], ...]]:
    """Return (program, spans of each step) for a graph.

    If run-time tensors decide the lengths of block lists, the spans are for the longest possible lists.
    """
    program = MAKERS["program"](call, q, bindings)

    def spans(step: FlexStep) -> tuple[Span, ...]:
        lengths = step.list_lengths
        if bindings:
            longest, _ = longest_lists(step.term, step.structure.sides)
            lengths = ListLengths.at_most(longest, len(lengths.counts))
        return spans_of(step.mask, lengths, int(q.shape[0]) * len(step.term.heads), in_graph=True)

    return program, tuple(map(spans, program.steps))


MAKERS["portable"] = _program_and_spans


def portable_run(call: Call, q: Tensor, bindings: list[Tensor], features: Features) -> Portable:
    """Return the `Portable` of an eager call.

    If the pattern has a table of single keys that `table_split_of` separates, its pairs are `of_table`, and the program
    has the other pairs. Else the program has all pairs.

    bindings: the pattern's run-time tensors, sorted by name.
    """
    selection = table_split_of(call)
    if selection is None or not lists_keys(selection.leaf):
        return Portable(_program(call, bindings, q), features)
    program = NO_STEPS if selection.others is None else _program(*without_table(call, selection, bindings), q)
    return Portable(program, features, of_table=ListedKeys.of(call, selection, bindings, q))


def _program(call: Call, bindings: list[Tensor], q: Tensor) -> FlexProgram:
    if bindings:
        return run_time_program(call, q.device, bindings, len(q), call.operands(q))
    return static_program(call, q.device, None, call.operands(q))


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
    whole: out, lse and their gradients, which may be of a softmax over more keys than the call's, and over sinks.
    features: without a score_mod; sinks have no effect, as `whole` includes them.
    """
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = portable_run(call, q, bindings, features).backward(q, k, v, whole)
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
    """Return (out in the dtype of q, natural lse in float32 or wider) of a call without a score_mod.

    bindings: run-time tensors, if dropout_p > 0 followed by the seed of dropout.
    constants, q_offset, k_offset: as from `Call.arguments`.
    """
    call = Call.of(q, k, constants, q_offset, k_offset)
    bindings, dropout = without_seed(bindings, dropout_p)
    with torch.autocast(q.device.type, enabled=False):
        features = Features(scale, sinks=sinks).with_dropout(dropout)
        return portable_run(call, q, bindings, features).forward(q, k, v)


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
    """Return (dq, dk, dv) of `portable_op`, in the dtypes of q, k and v.

    grad_out, grad_lse: gradients of its results; None for a gradient of 0.
    out, lse: its results.

    The other arguments are those of `portable_op`.
    """
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


def _backward_of_backward(ctx: Any, *incoming: Tensor) -> Any:
    (grad_out, grad_lse, q, k, v, out, lse), bindings = ctx.saved_tensors[:7], [*ctx.saved_tensors[7:]]
    constants, q_offset, k_offset, scale, p = ctx.options
    call = Call.of(q, k, constants, q_offset, k_offset)
    values, dropout = without_seed(bindings, p)
    run = portable_run(call, q, values, Features(scale).with_dropout(dropout))
    given = grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse, q, k, v, out, lse
    of_out, of_lse, *others = second_gradients(run, given, incoming)
    return of_out, None if grad_lse is None else of_lse, *others, *no_gradients(bindings, ctx.options)


set_gradient(portable_op, portable_backward, refusal=None)
portable_backward.register_autograd(_backward_of_backward, setup_context=_remember)
