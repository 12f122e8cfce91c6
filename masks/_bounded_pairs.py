"""Bounded pairs: how many pairs of a box a rule allows, as exactly as a given number of looks can tell."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from ._box import Bounds, Box, Counts
from ._box_parts import Owned, by_size, cut_classes, few_at_once, halves, join, look_at_pairs, residue_factors
from ._diagonals import settle_by_diagonals
from ._pattern import Pattern

_CELL_SIDE = 64  # boxes up to this side are looked at pair by pair
_FRONTIER = 1 << 17  # boxes counted together
_COUNT = 32  # looks at single pairs that take as long as the count of a box
_MOST_SAMPLES = 1 << 12  # pairs looked at in a part that stays in doubt
_SAMPLED_AT_ONCE = 1 << 20
# Steps of a sequence that fills the unit square evenly: Roberts' R2, from the plastic number.
_ROW_STEP, _COLUMN_STEP = 0.7548776662466927, 0.5698402909980532


class PairCounts(NamedTuple):
    """Allowed pairs of n boxes: at least `low`, at most `high`, about `likely`; all three the same where counted."""

    low: Counts
    high: Counts
    likely: Float64[Tensor, " n"]


def bounded_pairs(rule: Pattern, box: Box, *, most_looks: int) -> PairCounts:
    """Allowed pairs of each box, of a rule for one head; both sides of the boxes have one step.

    What bounds leave in doubt is cut as `exact_pairs` cuts it, all boxes alike, until no doubt or no look is left.
    Of what then stays in doubt `likely` counts a few pairs, spread evenly.
    """
    search = _Search(rule, torch.zeros_like(box.area), most_looks)
    rest = search.settle(Owned(torch.arange(len(box.area)), box))
    for factor, together in _cuts(rule, box):
        number = len(rest) * factor ** (1 if together else 2)
        if not search.affords(number):
            break
        if number:
            rest = search.settle(cut_classes(rest, factor, together))
    while len(rest):
        rest = search.settle_closely(rest)
        if not len(rest) or not search.affords(2 * len(rest)) or not bool((rest.box.area > 1).any()):
            break
        rest = search.settle(halves(rest))
    return search.counts(rest)


def _cuts(rule: Pattern, box: Box) -> list[tuple[int, bool]]:
    """(factor, whether queries and keys agree modulo it) for each cut into residue classes."""
    if box.q.step > 1 or box.k.step > 1:
        return []  # a layout's classes, in which its rules are dense
    together, apart = residue_factors(rule)
    return [*((factor, True) for factor in together), *((factor, False) for factor in apart)]


class _Search:
    """The pairs found so far, and the looks that are left."""

    def __init__(self, rule: Pattern, pairs: Counts, most_looks: int) -> None:
        self.rule, self.pairs, self.left = rule, pairs, most_looks

    def affords(self, boxes: int) -> bool:
        """Whether so many boxes can be counted."""
        return boxes * _COUNT <= self.left

    def settle(self, owned: Owned) -> Owned:
        """Add up what bounds tell exactly; returns the others."""
        rest = [owned.select(torch.arange(0))]
        for few in few_at_once(owned, _FRONTIER):
            bounds = self.rule.count(few.box, num_heads=1)
            rest.append(self._add_exact(few, bounds))
        self.left -= len(owned) * _COUNT
        return join(rest)

    def settle_closely(self, owned: Owned) -> Owned:
        """The same by all diagonals, and by all pairs of small boxes, as far as looks are left."""
        rest = [owned.select(torch.arange(0))]
        for alike in by_size(owned):
            left = self._by_diagonals(alike)
            q, k = left.box.q.count, left.box.k.count
            small = self._affordable(torch.maximum(q, k) <= _CELL_SIDE, int(q.max()) * int(k.max())) if len(left) else q
            look_at_pairs(self.rule, left.select(small.nonzero().squeeze(1)), self.pairs)
            rest.append(left.select((small == 0).nonzero().squeeze(1)))
        return join(rest)

    def _by_diagonals(self, owned: Owned) -> Owned:
        """Boxes of about one size, about as long as wide: those that repeat along their diagonals."""
        q, k = owned.box.q.count, owned.box.k.count
        square = torch.maximum(q, k) <= 2 * torch.minimum(q, k)
        left, each = self.left, int(q.max()) + int(k.max())
        where = self._affordable(square, each)
        bounds = self.rule.count(owned.box, num_heads=1)
        bounds = settle_by_diagonals(self.rule, owned.box, bounds, num_heads=1, where=where)
        self.left = left - int((bounds.low == bounds.high).sum()) * each
        return self._add_exact(owned, bounds)

    def _affordable(self, wanted: Tensor, each: int) -> Tensor:
        """Which of the wanted boxes can be looked at for `each` looks a box; the looks are taken."""
        chosen = wanted & (wanted.cumsum(0) * each <= self.left)
        self.left -= int(chosen.sum()) * each
        return chosen

    def _add_exact(self, owned: Owned, bounds: Bounds) -> Owned:
        exact = bounds.low == bounds.high
        self.pairs.index_add_(0, owned.owner[exact], bounds.low[exact])
        return owned.select((~exact).nonzero().squeeze(1))

    def counts(self, rest: Owned) -> PairCounts:
        """What was found, and of the rest its bounds and a sample."""
        low, high, likely = self.pairs.clone(), self.pairs.clone(), self.pairs.double()
        samples = min(_MOST_SAMPLES, max(1, self.left // max(1, len(rest))))
        for number, few in enumerate(few_at_once(rest, max(1, _SAMPLED_AT_ONCE // samples))):
            bounds = self.rule.count(few.box, num_heads=1)
            low.index_add_(0, few.owner, bounds.low)
            high.index_add_(0, few.owner, bounds.high)
            share = _sample(self.rule, few.box, samples, begin=number * _SAMPLED_AT_ONCE)
            about = (share * few.box.area).clamp(bounds.low.double(), bounds.high.double())
            likely.index_add_(0, few.owner, about)
        return PairCounts(low, high, likely)


def _sample(rule: Pattern, box: Box, samples: int, *, begin: int) -> Float64[Tensor, " n"]:
    """The share of allowed pairs among some of each box."""
    number = (begin + torch.arange(len(box.head) * samples).view(-1, samples)).double()
    q = _place(box.q.count, (number * _ROW_STEP).frac()) * box.q.step + box.q.first[:, None]
    k = _place(box.k.count, (number * _COLUMN_STEP).frac()) * box.k.step + box.k.first[:, None]
    head = box.head[:, None]
    mask_mod = rule.mask_mod(num_heads=1, device=torch.device("cpu"))
    return mask_mod(torch.zeros_like(head), head, q, k).double().mean(1)


def _place(count: Counts, share: Tensor) -> Tensor:
    """The term at this share of each progression."""
    return (count[:, None] * share).long().minimum(count[:, None] - 1)
