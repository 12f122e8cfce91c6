"""Bounds on the number of allowed pairs in boxes, as tight as a budget of evaluations permits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
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
    few_at_once,
    halves,
    join,
    look_at_pairs,
    num_classes,
    residue_factors,
)

_CELL_SIDE = 64  # boxes up to this side are evaluated pair by pair
_FRONTIER = 1 << 17  # boxes counted together
_COUNT = 8  # single pairs that take as long as the bounds of a box
_SAMPLES = 1 << 21  # pairs evaluated in all once the budget is spent
_MOST_SAMPLES = 1 << 12  # of these in one box
_SAMPLED_AT_ONCE = 1 << 20
# Steps of a sequence that fills the unit square evenly: Roberts' R2, from the plastic number.
_ROW_STEP, _COLUMN_STEP = 0.7548776662466927, 0.5698402909980532


class PairCounts(NamedTuple):
    """Allowed pairs of boxes or cells: bounds `low` and `high`, estimate `likely`; all three are equal if exact."""

    low: Int64[Tensor, "..."]
    high: Int64[Tensor, "..."]
    likely: Float64[Tensor, "..."]

    @classmethod
    def zeros(cls, number: int) -> PairCounts:
        low, high = torch.zeros(2, number, dtype=torch.int64)
        return cls(low, high, torch.zeros(number, dtype=torch.float64))

    def add(self, owner: Tensor, *found: Tensor) -> None:
        """Add counts at the indices `owner`: exact ones, or (low, high, likely)."""
        for mine, theirs in zip(self, found if len(found) > 1 else found * 3, strict=True):
            mine.index_add_(0, owner, theirs.to(mine.dtype))


@dataclass
class Budget:
    """Remaining budget in evaluations of single pairs, or in work that takes as long."""

    left: int

    def afford(self, boxes: int) -> bool:
        """True if the budget permits bounding this number of boxes."""
        return boxes * _COUNT <= self.left

    def take(self, wanted: Tensor, each: int) -> Tensor:
        """Mask of the wanted boxes that fit the budget; takes `each` evaluations a box from it."""
        chosen = wanted & (wanted.cumsum(0) * each <= self.left)
        self.left -= int(chosen.sum()) * each
        return chosen


def bounded_pairs(rule: Pattern, box: Box, budget: Budget) -> PairCounts:
    """Count or bound the allowed pairs of each box under a rule for one head; queries and keys have a common step.

    Undecided boxes are split into residue classes, then halved, until bounds decide all parts or the budget is spent.
    For parts that stay undecided, `likely` is estimated from a few evenly spread pairs.
    """
    cuts: list[tuple[int, bool]] = []  # (factor, whether queries and keys agree modulo it)
    if box.q.step == box.k.step == 1:  # else residue classes of a layout, in which rules are dense
        together, apart = residue_factors(rule)
        cuts = [*((factor, True) for factor in together), *((factor, False) for factor in apart)]
    found, rest = PairCounts.zeros(len(box.head)), Owned(torch.arange(len(box.head)), box)
    rest = settle(rule, rest, found)
    while len(rest):
        budget.left -= len(rest) * _COUNT
        if cuts and budget.afford(len(rest) * num_classes(rest, *cuts[0])):
            rest = settle(rule, cut_classes(rest, *cuts.pop(0)), found)
            continue
        cuts = []
        rest = _settle_closely(rule, rest, found, budget)
        large = torch.maximum(rest.box.q.count, rest.box.k.count) > _CELL_SIDE
        if not budget.afford(2 * int(large.sum())):
            large = torch.zeros_like(large)
        _sample(rule, rest.select((~large).nonzero().squeeze(1)), found)
        rest = settle(rule, halves(rest.select(large.nonzero().squeeze(1)), rule.period() or 1), found)
    return found


def settle(rule: Pattern, owned: Owned, found: PairCounts) -> Owned:
    """Add the pairs of boxes whose bounds are equal to `found`; returns the undecided boxes."""
    left = [owned.select(torch.arange(0))]
    for few in few_at_once(owned, _FRONTIER):
        left.append(_add_exact(few, rule.count(few.box, num_heads=1), found))
    return join(left)


def _add_exact(owned: Owned, bounds: Bounds, found: PairCounts) -> Owned:
    exact = bounds.low == bounds.high
    found.add(owned.owner[exact], bounds.low[exact])
    return owned.select((~exact).nonzero().squeeze(1))


def _settle_closely(rule: Pattern, owned: Owned, found: PairCounts, budget: Budget) -> Owned:
    """Settle by all diagonals, then by all pairs of small boxes, within the budget. Equal sizes have equal costs."""
    left = []
    for alike in by_size(owned):
        q, k = alike.box.q.count, alike.box.k.count
        before, each = budget.left, int(q.max()) + int(k.max())
        where = budget.take(torch.maximum(q, k) <= 2 * torch.minimum(q, k), each)
        bounds = rule.count(alike.box, num_heads=1)
        rest = _add_exact(alike, settle_by_diagonals(rule, alike.box, bounds, num_heads=1, where=where), found)
        budget.left = before - (len(alike) - len(rest)) * each
        q, k = rest.box.q.count, rest.box.k.count
        small = torch.maximum(q, k) <= _CELL_SIDE
        looked = budget.take(small, int(q.max()) * int(k.max()) if len(rest) else 0)
        some, pairs = rest.select(looked.nonzero().squeeze(1)), torch.zeros_like(found.low)
        look_at_pairs(rule, some, pairs)
        found.add(torch.arange(len(pairs)), pairs)
        left.append(rest.select((~looked).nonzero().squeeze(1)))
    return join(left)


def _sample(rule: Pattern, owned: Owned, found: PairCounts) -> None:
    """Add the bounds of each box, with `likely` estimated from sampled pairs."""
    if not len(owned):
        return
    samples = min(_MOST_SAMPLES, max(1, _SAMPLES // len(owned)))
    begin = 0
    for few in few_at_once(owned, max(1, _SAMPLED_AT_ONCE // samples)):
        box, bounds = few.box, rule.count(few.box, num_heads=1)
        row, column = even_places((len(few), samples), begin)
        q = _place(box.q.count, row) * box.q.step + box.q.first[:, None]
        k = _place(box.k.count, column) * box.k.step + box.k.first[:, None]
        head = box.head[:, None]
        allowed = rule.mask_mod(num_heads=1, device=torch.device("cpu"))(torch.zeros_like(head), head, q, k)
        likely = (allowed.double().mean(1) * box.area).clamp(bounds.low.double(), bounds.high.double())
        found.add(few.owner, bounds.low, bounds.high, likely)
        begin += len(few) * samples


def even_places(shape: tuple[int, int], begin: int = 0) -> tuple[Float64[Tensor, "n m"], Float64[Tensor, "n m"]]:
    """Coordinates of low-discrepancy points in the unit square from the `begin`-th on; each row is spread evenly."""
    number = (begin + torch.arange(shape[0] * shape[1]).view(shape)).double()
    return (number * _ROW_STEP).frac(), (number * _COLUMN_STEP).frac()


def _place(count: Counts, share: Tensor) -> Tensor:
    """Index of the term at this fraction of each progression."""
    return (count[:, None] * share).long().minimum(count[:, None] - 1)
