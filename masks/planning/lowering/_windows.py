"""Lowering along run-time spans: a branch as terms inside each document, each padded sequence, each run of keys.

Windows in which the rule looks the same are the folds of one term, so terms are as many as there are kinds of windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch

from ...core import And, Bound, Expression, Pattern
from ...patterns import PADDING, Causal, KeySet, LocalWindow, PerDocument, Spans, Table, Windows, tables
from ._term import Term
from ._ways import compact_terms, shared_terms

_ENOUGH_SLOTS = 4096  # of all heads: larger windows are read where they lie, as a call costs less than their copies
_MOST_LISTS = 32  # of blocks, each planned by itself: more are dearer than one over all tokens


@dataclass(frozen=True)
class Cut:
    """A branch that is `rest` inside each of some windows without overlap, and nothing outside."""

    rest: Pattern
    windows: Windows


def window_terms(branch: Pattern, multiplicity: int, bound: Bound, *, any_number: bool = False) -> list[Term] | None:
    """Terms for the windows into which a run-time table cuts a branch; None for other branches.

    None as well for windows of too many kinds, unless `any_number` will do: more than there can be lengths, as windows
    differ in where they begin; or more with lists of blocks than are planned one by one.
    """
    queries = range(bound.q_offset, bound.q_offset + bound.num_queries)
    keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
    cut = _cut(branch, max(queries.stop, keys.stop))
    if cut is None:
        return None
    windows, period = cut.windows.within(queries, keys), cut.rest.period()
    kinds = windows.kinds(period)
    if len(kinds) > _MOST_LISTS + isqrt(2 * max(len(queries), len(keys))) and not any_number:
        return None
    terms: list[Term] = []
    lists = 0
    for index in kinds:
        alike = windows.select(index)
        rest, part = _part(cut.rest, bound, alike, int(alike.select(slice(1)).counted_from(period)))
        lowered = _lower(rest, multiplicity, part, any_number=any_number)
        lists += any(term.shape == "blocks" for term in lowered)
        if lists > _MOST_LISTS and not any_number:
            return None
        for some in _together(alike, bound.num_heads):
            moves = some.q_start - bound.q_offset, some.k_start - bound.k_offset
            terms += [term.repeated(*moves) for term in lowered]
    return terms


def _cut(branch: Pattern, num_positions: int) -> Cut | None:
    factors = branch.factors()
    for factor in factors:
        rest = And.of(*(each for each in factors if each != factor))
        if isinstance(factor, Table):
            windows = factor.windows(num_positions)
            if windows is not None:
                return Cut(rest, windows)
        # A rule of distances is the same counted from anywhere.
        if isinstance(factor, PerDocument) and isinstance(factor.spans, Spans) and rest.period() == 1:
            inner = And.of(factor.part, *(each for each in factors if each != factor))
            return Cut(inner, factor.spans.windows(num_positions).from_start())
    return None


def _part(rest: Pattern, bound: Bound, windows: Windows, origin: int) -> tuple[Pattern, Bound]:
    """The rest over the first window, at positions as low as its period allows."""
    first = windows.select(slice(1))
    q, k = (range(int(a), int(b)) for a, b in ((first.q_start, first.q_stop), (first.k_start, first.k_stop)))
    sizes = {"num_queries": len(q), "num_keys": len(k), "q_offset": q.start - origin, "k_offset": k.start - origin}
    plainest = _plainest(rest, q, k)
    return plainest, replace(bound, pattern=plainest, **sizes)


def _plainest(rest: Pattern, q: range, k: range) -> Pattern:
    """The same rule over these positions, without windows that reach beyond them: those need no block lists."""
    kept = []
    for factor in rest.factors():
        if isinstance(factor, LocalWindow) and factor.left >= q.stop - 1 - k.start:
            if factor.right >= k.stop - 1 - q.start:
                continue
            if factor.right == 0:
                factor = Causal()
        kept.append(factor)
    return And.of(*kept)


def _lower(rest: Pattern, multiplicity: int, part: Bound, *, any_number: bool) -> list[Term]:
    """The cheapest way that needs no weighing: windows again, compact, or as given."""
    cut = window_terms(rest, multiplicity, part, any_number=any_number)
    for terms in (cut, compact_terms(rest, multiplicity, part) if cut is None else None):
        if terms is not None:
            return terms
    return shared_terms(rest, multiplicity, part, 1)


def _together(alike: Windows, num_heads: int) -> Iterator[Windows]:
    """All of them as the folds of one term, or, where they are large and lie unevenly, one by one."""
    starts = alike.q_start
    uneven = bool((starts.diff() != starts.diff()[:1]).any())
    length = max(int(alike.q_stop[0] - starts[0]), int(alike.k_stop[0] - alike.k_start[0]))
    if uneven and length * num_heads >= _ENOUGH_SLOTS:
        yield from (alike.select(slice(index, index + 1)) for index in range(len(alike)))
    else:
        yield alike


def one_after_another(pattern: Expression, num_tokens: int, batch: int) -> Any:
    """The rule of all batch entries of so many tokens, one after the other; None where it is no rule of one sequence.

    Documents keep entries apart, and the rest must repeat from entry to entry.
    """
    if not all(_is_one(branch, num_tokens) for branch in pattern.branches()):
        return None

    def joined(leaf: Pattern) -> Pattern:
        if not isinstance(leaf, Table):
            return leaf
        rows = leaf.rows.expand(batch, -1)
        if isinstance(leaf, Spans):
            rows = torch.where(rows == PADDING, PADDING, rows + torch.arange(batch)[:, None] * num_tokens)
        return type(leaf).of(rows.reshape(1, -1), leaf.reach)

    return pattern.map_leaves(joined)


def _is_one(branch: Pattern, num_tokens: int) -> bool:
    spans = [factor for factor in branch.factors() if isinstance(factor, Spans | PerDocument)]
    rest = [factor for factor in branch.factors() if not isinstance(factor, Spans | KeySet | PerDocument)]
    return bool(spans) and all(_repeats(factor, num_tokens) for factor in rest)


def _repeats(factor: Pattern, num_tokens: int) -> bool:
    period = None if tables(factor) else factor.period()
    return period is not None and num_tokens % period == 0
