"""Bounded pairs: how many pairs of a box a rule allows, as exactly as a budget of evaluations permits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from ..blocks import settle_by_diagonals
from ..core import (
    Bounds,
    Box,
    Counts,
    Owned,
    Pattern,
    by_size,
    cut_classes,
    distinct_boxes,
    few_at_once,
    halves,
    look_at_pairs,
    num_classes,
    residue_factors,
)

_CELL_SIDE = 64  # boxes up to this side are evaluated pair by pair
_FRONTIER = 1 << 17  # boxes counted together
_COUNT = 8  # single pairs that take as long as the bounds of a box
_SAMPLES = 1 << 21  # pairs evaluated where the budget is spent
_MOST_SAMPLES = 1 << 12  # of them in one box
_SAMPLED_AT_ONCE = 1 << 20
# Steps of a sequence that fills the unit square evenly: Roberts' R2, from the plastic number.
_ROW_STEP, _COLUMN_STEP = 0.7548776662466927, 0.5698402909980532

_Cuts = list[tuple[int, bool]]  # (factor, whether queries and keys agree modulo it)


class PairCounts(NamedTuple):
    """Allowed pairs of n boxes: at least `low`, at most `high`, about `likely`; all three the same where counted."""

    low: Counts
    high: Counts
    likely: Float64[Tensor, " n"]

    @classmethod
    def of(cls, bounds: Bounds) -> PairCounts:
        return cls(bounds.low.clone(), bounds.high.clone(), bounds.low.double())

    def put(self, index: Tensor, found: PairCounts) -> None:
        """Replace those of the boxes at these indices."""
        for mine, theirs in zip(self, found, strict=True):
            mine[index] = theirs

    def of_owners(self, owner: Tensor, part: Tensor, number: int) -> PairCounts:
        """Sums over what each owner has: parts of these numbers."""
        low, high, likely = (each.new_zeros(number).index_add_(0, owner, each[part]) for each in self)
        return PairCounts(low, high, likely)


@dataclass
class Budget:
    """How many evaluations of single pairs, and of what takes as long, are left."""

    left: int

    def afford(self, boxes: int) -> bool:
        """Whether so many boxes can be counted."""
        return boxes * _COUNT <= self.left

    def take(self, wanted: Tensor, each: int) -> Tensor:
        """Which of the wanted boxes can be settled for `each` evaluations a box, which are taken from the budget."""
        chosen = wanted & (wanted.cumsum(0) * each <= self.left)
        self.left -= int(chosen.sum()) * each
        return chosen


def bounded_pairs(rule: Pattern, box: Box, budget: Budget) -> PairCounts:
    """Allowed pairs of each box, of a rule for one head; both sides of the boxes have one step.

    Boxes that bounds leave undecided are cut, all alike, until all are decided or the budget is spent; parts that
    repeat are counted once. Of boxes that stay undecided `likely` is an estimate from a few pairs, evenly placed.
    """
    cuts: _Cuts = []
    if box.q.step == box.k.step == 1:  # else a layout's classes, in which its rules are dense
        together, apart = residue_factors(rule)
        cuts = [*((factor, True) for factor in together), *((factor, False) for factor in apart)]
    return _Search(rule, budget).pairs(box, cuts)


class _Search:
    """A rule, and the budget that is left."""

    def __init__(self, rule: Pattern, budget: Budget) -> None:
        self.rule, self.budget = rule, budget

    def pairs(self, box: Box, cuts: _Cuts) -> PairCounts:
        """The pairs of each box; cut into these residue classes first, where undecided."""
        found = PairCounts.of(self._bounds(box))
        undecided = (found.low < found.high).nonzero().squeeze(1)
        if len(undecided):
            rest = box.select(undecided)
            found.put(undecided, self._by_classes(rest, cuts) if cuts else self._closely(rest))
        return found

    def _by_classes(self, box: Box, cuts: _Cuts) -> PairCounts:
        (factor, together), *others = cuts
        whole = Owned(torch.arange(len(box.head)), box)
        if not self.budget.afford(len(whole) * num_classes(whole, factor, together)):
            return self._closely(box)
        parts = cut_classes(whole, factor, together)
        return self._of_parts(parts, len(box.head), others)

    def _closely(self, box: Box) -> PairCounts:
        """By all diagonals and by all pairs of small boxes within the budget, by halves else, or a sample."""
        found = PairCounts.of(Bounds(torch.zeros_like(box.area), box.area))
        for alike in by_size(Owned(torch.arange(len(box.head)), box)):
            self._settle(alike, found)
        undecided = found.low < found.high
        large = torch.maximum(box.q.count, box.k.count) > _CELL_SIDE
        if not self.budget.afford(2 * int((undecided & large).sum())):
            large = torch.zeros_like(large)
        for index, count in (((undecided & large), self._by_halves), ((undecided & ~large), self._sampled)):
            where = index.nonzero().squeeze(1)
            if len(where):
                found.put(where, count(box.select(where)))
        return found

    def _by_halves(self, box: Box) -> PairCounts:
        parts = halves(Owned(torch.arange(len(box.head)), box), self.rule.period() or 1)
        return self._of_parts(parts, len(box.head), [])

    def _of_parts(self, parts: Owned, number: int, cuts: _Cuts) -> PairCounts:
        period = self.rule.period()
        if period is None:
            alike, box = torch.arange(len(parts)), parts.box
        else:
            alike, box = distinct_boxes(parts.box, period)
        return self.pairs(box, cuts).of_owners(parts.owner, alike, number)

    def _settle(self, owned: Owned, found: PairCounts) -> None:
        """Put the counts by diagonals, and by all pairs, of boxes of about one size."""
        q, k = owned.box.q.count, owned.box.k.count
        before, each = self.budget.left, int(q.max()) + int(k.max())
        where = self.budget.take(torch.maximum(q, k) <= 2 * torch.minimum(q, k), each)
        bounds = self.rule.count(owned.box, num_heads=1)
        bounds = settle_by_diagonals(self.rule, owned.box, bounds, num_heads=1, where=where)
        exact = bounds.low == bounds.high
        self.budget.left = before - int(exact.sum()) * each
        wanted = ~exact & (torch.maximum(q, k) <= _CELL_SIDE)
        evaluated = self.budget.take(wanted, int(q.max()) * int(k.max())).nonzero().squeeze(1)
        pairs = bounds.low.clone()
        pairs[evaluated] = 0
        small = Owned(evaluated, owned.box.select(evaluated))
        look_at_pairs(self.rule, small, pairs)
        exact[evaluated] = True
        counted = PairCounts.of(Bounds(pairs, torch.where(exact, pairs, bounds.high)))
        found.put(owned.owner, counted)

    def _bounds(self, box: Box) -> Bounds:
        some = [self.rule.count(few.box, num_heads=1) for few in few_at_once(Owned(box.head, box), _FRONTIER)]
        self.budget.left -= len(box.head) * _COUNT
        return Bounds(torch.cat([each.low for each in some]), torch.cat([each.high for each in some]))

    def _sampled(self, box: Box) -> PairCounts:
        bounds = self._bounds(box)
        samples = min(_MOST_SAMPLES, max(1, _SAMPLES // len(box.head)))
        share, at_once = [], max(1, _SAMPLED_AT_ONCE // samples)
        for begin, few in enumerate(few_at_once(Owned(box.head, box), at_once)):
            share.append(_share(self.rule, few.box, samples, begin * at_once * samples))
        likely = (torch.cat(share) * box.area).clamp(bounds.low.double(), bounds.high.double())
        return PairCounts(bounds.low, bounds.high, likely)


def _share(rule: Pattern, box: Box, samples: int, begin: int) -> Float64[Tensor, " n"]:
    """The share of allowed pairs among some of each box."""
    row, column = even_places((len(box.head), samples), begin)
    q = _place(box.q.count, row) * box.q.step + box.q.first[:, None]
    k = _place(box.k.count, column) * box.k.step + box.k.first[:, None]
    head = box.head[:, None]
    mask_mod = rule.mask_mod(num_heads=1, device=torch.device("cpu"))
    return mask_mod(torch.zeros_like(head), head, q, k).double().mean(1)


def even_places(shape: tuple[int, int], begin: int = 0) -> tuple[Float64[Tensor, "n m"], Float64[Tensor, "n m"]]:
    """Points that fill the unit square evenly, those of each row and all together: from the `begin`-th on."""
    number = (begin + torch.arange(shape[0] * shape[1]).view(shape)).double()
    return (number * _ROW_STEP).frac(), (number * _COLUMN_STEP).frac()


def _place(count: Counts, share: Tensor) -> Tensor:
    """The term at this share of each progression."""
    return (count[:, None] * share).long().minimum(count[:, None] - 1)
