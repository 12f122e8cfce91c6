"""Exact pairs: how many pairs of a box a rule allows, where its bounds alone leave a doubt."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Counts,
    Owned,
    Pattern,
    Progression,
    by_size,
    cut_classes,
    distinct_boxes,
    few_at_once,
    halves,
    join,
    look_at_pairs,
    num_classes,
    residue_factors,
)
from ._diagonals import settle_by_diagonals

_CELL_SIDE = 64  # boxes up to this side are looked at pair by pair
_FRONTIER = 1 << 16  # boxes counted together
_MOST_CLASSES = 1 << 20  # into which boxes are cut together
_LONGEST = 1 << 12  # side of a box whose diagonals are looked at; longer boxes of several periods have equal parts

_Cuts = list[tuple[int, bool]]  # (factor, whether queries and keys agree modulo it)


def pairs_of_queries(
    rule: Pattern, start: Int64[Tensor, " n"], stop: Int64[Tensor, " n"], num_tokens: int
) -> Int64[Tensor, " n"]:
    """Allowed pairs of the queries [start, stop) of each run with the keys [0, num_tokens), of a rule for one head."""
    zero = torch.zeros_like(start)
    return exact_pairs(rule, Box(zero, Progression(start, 1, stop - start), Progression(zero, 1, zero + num_tokens)))


def exact_pairs(rule: Pattern, box: Box) -> Counts:
    """Allowed pairs of each box of step 1, of a rule for one head.

    What bounds leave in doubt is cut: into residue classes, in which dilated rules are dense, and then into halves.
    Boxes about as long as wide are settled by their diagonals where the rule repeats along them, small ones pair by
    pair. Parts that are shifts of each other by the rule's period are counted once.
    """
    together, apart = residue_factors(rule)
    cuts = [*((factor, True) for factor in together), *((factor, False) for factor in apart)]
    pairs = torch.zeros_like(box.area)
    _add(rule, Owned(torch.arange(len(pairs)), box), cuts, pairs)
    return pairs


def _add(rule: Pattern, parts: Owned, cuts: _Cuts, pairs: Counts) -> None:
    """Add to each owner's pairs those of its parts."""
    period = rule.period()
    alike, box = (torch.arange(len(parts)), parts.box) if period is None else distinct_boxes(parts.box, period)
    found = [_pairs(rule, few.box, cuts) for few in few_at_once(Owned(torch.arange(len(box.head)), box), _FRONTIER)]
    if found:
        pairs.index_add_(0, parts.owner, torch.cat(found)[alike])


def _pairs(rule: Pattern, box: Box, cuts: _Cuts) -> Counts:
    """The pairs of each box; what is in doubt is cut by the first of the `cuts`, or into halves where none is left."""
    bounds = rule.count(box, num_heads=1)
    if not cuts:
        return _by_halves(rule, box, bounds)
    pairs, left = _certain(bounds)
    owned = Owned(left, box.select(left))
    classes = num_classes(owned, *cuts[0])
    if classes > _MOST_CLASSES:
        pairs[left] = _pairs(rule, owned.box, [])
        return pairs
    for some in few_at_once(owned, max(1, _MOST_CLASSES // classes)):
        _add(rule, cut_classes(some, *cuts[0]), cuts[1:], pairs)
    return pairs


def _by_halves(rule: Pattern, box: Box, bounds: Bounds) -> Counts:
    """By diagonals where they decide, of small boxes pair by pair, and of others by halves."""
    pairs, left = _certain(bounds)
    longest = max(_LONGEST, 2 * (rule.period() or 0))
    large: list[Owned] = []
    for part in by_size(Owned(left, box.select(left))):  # boxes of about one size have as many diagonals
        longer, shorter = (side(part.box.q.count, part.box.k.count) for side in (torch.maximum, torch.minimum))
        doubts = Bounds(bounds.low[part.owner], bounds.high[part.owner])
        where = (longer <= 2 * shorter) & (longer <= longest)
        pairs[part.owner], rest = _certain(settle_by_diagonals(rule, part.box, doubts, num_heads=1, where=where))
        small = longer[rest] <= _CELL_SIDE
        look_at_pairs(rule, part.select(rest[small]), pairs)
        large.append(part.select(rest[~small]))
    if sum(map(len, large)):
        _add(rule, halves(join(large), rule.period() or 1), [], pairs)
    return pairs


def _certain(bounds: Bounds) -> tuple[Counts, Tensor]:
    """(the pairs where bounds are exact, 0 elsewhere; which boxes are elsewhere)."""
    exact = bounds.low == bounds.high
    return torch.where(exact, bounds.low, 0), (~exact).nonzero().squeeze(1)
