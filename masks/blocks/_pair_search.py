"""Count allowed pairs of boxes by bounds, diagonals and single pairs, exactly or within a budget of evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Composite,
    Counts,
    MaskMod,
    Not,
    Owned,
    Pattern,
    Progression,
    by_size,
    cut_classes,
    evaluate_pairs,
    halves,
    in_chunks,
    join,
    num_classes,
    numbered,
    residue_factors,
)

_DIAGONALS_AT_ONCE = 1 << 21  # diagonals evaluated together: limits the memory
_CELL_SIDE = 64  # boxes up to this side are evaluated pair by pair
_FRONTIER = 1 << 16  # boxes counted together
_MOST_CLASSES = 1 << 20  # residue classes into which boxes are cut at once
_LONGEST = 1 << 20  # longest side of a box that is settled by its diagonals
_BOUNDS_COST = 8  # single pairs that take as long as the bounds of a box
_UNLIMITED = 1 << 62
_SAMPLES = 1 << 21  # pairs evaluated in all once the budget is spent
_MOST_SAMPLES = 1 << 12  # most pairs evaluated in one box then
_SAMPLED_AT_ONCE = 1 << 20
# Steps of a sequence that fills the unit square evenly: Roberts' R2, from the plastic number.
_ROW_STEP, _COLUMN_STEP = 0.7548776662466927, 0.5698402909980532


class PairCounts(NamedTuple):
    """Numbers of allowed pairs: bounds `low` and `high`, and an estimate, `likely`; all three are equal if exact."""

    low: Int64[Tensor, "..."]
    high: Int64[Tensor, "..."]
    likely: Float64[Tensor, "..."]

    @classmethod
    def zeros(cls, number: int) -> PairCounts:
        low, high = torch.zeros(2, number, dtype=torch.int64)
        return cls(low, high, torch.zeros(number, dtype=torch.float64))

    def add(self, owner: Tensor, *found: Tensor) -> None:
        """Add `found` to the counts at the indices `owner`, in place.

        found: one tensor of exact counts, or three tensors (low, high, likely).
        """
        for mine, theirs in zip(self, found if len(found) > 1 else found * 3, strict=True):
            mine.index_add_(0, owner, theirs.to(mine.dtype))


@dataclass
class Budget:
    """Remaining work of a search, counted in evaluations of single pairs; below 0 if the last step took more."""

    left: int

    def afford(self, boxes: int) -> bool:
        """Return True if the remaining budget covers the bounds of this number of boxes; nothing is subtracted."""
        return boxes * _BOUNDS_COST <= self.left

    def take(self, wanted: Tensor, each: int) -> Tensor:
        """Return the mask `wanted`, cut to its first boxes that fit the budget at `each` evaluations per box.

        The evaluations of these boxes are subtracted from the budget.
        """
        chosen = wanted & (wanted.cumsum(0) * each <= self.left)
        self.left -= int(chosen.sum()) * each
        return chosen


def pairs_of_queries(
    rule: Pattern, start: Int64[Tensor, " n"], stop: Int64[Tensor, " n"], num_tokens: int
) -> Int64[Tensor, " n"]:
    """Return, for each i, the number of allowed pairs of queries start[i] to stop[i] - 1 with keys below num_tokens.

    `rule` is the pattern of one head; start[i] <= stop[i] <= num_tokens. If the rule has a period and allows no pair
    between two periods, a whole period is counted once.
    """
    period = rule.period() if rule.confined() else None
    rows = num_tokens if period is None else min(period, num_tokens)
    first, last = start // rows, (stop - 1).clamp(min=0) // rows
    parts = [
        (first, start - first * rows, torch.minimum(stop - first * rows, torch.full_like(stop, rows)), 1),
        (first + 1, torch.zeros_like(start), torch.full_like(start, rows), last - first - 1),
        (last, torch.zeros_like(start), stop - last * rows, last > first),
    ]
    index, begin, end, times = (
        torch.cat([torch.as_tensor(each).expand_as(start) for each in column]) for column in zip(*parts, strict=True)
    )
    run = torch.arange(len(start)).repeat(len(parts))
    held = ((end > begin) & (times > 0)).nonzero().squeeze(1)
    # Each period equals the first, cut at num_tokens.
    keys = (num_tokens - index * rows).clamp(max=rows)
    begin, count, keys = begin[held], (end - begin)[held], keys[held]
    kind, one_of_each = numbered(begin, count, keys)
    q_first, q_count, k_count = (each[one_of_each] for each in (begin, count, keys))
    none = torch.zeros_like(q_first)
    pairs = exact_pairs(rule, Box(none, Progression(q_first, 1, q_count), Progression(none, 1, k_count)))
    return torch.zeros_like(start).index_add_(0, run[held], times[held].long() * pairs[kind])


def exact_pairs(rule: Pattern, box: Box) -> Counts:
    """Return the number of allowed pairs of each box, for the pattern of one head."""
    return _count_pairs(rule, box, Budget(_UNLIMITED), _FRONTIER).low


def bounded_pairs(rule: Pattern, box: Box, budget: Budget) -> PairCounts:
    """Return the number of allowed pairs of each box: exact while `budget` lasts, else bounds and a sampled estimate.

    An estimate of the work, without the sampling, is subtracted from `budget`, in place. `rule` is the pattern of one
    head.
    """
    return _count_pairs(rule, box, budget, _UNLIMITED)


def _count_pairs(rule: Pattern, box: Box, budget: Budget, at_once: int) -> PairCounts:
    """Return the number of allowed pairs of each box, as `bounded_pairs` does.

    Boxes that bounds leave undecided are cut into residue classes, in which dilated patterns are dense, then into
    halves. Nearly square boxes are counted by diagonals if the pattern is constant along them, small boxes pair by
    pair. Once the budget is spent, pairs are sampled.

    at_once: most boxes cut in one step.
    """
    found = PairCounts.zeros(len(box.head))
    cuts: list[tuple[int, bool]] = []  # (factor, whether queries and keys agree modulo it)
    if box.q.step == box.k.step == 1:  # else residue classes of a layout, in which rules are dense
        together, apart = residue_factors(rule)
        cuts = [*((factor, True) for factor in together), *((factor, False) for factor in apart)]
    held = Owned(torch.arange(len(box.head)), box).select((box.area > 0).nonzero().squeeze(1))
    stack = [(0, part) for part in in_chunks(held, at_once)]
    while stack:
        level, part = stack.pop()
        part = settle(rule, part, found) if level < len(cuts) else part
        classes = num_classes(part, *cuts[level]) if level < len(cuts) else 0
        if 0 < classes <= _MOST_CLASSES and budget.afford(len(part) * classes):
            budget.left -= len(part) * _BOUNDS_COST
            parts = [cut_classes(some, *cuts[level]) for some in in_chunks(part, max(1, _MOST_CLASSES // classes))]
        else:
            level, rest = len(cuts), _settle_within_budget(rule, part, found, budget)
            large = torch.maximum(rest.box.q.count, rest.box.k.count) > _CELL_SIDE
            if not budget.afford(2 * int(large.sum())):
                large = torch.zeros_like(large)
            _add_estimates(rule, rest.select((~large).nonzero().squeeze(1)), found)
            parts = [halves(rest.select(large.nonzero().squeeze(1)), rule.period() or 1)]
        stack.extend((level + 1, few) for some in parts for few in in_chunks(some, at_once))
    return found


def settle(rule: Pattern, owned: Owned, found: PairCounts) -> Owned:
    """Return the boxes whose bounds differ; add the counts of the others to `found` at their owners, in place."""
    left = [owned.select(torch.arange(0))]
    for few in in_chunks(owned, _FRONTIER):
        left.append(few.select(_add_exact(few, rule.count(few.box, num_heads=1), found)))
    return join(left)


def _add_exact(owned: Owned, bounds: Bounds, found: PairCounts) -> Tensor:
    """Return the indices of boxes with low < high; add the counts of all other boxes to `found`, in place."""
    exact = bounds.low == bounds.high
    found.add(owned.owner[exact], bounds.low[exact])
    return (~exact).nonzero().squeeze(1)


def _settle_within_budget(rule: Pattern, owned: Owned, found: PairCounts, budget: Budget) -> Owned:
    """Return the boxes that could not be counted; add the counts of all other boxes to `found`, in place.

    Boxes are counted by bounds. As far as the budget goes, boxes that bounds leave undecided are counted by diagonals,
    where these decide, and small ones pair by pair.
    """
    left = [owned.select(torch.arange(0))]
    for alike in by_size(owned):
        bounds = rule.count(alike.box, num_heads=1)
        doubtful = _add_exact(alike, bounds, found)
        rest, bounds = alike.select(doubtful), Bounds(bounds.low[doubtful], bounds.high[doubtful])
        if not len(rest):
            continue
        q, k = rest.box.q.count, rest.box.k.count
        longer, each = torch.maximum(q, k), int(q.max()) + int(k.max())
        budget.left -= len(rest) * _BOUNDS_COST
        before = budget.left
        where = budget.take((longer <= 2 * torch.minimum(q, k)) & (longer <= _LONGEST), each)
        undecided = _add_exact(rest, settle_by_diagonals(rule, rest.box, bounds, num_heads=1, where=where), found)
        budget.left = before - (len(rest) - len(undecided)) * each  # only boxes that diagonals decided are paid for
        rest = rest.select(undecided)
        q, k = rest.box.q.count, rest.box.k.count
        small = torch.maximum(q, k) <= _CELL_SIDE
        looked = budget.take(small, int(q.max()) * int(k.max()) if len(rest) else 0)
        pairs = torch.zeros_like(found.low)
        evaluate_pairs(rule, rest.select(looked.nonzero().squeeze(1)), pairs)
        found.add(torch.arange(len(pairs)), pairs)
        left.append(rest.select((~looked).nonzero().squeeze(1)))
    return join(left)


def _add_estimates(rule: Pattern, owned: Owned, found: PairCounts) -> None:
    """Add the bounds of each box to `found`, in place, and an estimate of its pairs from a sample."""
    if not len(owned):
        return
    samples = min(_MOST_SAMPLES, max(1, _SAMPLES // len(owned)))
    begin = 0
    for few in in_chunks(owned, max(1, _SAMPLED_AT_ONCE // samples)):
        box, bounds = few.box, rule.count(few.box, num_heads=1)
        row, column = even_places((len(few), samples), begin)
        q = _index_at(box.q.count, row) * box.q.step + box.q.first[:, None]
        k = _index_at(box.k.count, column) * box.k.step + box.k.first[:, None]
        head = box.head[:, None]
        allowed = rule.mask_mod(num_heads=1, device=torch.device("cpu"))(torch.zeros_like(head), head, q, k)
        likely = (allowed.double().mean(1) * box.area).clamp(bounds.low.double(), bounds.high.double())
        found.add(few.owner, bounds.low, bounds.high, likely)
        begin += len(few) * samples


def even_places(shape: tuple[int, int], begin: int = 0) -> tuple[Float64[Tensor, "n m"], Float64[Tensor, "n m"]]:
    """Return (x, y), each of this shape: the points begin, begin + 1, ... of a sequence that fills [0, 1)^2 evenly."""
    number = (begin + torch.arange(shape[0] * shape[1]).view(shape)).double()
    return (number * _ROW_STEP).frac(), (number * _COLUMN_STEP).frac()


def _index_at(count: Counts, share: Tensor) -> Tensor:
    """Return, for all i and j, the index at fraction share[i, j] of progression i, which has count[i] terms.

    share: fractions in [0, 1), of shape (n, m).
    """
    return (count[:, None] * share).long().minimum(count[:, None] - 1)


def settle_by_diagonals(pattern: Pattern, box: Box, bounds: Bounds, *, num_heads: int, where: Tensor) -> Bounds:
    """Return `bounds` with exact counts for boxes in the mask `where` that can be counted by their diagonals.

    Queries and keys of the boxes must have equal steps for that, and each diagonal must be known to be all allowed or
    all forbidden, see `_constant_on_diagonals`. The bounds of other boxes are unchanged.
    """
    doubtful = (where & (bounds.low < bounds.high)).nonzero().squeeze(1)
    if not len(doubtful) or box.q.step != box.k.step or not _some_part_has_period_dividing(pattern, box.k.step):
        return bounds
    doubtful = doubtful[_constant_on_diagonals(pattern, box.select(doubtful), num_heads)]
    if not len(doubtful):
        return bounds
    mask_mod = pattern.mask_mod(num_heads=num_heads, device=torch.device("cpu"))
    counts = count_by_lag(mask_mod, box.select(doubtful))
    return Bounds(bounds.low.index_copy(0, doubtful, counts), bounds.high.index_copy(0, doubtful, counts))


def count_by_lag(mask_mod: MaskMod, box: Box) -> Counts:
    """Return the number of allowed pairs of each box, from one evaluated pair for each diagonal.

    A diagonal is all pairs of one lag, key index - query index. The mask must allow all pairs of a diagonal or none,
    and queries and keys must have equal steps.
    """
    assert box.q.step == box.k.step
    lag = torch.arange(1 - int(box.q.count.max()), int(box.k.count.max()))
    return torch.cat([
        _count_chunk_by_lag(mask_mod, box.select(part), lag)
        for part in torch.arange(len(box.head)).split(max(1, _DIAGONALS_AT_ONCE // len(lag)))
    ])  # fmt: skip


def _count_chunk_by_lag(mask_mod: MaskMod, box: Box, lag: Tensor) -> Counts:
    rows, columns, head = box.q.count[:, None], box.k.count[:, None], box.head[:, None]
    row = (-lag).clamp(min=0)  # where the diagonal begins
    length = (torch.minimum(rows, columns - lag) - row).clamp(min=0)
    row, column = torch.where(length > 0, row, 0), torch.where(length > 0, row + lag, 0)
    query, key = box.q.first[:, None] + box.q.step * row, box.k.first[:, None] + box.k.step * column
    return (length * mask_mod(torch.zeros_like(head), head, query, key)).sum(1)


def _some_part_has_period_dividing(pattern: Pattern, step: int) -> bool:
    """Return True if one of the pattern's `_atoms` has a period that divides `step`."""
    periods = (part.period() for part in _atoms(pattern))
    return any(period is not None and step % period == 0 for period in periods)


def _constant_on_diagonals(pattern: Pattern, box: Box, num_heads: int) -> Tensor:
    """Return a bool for each box: True if the pattern is known to allow all or no pairs of each diagonal.

    It is known if each of the pattern's `_atoms` has a period that divides the step of the box, or by its bounds allows
    all pairs of the box or none.
    """
    repeats = torch.ones_like(box.head, dtype=torch.bool)
    for part in dict.fromkeys(_atoms(pattern)):
        period = part.period()
        if period is None or box.k.step % period:
            bounds = part.count(box, num_heads=num_heads)
            repeats &= (bounds.high == 0) | (bounds.low == box.area)
    return repeats


def _atoms(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the patterns that this one combines by unions, intersections, complements and choices by head or entry.

    Patterns of other kinds are not taken apart, even if they are derived from another pattern.
    """
    if isinstance(pattern, Composite):
        for part in pattern.parts:
            yield from _atoms(part)
    elif isinstance(pattern, Not):
        yield from _atoms(pattern.part)
    else:
        yield pattern
