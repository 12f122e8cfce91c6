"""Exact pairs: how many pairs of a box a rule allows, where its bounds alone leave a doubt."""

from __future__ import annotations

import torch

from ..core import (
    Box,
    Counts,
    Owned,
    Pattern,
    by_size,
    cut_classes,
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
_LONGEST = 1 << 20  # side of a box whose diagonals are looked at together


def exact_pairs(rule: Pattern, box: Box) -> Counts:
    """Allowed pairs of each box of step 1, of a rule for one head.

    What bounds leave in doubt is cut: into residue classes, in which dilated rules are dense, and then into halves.
    Boxes about as long as wide are settled by their diagonals where the rule repeats along them, small ones pair by
    pair.
    """
    pairs = torch.zeros_like(box.area)
    together, apart = residue_factors(rule)
    cuts = [*((factor, True) for factor in together), *((factor, False) for factor in apart)]
    stack = [(0, part) for part in few_at_once(Owned(torch.arange(len(pairs)), box), _FRONTIER)]
    while stack:
        level, part = stack.pop()
        classes = num_classes(part, *cuts[level]) if level < len(cuts) else 0
        if 0 < classes <= _MOST_CLASSES:
            left = few_at_once(_settle(rule, part, pairs), max(1, _MOST_CLASSES // classes))
            parts = [cut_classes(some, *cuts[level]) for some in left]
        else:
            level, parts = len(cuts), [halves(_settle_all(rule, part, pairs))]
        stack.extend((level + 1, few) for rest in parts for few in few_at_once(rest, _FRONTIER))
    return pairs


def _settle(rule: Pattern, owned: Owned, pairs: Counts, *, by_diagonals: bool = False) -> Owned:
    """Add up what is certain; returns the others."""
    box = owned.box
    bounds = rule.count(box, num_heads=1)
    if by_diagonals:
        longer, shorter = torch.maximum(box.q.count, box.k.count), torch.minimum(box.q.count, box.k.count)
        where = (longer <= 2 * shorter) & (longer <= _LONGEST)
        bounds = settle_by_diagonals(rule, box, bounds, num_heads=1, where=where)
    exact = bounds.low == bounds.high
    pairs.index_add_(0, owned.owner[exact], bounds.low[exact])
    return owned.select((~exact).nonzero().squeeze(1))


def _settle_all(rule: Pattern, owned: Owned, pairs: Counts) -> Owned:
    """The same, with all diagonals and small boxes besides. Boxes of about one size have as many diagonals."""
    left = join([_settle(rule, part, pairs, by_diagonals=True) for part in by_size(owned)])
    small = torch.maximum(left.box.q.count, left.box.k.count) <= _CELL_SIDE
    look_at_pairs(rule, left.select(small.nonzero().squeeze(1)), pairs)
    return left.select((~small).nonzero().squeeze(1))
