"""Layouts of one branch: all tokens in some order, only active tokens gathered, or tiles of a grid.

A token is active for a head if the head's rule selects it, such as every n-th token of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import torch

from ...core import TILE, And, Bound, Every, Expression, Pattern, within
from ...orders import Compact, Layout, Tiling, residue_rate
from ...patterns import Axis, Causal, Dilated, Neighborhood, Strided
from ._term import CountedPairs, Shape, Term

# With more residue classes than this, a shared permutation has no runs long enough for a block.
MAX_RESIDUE_RATE = 256


def terms_by_layout(
    branch: Pattern, multiplicity: int, bound: Bound, *, residues: bool, gathered: bool = True
) -> dict[str, list[Term]]:
    """Return {layout name: the terms of the branch in that layout}.

    Names are, for example, "natural", "residue 4", "compact" and "tiled 8x16".

    multiplicity: number of times that each pair counts.
    residues: include the residue-major order of all tokens, if the branch's `residue_rate` is above 1.
    gathered: include terms over only the active tokens of each head.
    """
    # Parts of a union are also tried in separate orders; an order for all parts must have few classes.
    most = bound.num_queries // 2 if len(branch.alternatives()) == 1 else min(MAX_RESIDUE_RATE, bound.num_queries)
    rate = residue_rate(branch, max(1, most)) if residues else 1
    found = {"natural": shared_terms(branch, multiplicity, bound, 1)}
    if rate > 1:
        found[f"residue {rate}"] = shared_terms(branch, multiplicity, bound, rate)
    if gathered and (compact := compact_terms(branch, multiplicity, bound)) is not None:
        found["compact"] = compact
    for tile, tiled in tiled_terms(branch, multiplicity, bound).items():
        found[f"tiled {'x'.join(map(str, tile))}"] = tiled
    return found


def shared_terms(branch: Pattern, multiplicity: int, bound: Bound, rate: int) -> list[Term]:
    """Return a list of one term, for all heads of a branch.

    It covers all tokens, in residue-major order of this rate; rate 1 is the natural order.
    """
    aligned = rate == 1 and bound.q_offset == bound.k_offset
    shape: Shape = "dense" if branch == Every() else "causal" if branch == Causal() and aligned else "blocks"
    orders = Layout(bound.num_queries, rate), Layout(bound.num_keys, rate)
    return [Term.of(bound, branch, shape, multiplicity, *orders, heads=tuple(range(bound.num_heads)))]


def masked_term(pattern: Expression, multiplicity: int, bound: Bound) -> Term:
    """Return a term that computes all pairs in one kernel, each weighted by the number of branches that allow it."""
    orders = Layout(bound.num_queries), Layout(bound.num_keys)
    weights = CountedPairs(replace(bound, pattern=pattern))
    term = Term.of(
        bound, Every(), "masked", multiplicity, *orders, heads=tuple(range(bound.num_heads)), weights=weights
    )
    return replace(term, block_side=1)  # every pair is computed, and no other


def compact_terms(branch: Pattern, multiplicity: int, bound: Bound) -> list[Term] | None:
    """Return terms over only the tokens that each head's rule selects; None if a head's rule has neither of two forms.

    * Dilated segments, alone or intersected with other factors, whose period must divide the segment length.
    * A rule of the distance of query and key alone, which allows only multiples of a spacing above 1. There must be at
      least as many queries, and at least as many keys, as the spacing.

    Equal segments or residue classes are folds.
    """
    groups: dict[tuple[Pattern, _Folds], list[tuple[int, int, int]]] = {}
    for head in range(bound.num_heads):
        rule = branch.for_head(head + bound.head_offset, bound.num_heads_global)
        split = split_dilated(rule)
        if split is not None:
            base, rest = split
            found = _folds_of_segments(base, bound)
        elif 1 < rule.spacing() <= min(bound.num_queries, bound.num_keys) and rule.period() == 1:
            # Residue classes share no pairs and have equal rules: drop the factor that separates them.
            rest = And.of(*(factor for factor in rule.factors() if not isinstance(factor, Strided)))
            found = _folds_of_residue_classes(rule.spacing(), bound)
        else:
            return None
        for folds, q_start, k_start in found:
            groups.setdefault((rest, folds), []).append((head, q_start, k_start))
    return [_compact_term(rule, folds, members, multiplicity, bound) for (rule, folds), members in groups.items()]


class _Folds(NamedTuple):
    """Equally shaped folds: segments or residue classes.

    Heads with equal rules and equal values of these fields share a term.

    place: number of the first segment, or of the first residue class, which tells groups of folds apart.
    step: tokens from one active token (a token that the fold computes) to the next.
    folds: number of folds.
    stride: tokens from the start of one fold to that of the next.
    num_queries, num_keys: number of active tokens in each fold.
    """

    place: int
    step: int
    folds: int
    stride: int
    num_queries: int
    num_keys: int


def _compact_term(
    rule: Pattern, own: _Folds, members: list[tuple[int, int, int]], multiplicity: int, bound: Bound
) -> Term:
    # Heads of one offset are adjacent: a kernel's operands are gathered in runs of heads.
    heads, q_starts, k_starts = zip(*sorted(members, key=lambda member: (member[2], member[0])), strict=True)
    aligned = own.num_queries == own.num_keys and all(
        q + bound.q_offset == k + bound.k_offset for q, k in zip(q_starts, k_starts, strict=True)
    )
    shape = "dense" if isinstance(rule, Every) else "causal" if isinstance(rule, Causal) and aligned else "blocks"
    q = Compact(heads, q_starts, own.step, own.num_queries, own.folds, own.stride)
    k = Compact(heads, k_starts, own.step, own.num_keys, own.folds, own.stride)
    return Term.of(bound, rule, shape, multiplicity, q, k, heads=heads)


def split_dilated(rule: Pattern) -> tuple[Dilated, Pattern] | None:
    """Return (dilated factor, intersection of the other factors) of the rule of one head.

    The period of the other factors must divide the segment length; None if no dilated factor fulfils this. Of several
    that do, the result has the one with the least segment / rate**2.
    """
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


def _folds_of_segments(base: Dilated, bound: Bound) -> Iterator[tuple[_Folds, int, int]]:
    """Yield (folds, first query index, first key index) for each group of equal segments with active queries and keys.

    The indices are those of the first active tokens. One group has all segments that are wholly within the queries and
    the keys; each segment that is partly within them is a group by itself.
    """
    assert isinstance(base.offset, int), "a rule for one head has its offset resolved"
    segment = base.segment
    q_begin, k_begin = bound.q_offset, bound.k_offset
    q_end, k_end = q_begin + bound.num_queries, k_begin + bound.num_keys
    begin, end = max(q_begin, k_begin), min(q_end, k_end)
    first, last = begin // segment, (end - 1) // segment
    if first > last:
        return
    whole = range(-(-begin // segment), end // segment)
    runs = [(edge, 1) for edge in sorted({first, last}) if edge not in whole]
    if whole:
        runs.append((whole.start, len(whole)))
    for first_segment, folds in runs:
        start = first_segment * segment
        active = range(start + base.offset, start + segment, base.rate)
        q, k = within(active, q_begin, q_end), within(active, k_begin, k_end)
        if q and k:
            own = _Folds(first_segment, base.rate, folds, segment, len(q), len(k))
            yield own, q.start - q_begin, k.start - k_begin


def _folds_of_residue_classes(spacing: int, bound: Bound) -> Iterator[tuple[_Folds, int, int]]:
    """Yield (folds, first query index, first key index) for each group of equally large residue classes."""
    lead = (bound.q_offset - bound.k_offset) % spacing  # of key indices over query indices, modulo the spacing
    edges = {0, spacing, bound.num_queries % spacing, -lead % spacing, (bound.num_keys - lead) % spacing}
    for begin, end in pairwise(sorted(edges)):
        k_begin = (begin + lead) % spacing
        num_queries = -(-(bound.num_queries - begin) // spacing)
        num_keys = -(-(bound.num_keys - k_begin) // spacing)
        yield _Folds(begin, spacing, end - begin, 1, num_queries, num_keys), begin, k_begin


def split_causal(terms: Sequence[Term]) -> tuple[Term, ...] | None:
    """Return the terms, with causal ones on block lists replaced by terms without lists; None if none is replaced.

    A term is replaced by a dense one over the keys before all queries and, if there are more keys, a causal triangle.
    A term that cannot be split in this way, as for keys that end between the first and the last query, is kept.
    """
    parts = [_split_causal_term(term) for term in terms]
    if all(found is None for found in parts):
        return None
    return tuple(part for term, found in zip(terms, parts, strict=True) for part in (found or (term,)))


def _split_causal_term(term: Term) -> tuple[Term, ...] | None:
    if term.shape != "blocks" or term.rule != Causal() or term.weights is not None:
        return None
    q, k = (side.as_compact(term.heads) for side in (term.q, term.k))
    if q is None or k is None or q.step != k.step or (q.folds > 1 and q.fold_stride != k.fold_stride):
        return None
    gaps = {
        q_start + term.q_offset - k_start - term.k_offset for q_start, k_start in zip(q.starts, k.starts, strict=True)
    }
    gap = min(gaps)  # from the first key to the first query, equal in all heads
    seen = gap // q.step  # keys before the first query
    if len(gaps) > 1 or gap % q.step or seen <= 0:
        return None
    before = replace(term, rule=Every(), shape="dense", q=q, k=replace(k, num_slots=min(seen, k.num_slots)))
    if seen >= k.num_slots:
        return (before,)
    # No query sees keys after the last query; a triangle needs as many keys as queries.
    if k.num_slots - seen < q.num_slots:
        return None
    starts = tuple(start + seen * k.step for start in k.starts)
    triangle = replace(term, shape="causal", q=q, k=replace(k, starts=starts, num_slots=q.num_slots))
    return before, triangle


def tiled_terms(branch: Pattern, multiplicity: int, bound: Bound) -> dict[tuple[int, ...], list[Term]]:
    """Return {tile shape: [one term for all heads, with the grid's tokens ordered tile by tile]}.

    {} unless the branch is a neighbourhood, and queries and keys are its whole grid. Tiles in natural order are left
    out.
    """
    everywhere = bound.num_queries == bound.num_keys and bound.q_offset == bound.k_offset == 0
    if not isinstance(branch, Neighborhood) or not everywhere or bound.num_queries != prod(branch.grid):
        return {}
    orders = [Tiling(branch.grid, tile) for tile in best_tiles(branch)]
    (term,) = shared_terms(branch, multiplicity, bound, 1)
    return {order.tile: [replace(term, q=order, k=order)] for order in orders if not order.is_natural}


def best_tiles(rule: Neighborhood) -> list[tuple[int, ...]]:
    """Return [tile shape with the fewest computed pairs], or up to two best shapes if that number is an estimate.

    Tile lengths are powers of two. Only tiles with the largest number of tokens that is possible in this grid, at most
    128 (a block), are compared. If the lengths of the best tile do not divide the grid, blocks extend over several
    tiles, and the number of pairs is an estimate.
    """
    sides = ([1 << power for power in range(min(length, TILE).bit_length())] for length in rule.grid)
    tiles = [tile for tile in product(*sides) if prod(tile) <= TILE]
    most = max(map(prod, tiles))
    best = sorted((tile for tile in tiles if prod(tile) == most), key=lambda tile: _num_computed_pairs(rule, tile))
    divides = all(length % side == 0 for length, side in zip(rule.grid, best[0], strict=True))
    return best[:1] if divides else best[:2]


def _num_computed_pairs(rule: Neighborhood, tile: tuple[int, ...]) -> int:
    """Return an estimate of the number of pairs if each tile of queries is computed with the tiles of their windows."""
    return prod(_num_computed_pairs_along(axis, side) for side, axis in zip(tile, rule.axes, strict=True))


def _num_computed_pairs_along(axis: Axis, side: int) -> int:
    first = torch.arange(0, axis.length, side)
    last = (first + side).clamp(max=axis.length) - 1
    before, window = axis.lead * axis.rate, axis.size * axis.rate
    # Windows of the first queries of groups; residue classes in between are not distinguished.
    begin, end = (place - place // axis.rate % axis.stride * axis.rate - before for place in (first, last))
    stop = last if axis.is_causal else end + window - axis.rate
    if not axis.wraps:
        begin = begin.clamp(0, axis.length - window)
        stop = stop if axis.is_causal else stop.clamp(window - 1, axis.length - 1)
    turns = (begin < 0).long() + (stop >= axis.length).long()
    low = begin % axis.length // side * side
    high = (stop % axis.length // side * side + side).clamp(max=axis.length)
    return int(((last - first + 1) * (high - low + turns * axis.length).clamp(max=axis.length)).sum())
