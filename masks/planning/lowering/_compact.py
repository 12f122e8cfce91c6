"""Compact lowering: a branch as terms over the tokens that can meet, gathered, with equal parts folded into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...core import And, Bound, Every, Pattern
from ...orders import Compact
from ...patterns import Causal, Dilated, Strided
from ._term import Shape, Term


def compact_terms(branch: Pattern, multiplicity: int, bound: Bound) -> list[Term] | None:
    """Terms over the active tokens of each head, equal parts folded; None if a head's rule has no such form.

    A head's rule must be an intersection with a dilated factor whose segments repeat the other factors, or a
    rule of distances that are all multiples of one spacing.
    """
    groups: dict[tuple[Pattern, _Strand], list[tuple[int, int, int]]] = {}
    for head in range(bound.num_heads):
        rule = branch.for_head(head + bound.head_offset, bound.num_heads_global)
        split = _split_dilated(rule)
        if split is not None:
            base, rest = split
            strands = _segments(base, bound)
        elif _is_spaced(rule, bound):
            rest, strands = _without_spacing(rule), _residue_classes(rule.spacing(), bound)
        else:
            return None
        for strand, q_start, k_start in strands:
            groups.setdefault((rest, strand), []).append((head, q_start, k_start))
    return [_compact_term(rule, strand, members, multiplicity, bound) for (rule, strand), members in groups.items()]


@dataclass(frozen=True)
class _Strand:
    """What heads must share to be computed in one term: which folds, and how many active tokens in each.

    `place` tells apart strands whose folds lie elsewhere.
    """

    place: int
    step: int
    folds: int
    fold_stride: int
    num_queries: int
    num_keys: int


def _compact_term(
    rule: Pattern, strand: _Strand, members: list[tuple[int, int, int]], multiplicity: int, bound: Bound
) -> Term:
    # Heads of one offset side by side: a kernel's operands are gathered in runs of heads.
    heads, q_starts, k_starts = zip(*sorted(members, key=lambda member: (member[2], member[0])), strict=True)
    aligned = strand.num_queries == strand.num_keys and all(
        q + bound.q_offset == k + bound.k_offset for q, k in zip(q_starts, k_starts, strict=True)
    )
    shape: Shape = (
        "dense" if isinstance(rule, Every) else "causal" if isinstance(rule, Causal) and aligned else "blocks"
    )
    return Term(
        rule,
        shape,
        multiplicity,
        heads,
        bound.head_offset,
        bound.num_heads_global,
        Compact(heads, q_starts, strand.step, strand.num_queries, strand.folds, strand.fold_stride),
        Compact(heads, k_starts, strand.step, strand.num_keys, strand.folds, strand.fold_stride),
        bound.q_offset,
        bound.k_offset,
    )


def _split_dilated(rule: Pattern) -> tuple[Dilated, Pattern] | None:
    """(the dilated factor that prunes most, the rest), if the rest repeats from segment to segment."""
    factors = rule.factors()
    bases = sorted(
        (factor for factor in factors if isinstance(factor, Dilated)), key=lambda base: base.segment / base.rate**2
    )
    for base in bases:
        remainder = And.of(*(factor for factor in factors if factor != base))
        period = remainder.period()
        if period is not None and base.segment % period == 0:
            return base, remainder
    return None


def _segments(base: Dilated, bound: Bound) -> Iterator[tuple[_Strand, int, int]]:
    """(strand, first query index, first key index) of each run of equal segments with any active pair."""
    segment = base.segment
    q_begin, k_begin = bound.q_offset, bound.k_offset
    q_end, k_end = q_begin + bound.num_queries, k_begin + bound.num_keys
    begin, end = max(q_begin, k_begin), min(q_end, k_end)
    if begin // segment > (end - 1) // segment:
        return
    whole_from = -(-begin // segment)
    whole_to = max(whole_from, end // segment)
    edges = {begin // segment, (end - 1) // segment}
    runs = [(edge, 1) for edge in sorted(edges) if not whole_from <= edge < whole_to]
    if whole_to > whole_from:
        runs.append((whole_from, whole_to - whole_from))
    for first_segment, folds in runs:
        start = first_segment * segment
        q_first, num_queries = _active(base, start, q_begin, q_end)
        k_first, num_keys = _active(base, start, k_begin, k_end)
        if num_queries and num_keys:
            strand = _Strand(first_segment, base.rate, folds, segment, num_queries, num_keys)
            yield strand, q_first - q_begin, k_first - k_begin


def _active(base: Dilated, start: int, begin: int, end: int) -> tuple[int, int]:
    """(first, number) of the active positions of the segment at `start` that lie in [begin, end)."""
    assert isinstance(base.offset, int)
    first = start + base.offset
    first += max(0, -(-(begin - first) // base.rate)) * base.rate
    stop = min(end, start + base.segment)
    return first, max(0, -(-(stop - first) // base.rate))


def _is_spaced(rule: Pattern, bound: Bound) -> bool:
    """Whether tokens fall into residue classes that do not meet, in each of which the rule is the same."""
    return 1 < rule.spacing() <= min(bound.num_queries, bound.num_keys) and rule.period() == 1


def _without_spacing(rule: Pattern) -> Pattern:
    """What is left to check within a residue class."""
    return And.of(*(factor for factor in rule.factors() if not isinstance(factor, Strided)))


def _residue_classes(spacing: int, bound: Bound) -> Iterator[tuple[_Strand, int, int]]:
    """(strand, first query index, first key index) of each run of classes with equal numbers of tokens."""
    lead = (bound.q_offset - bound.k_offset) % spacing  # of key indices over query indices, modulo the spacing
    edges = {0, spacing, bound.num_queries % spacing, -lead % spacing, (bound.num_keys - lead) % spacing}
    for begin, end in pairwise(sorted(edges)):
        k_begin = (begin + lead) % spacing
        num_queries = -(-(bound.num_queries - begin) // spacing)
        num_keys = -(-(bound.num_keys - k_begin) // spacing)
        yield _Strand(begin, spacing, end - begin, 1, num_queries, num_keys), begin, k_begin
