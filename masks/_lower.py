"""Lowering: a branch as terms, in the natural order, in residue-major order, or compact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import lcm

from ._algebra import And, Every, Not, Or
from ._bound import Bound
from ._causal import Causal
from ._dilated import Dilated
from ._layout import Compact, Layout
from ._pattern import Pattern
from ._term import Shape, Term


def shared_terms(branch: Pattern, multiplicity: int, bound: Bound, rate: int) -> list[Term]:
    """One term for all heads, in residue-major order of this rate; rate 1 is the natural order."""
    aligned = rate == 1 and bound.q_offset == 0
    shape: Shape = "dense" if branch == Every() else "causal" if branch == Causal() and aligned else "blocks"
    return [
        Term(
            branch,
            shape,
            multiplicity,
            tuple(range(bound.num_heads)),
            bound.head_offset,
            bound.num_heads_global,
            Layout(bound.num_queries, rate),
            Layout(bound.num_keys, rate),
            bound.q_offset,
        )
    ]


def residue_rate(branch: Pattern) -> int:
    """The least rate of a residue-major order in which every dilated factor finds its tokens in runs."""
    return reduce(lcm, branch.rates(), 1)


def compact_terms(branch: Pattern, multiplicity: int, bound: Bound) -> list[Term] | None:
    """Terms over the active tokens of each head, segments folded; None if a head's rule has no such form.

    A head's rule must be an intersection with a dilated factor whose segments repeat the other factors.
    """
    groups: dict[tuple[Pattern, int, _Strand], list[tuple[int, int, int]]] = {}
    for head in range(bound.num_heads):
        rule = branch.for_head(head + bound.head_offset, bound.num_heads_global)
        split = _split_dilated(rule)
        if split is None:
            return None
        base, rest = split
        for strand, q_start, k_start in _strands(base, bound):
            groups.setdefault((rest, base.rate, strand), []).append((head, q_start, k_start))
    return [_compact_term(key, members, multiplicity, bound) for key, members in groups.items()]


def disjoint_terms(branch: Pattern, multiplicity: int, bound: Bound) -> list[Term] | None:
    """Terms for a union: each part compact, without the pairs of the parts before it, so every pair counts once.

    Parts with the shortest segments go first: they are dense, and cheap to leave out of the others.
    """
    if not isinstance(branch, Or):
        return None
    parts = sorted(branch.parts, key=lambda part: part.period() or 0)
    terms: list[Term] = []
    for index, part in enumerate(parts):
        rest = And.of(part, *(Not(before) for before in parts[:index]))
        compact = compact_terms(rest, multiplicity, bound)
        if compact is None:
            return None
        terms += compact
    return terms


@dataclass(frozen=True)
class _Strand:
    """What heads must share to be computed in one term: which segments, and how many active tokens in each."""

    first_segment: int
    folds: int
    fold_stride: int
    num_queries: int
    num_keys: int


def _compact_term(
    key: tuple[Pattern, int, _Strand], members: list[tuple[int, int, int]], multiplicity: int, bound: Bound
) -> Term:
    rule, step, strand = key
    # Heads of one offset side by side: a kernel's operands are gathered in runs of heads.
    heads, q_starts, k_starts = zip(*sorted(members, key=lambda member: (member[2], member[0])), strict=True)
    aligned = strand.num_queries == strand.num_keys and all(
        q + bound.q_offset == k for q, k in zip(q_starts, k_starts, strict=True)
    )
    shape: Shape = "dense" if rule == Every() else "causal" if rule == Causal() and aligned else "blocks"
    return Term(
        rule,
        shape,
        multiplicity,
        heads,
        bound.head_offset,
        bound.num_heads_global,
        Compact(heads, q_starts, step, strand.num_queries, strand.folds, strand.fold_stride),
        Compact(heads, k_starts, step, strand.num_keys, strand.folds, strand.fold_stride),
        bound.q_offset,
    )


def _split_dilated(rule: Pattern) -> tuple[Dilated, Pattern] | None:
    """(the dilated factor that prunes most, the rest), if the rest repeats from segment to segment."""
    factors = rule.parts if isinstance(rule, And) else (rule,)
    bases = sorted(
        (factor for factor in factors if isinstance(factor, Dilated)), key=lambda base: base.segment / base.rate**2
    )
    for base in bases:
        rest = tuple(factor for factor in factors if factor != base)
        remainder = And.of(*rest) if rest else Every()
        period = remainder.period()
        if period is not None and base.segment % period == 0:
            return base, remainder
    return None


def _strands(base: Dilated, bound: Bound) -> list[tuple[_Strand, int, int]]:
    """(strand, first query index, first key index) of each run of equal segments with any active pair."""
    assert isinstance(base.offset, int)
    segment, q_begin, q_end = base.segment, bound.q_offset, bound.q_offset + bound.num_queries
    whole_from = -(-q_begin // segment)
    whole_to = max(whole_from, min(q_end, bound.num_keys) // segment)
    edges = {q_begin // segment, (q_end - 1) // segment, (min(q_end, bound.num_keys) - 1) // segment}
    runs = [(edge, 1) for edge in sorted(edges) if not whole_from <= edge < whole_to]
    if whole_to > whole_from:
        runs.append((whole_from, whole_to - whole_from))
    strands = []
    for first_segment, folds in runs:
        start = first_segment * segment
        q_first, num_queries = _active(base, start, q_begin, q_end)
        k_first, num_keys = _active(base, start, 0, bound.num_keys)
        if num_queries and num_keys:
            strand = _Strand(first_segment, folds, segment, num_queries, num_keys)
            strands.append((strand, q_first - q_begin, k_first))
    return strands


def _active(base: Dilated, start: int, begin: int, end: int) -> tuple[int, int]:
    """(first, number) of the active positions of the segment at `start` that lie in [begin, end)."""
    assert isinstance(base.offset, int)
    first = start + base.offset
    first += max(0, -(-(begin - first) // base.rate)) * base.rate
    stop = min(end, start + base.segment)
    return first, max(0, -(-(stop - first) // base.rate))
