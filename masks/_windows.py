"""Lowering along run-time spans: a branch as terms inside each document, each padded sequence, each run of keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ._algebra import And, Every
from ._bound import Bound
from ._causal import Causal
from ._compact import compact_terms
from ._local_window import LocalWindow
from ._lower import shared_terms
from ._pattern import Pattern
from ._per_document import PerDocument
from ._run_time import Table, Window
from ._spans import Spans
from ._term import Term


@dataclass(frozen=True)
class Cut:
    """A branch that is `rest` inside each of some windows without overlap, and nothing outside.

    With from_start positions are counted from the window's begin.
    """

    rest: Pattern
    windows: list[Window]
    from_start: bool


def window_terms(branch: Pattern, multiplicity: int, bound: Bound) -> list[Term] | None:
    """Terms for each window of a branch that a run-time table cuts into windows; None for other branches."""
    cut = _cut(branch, max(bound.q_offset + bound.num_queries, bound.k_offset + bound.num_keys))
    if cut is None:
        return None
    lowered: dict[Bound, list[Term]] = {}
    terms: list[Term] = []
    for q_window, k_window in cut.windows:
        q = _overlap(q_window, bound.q_offset, bound.num_queries)
        k = _overlap(k_window, bound.k_offset, bound.num_keys)
        if q and k:
            rest = _plainest(cut.rest, q, k)
            part = _part(rest, bound, q, k, origin=q_window.start if cut.from_start else 0)
            if part not in lowered:
                lowered[part] = _lower(rest, multiplicity, part)
            terms += [term.moved(q.start - bound.q_offset, k.start - bound.k_offset) for term in lowered[part]]
    return terms


def _cut(branch: Pattern, num_positions: int) -> Cut | None:
    factors = branch.parts if isinstance(branch, And) else (branch,)
    for factor in factors:
        rest = And.of(*others) if (others := [each for each in factors if each != factor]) else Every()
        if isinstance(factor, Table):
            windows = factor.windows(num_positions)
            if windows is not None:
                return Cut(rest, windows, from_start=False)
        # A rule of distances is the same counted from anywhere.
        if isinstance(factor, PerDocument) and isinstance(factor.spans, Spans) and rest.period() == 1:
            inner = factor.part if rest == Every() else And.of(factor.part, rest)
            return Cut(inner, factor.spans.windows(num_positions), from_start=True)
    return None


def _overlap(window: range, offset: int, number: int) -> range:
    return range(max(window.start, offset), min(window.stop, offset + number))


def _plainest(rest: Pattern, q: range, k: range) -> Pattern:
    """The same rule over these positions, without windows that reach beyond them: those need no block lists."""
    kept = []
    for factor in rest.parts if isinstance(rest, And) else (rest,):
        if isinstance(factor, LocalWindow) and factor.left >= q.stop - 1 - k.start:
            if factor.right >= k.stop - 1 - q.start:
                continue
            if factor.right == 0:
                factor = Causal()
        kept.append(factor)
    return And.of(*kept) if kept else Every()


def _part(rest: Pattern, bound: Bound, q: range, k: range, *, origin: int) -> Bound:
    """The rest over one window, at positions as low as its period allows: equal windows are then equal parts."""
    period = rest.period()
    if period is not None:
        origin += (min(q.start, k.start) - origin) // period * period
    sizes = {"num_queries": len(q), "num_keys": len(k), "q_offset": q.start - origin, "k_offset": k.start - origin}
    return replace(bound, pattern=rest, **sizes)


def _lower(rest: Pattern, multiplicity: int, part: Bound) -> list[Term]:
    """The cheapest way that needs no weighing: windows again, compact, or as given."""
    for terms in (window_terms(rest, multiplicity, part), compact_terms(rest, multiplicity, part)):
        if terms is not None:
            return terms
    return shared_terms(rest, multiplicity, part, 1)
