"""Boxes: products of two arithmetic progressions of positions, and counts of their pairs by distance."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from jaxtyping import Int64
from torch import Tensor

Counts = Int64[Tensor, " n"]

# A box over more runs of positions than this, such as segments, is bounded by its area: the search for blocks splits it
# anyway.
EXACT_RUNS = 8


@dataclass(frozen=True)
class Progression:
    """n arithmetic progressions of positions with one common step, an integer above 0.

    Progression i has the count[i] terms first[i], first[i] + step, first[i] + 2 * step, and so on; count[i] may be 0.
    first, count: int64 tensors of shape (n,). `last` is the last term of each non-empty progression; `select(index)`
    indexes the n progressions.

    >>> masks.extend.Progression(torch.tensor([0, 5]), 4, torch.tensor([3, 2])).last  # of 0, 4, 8 and of 5, 9
    tensor([8, 9])
    """

    first: Counts
    step: int
    count: Counts

    @property
    def last(self) -> Counts:
        return self.first + self.step * (self.count - 1)

    def select(self, index: Tensor) -> "Progression":
        return Progression(self.first[index], self.step, self.count[index])


@dataclass(frozen=True)
class Box:
    """n boxes of attention pairs: box i pairs each query of q's i-th progression with each key of k's i-th one.

    head: global head of each box, int64 of shape (n,).

    `area` is the number of pairs of each box; `select(index)` indexes the n boxes.

    >>> rows = masks.extend.Progression(torch.tensor([0]), 1, torch.tensor([4]))
    >>> masks.extend.Box(torch.tensor([0]), rows, rows).area
    tensor([16])
    """

    head: Counts
    q: Progression
    k: Progression

    @property
    def area(self) -> Counts:
        return self.q.count * self.k.count

    def select(self, index: Tensor) -> "Box":
        return Box(self.head[index], self.q.select(index), self.k.select(index))


@dataclass(frozen=True)
class Squares:
    """n disjoint squares of attention pairs, with consecutive positions.

    Square i pairs each of the `side` queries from q_first[i] on with each of the `side` keys from k_first[i] on.
    """

    q_first: Counts
    k_first: Counts
    side: int


@dataclass(frozen=True)
class Bounds:
    """Bounds on the number of allowed pairs in each of n boxes, low <= number <= high; equal bounds are exact.

    low, high: int64 tensors of shape (n,), from 0 to the boxes' areas.

    A box with high 0 has no allowed pair and is left out of block lists. A box whose low is its area is full: all its
    pairs are allowed, and kernels need no mask there.

    >>> bounds = masks.extend.Bounds(low=torch.tensor([0]), high=torch.tensor([16]))  # valid for any box of area 16
    """

    low: Counts
    high: Counts


def count_residue(progression: Progression, modulus: int, residue: Counts) -> Counts:
    """Return the number of terms of each progression i that are congruent to residue[i] modulo `modulus`.

    residue: int64 of shape (n,).
    modulus: an integer above 0.

    >>> terms = masks.extend.Progression(torch.tensor([0]), 1, torch.tensor([10]))  # 0 to 9
    >>> masks.extend.count_residue(terms, 4, torch.tensor([1]))  # 1, 5 and 9
    tensor([3])
    """
    if progression.step % modulus == 0:  # all terms share a residue
        return torch.where(progression.first.remainder(modulus) == residue.remainder(modulus), progression.count, 0)
    return _first_index_and_count(progression, modulus, residue)[1]


def terms_of_class(progression: Progression, modulus: int, residue: int) -> Progression:
    """Return progressions of floor(term / modulus), over the terms that are congruent to `residue` modulo `modulus`.

    A progression without such terms has count 0.
    """
    if modulus == 1:
        return progression
    index, count = _first_index_and_count(progression, modulus, torch.full_like(progression.first, residue))
    first = (progression.first + progression.step * index).div(modulus, rounding_mode="floor")
    return Progression(first, progression.step // gcd(progression.step, modulus), count)


def _first_index_and_count(progression: Progression, modulus: int, residue: Counts) -> tuple[Counts, Counts]:
    """Return (index of the first term congruent to residue[i] modulo `modulus`, number of such terms) of progression i.

    Both are tensors of shape (n,). Where no term is congruent, the number is 0 and the index is arbitrary.
    """
    # Solves first + step * index = residue modulo `modulus`, by the inverse of step / divisor modulo modulus / divisor.
    divisor = gcd(progression.step, modulus)
    period = modulus // divisor
    distance = torch.remainder(residue - progression.first, modulus)
    index = distance.div(divisor, rounding_mode="floor") * pow(progression.step // divisor, -1, period)
    index = index.remainder(period)
    hits = (progression.count - 1 - index).div(period, rounding_mode="floor") + 1
    return index, torch.where(distance.remainder(divisor) == 0, hits.clamp(min=0), 0)


def clip(progression: Progression, start: Counts | int, stop: Counts | int) -> Progression:
    """Return the terms of each progression in [start, stop), with the step unchanged; the count is 0 if none remain.

    start, stop: integers, or int64 tensors of shape (n,).

    >>> terms = masks.extend.Progression(torch.tensor([0]), 4, torch.tensor([5]))  # 0, 4, 8, 12 and 16
    >>> masks.extend.clip(terms, 5, 15).first
    tensor([8])
    """
    step = progression.step
    skipped = (start - progression.first + step - 1).div(step, rounding_mode="floor").clamp(min=0)
    end = (stop - 1 - progression.first).div(step, rounding_mode="floor") + 1
    count = (torch.minimum(end, progression.count) - skipped).clamp(min=0)
    return Progression(progression.first + step * skipped, step, count)


def count_within(progression: Progression, start: Tensor | int, stop: Tensor | int) -> Tensor:
    """Return the number of terms of each of n progressions in [start, stop).

    start, stop: integers or tensors, start <= stop, that broadcast against (n,) to the shape of the result; with shape
        (m, n) there are m intervals for each progression.

    >>> terms = masks.extend.Progression(torch.tensor([0]), 4, torch.tensor([5]))  # 0, 4, 8, 12 and 16
    >>> masks.extend.count_within(terms, 5, 15)
    tensor([2])
    """
    step, count = progression.step, progression.count
    before, behind = (
        (edge - progression.first + (step - 1)).div(step, rounding_mode="floor").clamp(min=0).minimum(count)
        for edge in (start, stop)
    )
    return behind - before


def count_runs(number: Counts, area: Counts, pairs_in: Callable[[int], Counts]) -> Bounds:
    """Return bounds on the number of allowed pairs of each box, for a rule without pairs across runs of positions.

    Runs are, for example, segments. Bounds are exact for boxes with up to EXACT_RUNS (8) runs, else 0 and the area.

    number: number of runs in each box.
    area: number of pairs of each box.
    pairs_in: function (i) -> number of allowed pairs of each box in its run i, counted from 0; for boxes with at most i
        runs the number is ignored.

    >>> two_runs, area = torch.tensor([2]), torch.tensor([64])  # a box of 8 queries and 8 keys over two segments of 4
    >>> masks.extend.count_runs(two_runs, area, lambda index: torch.tensor([16])).low
    tensor([32])
    """
    pairs = torch.zeros_like(number)
    for index in range(min(int(number.max()), EXACT_RUNS) if len(number) else 0):
        pairs += torch.where(index < number, pairs_in(index), 0)
    exact = number <= EXACT_RUNS
    return Bounds(torch.where(exact, pairs, 0), torch.where(exact, pairs, area))


def count_between(box: Box, least: int | None, most: int | None) -> Bounds:
    """Return bounds on the pairs of each box with least <= key position - query position <= most; None sets no limit.

    Bounds are exact if q and k have equal steps. `least` must not exceed `most`.

    >>> rows = masks.extend.Progression(torch.tensor([0]), 1, torch.tensor([4]))
    >>> square = masks.extend.Box(torch.tensor([0]), rows, rows)
    >>> masks.extend.count_between(square, -1, 0).high  # each query's own key and the previous one
    tensor([7])
    """
    none, every = torch.zeros_like(box.area), box.area
    reached = Bounds(every, every) if most is None else count_below(box, most)
    missed = Bounds(none, none) if least is None else count_below(box, least - 1)
    # Exact where both counts are exact, else sound.
    return Bounds((reached.low - missed.high).clamp(min=0), reached.high - missed.low)


def count_below(box: Box, shift: int) -> Bounds:
    """Return bounds on the pairs of each box with key position - query position <= shift.

    Bounds are exact if q and k have equal steps. For other steps they are exact for boxes in which the condition holds
    for all pairs or for none, and 1 and area - 1 for other boxes.
    """
    area = box.area
    if box.q.step != box.k.step:
        none = (box.k.first - box.q.last > shift) | (area == 0)
        every = box.k.last - box.q.first <= shift
        low = torch.where(every, area, torch.where(none, 0, 1))
        return Bounds(low, torch.where(none, 0, torch.where(every, area, area - 1)))
    # key index j is allowed for query index i when j <= i + lead.
    lead = (box.q.first - box.k.first + shift).div(box.q.step, rounding_mode="floor")
    rows, columns = box.q.count, box.k.count
    begin = (-lead).clamp(min=0).minimum(rows)  # first row that sees a key
    full = (columns - 1 - lead).clamp(min=0).minimum(rows).maximum(begin)  # first row that sees all
    ramp = full - begin
    exact = ramp * (begin + lead + 1) + ramp * (ramp - 1) // 2 + (rows - full) * columns
    return Bounds(exact, exact)


def count_multiples(box: Box, rate: int, *, reach: tuple[int, int] | None = None) -> Bounds:
    """Return bounds on the pairs of each box whose key position - query position is a multiple of `rate`.

    Bounds are exact if q and k have equal steps. reach: (least, most), which also limits key position - query position
    to [least, most]; it must be None for unequal steps.

    >>> rows = masks.extend.Progression(torch.tensor([0]), 1, torch.tensor([4]))
    >>> square = masks.extend.Box(torch.tensor([0]), rows, rows)
    >>> masks.extend.count_multiples(square, 2).high  # distances -2, 0 and 2
    tensor([8])
    """
    if box.q.step == box.k.step:
        pairs = _count_multiples_by_lag(box, rate, reach)
        return Bounds(pairs, pairs)
    assert reach is None
    by_query, by_key = (_count_multiples_by_query(each, rate) for each in (box, Box(box.head, box.k, box.q)))
    return Bounds(torch.maximum(by_query.low, by_key.low), torch.minimum(by_query.high, by_key.high))


def _count_multiples_by_lag(box: Box, rate: int, reach: tuple[int, int] | None) -> Counts:
    """Return the exact number of pairs that `count_multiples` bounds, for boxes with equal steps of q and k.

    It counts by lag, key index - query index in the box: key position - query position is first key - first query +
    step * lag.
    """
    step, shift, columns = box.k.step, box.k.first - box.q.first, box.k.count
    # Lags with shift + step * lag = 0 modulo `rate` are one residue class modulo `period`, if `divisor` divides shift.
    divisor = gcd(step, rate)
    period = rate // divisor
    residue = -shift.div(divisor, rounding_mode="floor") * pow(step // divisor, -1, period)
    if reach is None:
        pairs = _count_up_to_lag(columns - 1, residue, period, box)
    else:
        least, most = reach
        last = (most - shift).div(step, rounding_mode="floor").minimum(columns - 1)
        skipped = (least - 1 - shift).div(step, rounding_mode="floor").minimum(columns - 1)
        pairs = _count_up_to_lag(last, residue, period, box) - _count_up_to_lag(skipped, residue, period, box)
    return torch.where(shift.remainder(divisor) == 0, pairs, 0)


def _count_up_to_lag(most: Tensor, residue: Tensor, period: int, box: Box) -> Counts:
    """Return the number of pairs of each box whose lag is at most `most` and congruent to `residue` modulo `period`.

    The lag of a pair is key index - query index. In a box of `rows` queries and `columns` keys, the number of pairs as
    a function of the lag is a trapezoid, the sum of ramps max(lag + rows, 0) - max(lag, 0) - max(lag + rows - columns,
    0). This holds up to the last lag, columns - 1, which `most` must not exceed.
    """
    rows, columns = box.q.count, box.k.count
    top = most - (most - residue).remainder(period)

    def total(height: Tensor) -> Tensor:  # height + (height - period) + ..., positive terms only
        height = height.clamp(min=0)
        further = height // period
        return (further + 1) * height - period * (further * (further + 1) // 2)

    return total(top + rows) - total(top) - total(top + rows - columns)


def _count_multiples_by_query(box: Box, rate: int) -> Bounds:
    """Return bounds on the pairs of each box whose distance is a multiple of `rate`, counted query by query.

    With d = gcd(key step, rate): if the distance of a query to the first key is a multiple of d, the query has one pair
    that counts among each rate / d consecutive keys; else it has none.
    """
    divisor = gcd(box.k.step, rate)
    every = rate // divisor
    fitting = count_residue(box.q, divisor, box.k.first)
    return Bounds(fitting * (box.k.count // every), fitting * -(-box.k.count // every))
