"""Token grids in row-major order: positions as rectangles of coordinates, and the pairs of windows along an axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Progression,
    Ranges,
    clip,
    count_below,
    count_multiples,
    count_within,
    terms_of_class,
    within,
)

_MOST_CLASSES = 64  # up to this many residue classes of places, or of queries by place in a group, are counted exactly
_FEW_CLASSES = 3  # with more classes, counting whole groups in three sums is faster

# The product of one progression of coordinates for each axis of the grid, the outermost first.
Rectangle = tuple[Progression, ...]


def fits(step: int, grid: tuple[int, ...]) -> bool:
    """Return True if `rectangles` can split arithmetic progressions of row-major positions with this step.

    grid: lengths of the axes, the outermost first.

    With one axis every step fits. Otherwise the step must divide grid[-1], or be a multiple of it such that
    step // grid[-1] fits grid[:-1].
    """
    inner = grid[-1]
    if len(grid) == 1 or inner % step == 0:
        return True
    return step % inner == 0 and fits(step // inner, grid[:-1])


def hull(progression: Progression) -> Progression:
    return Progression(progression.first, 1, progression.step * (progression.count - 1) + 1)


def rectangles(progression: Progression, grid: tuple[int, ...]) -> Iterator[Rectangle]:
    """Yield the rectangles (products of one progression for each axis) that n progressions of positions consist of.

    grid: lengths of the axes, the outermost first; `fits` must be True for the step of the progressions.

    Each yielded item is a batch of n rectangles, one for each progression; a rectangle may be empty. With two axes, and
    a step that divides the length of a row, the items are the end of a row, the beginning of another row, and the whole
    rows between them.
    """
    *outer, inner = grid
    step, first, count = progression.step, progression.first, progression.count
    if not outer:
        yield (progression,)
        return
    if inner % step:
        column = Progression(first % inner, 1, torch.ones_like(count))
        for rows in rectangles(Progression(first // inner, step // inner, count), tuple(outer)):
            yield (*rows, column)
        return
    width, phase = inner // step, first % step
    begin, end = first // step, first // step + count
    whole_from = torch.minimum(-(-begin // width) * width, end)
    whole_to = torch.maximum(end // width * width, whole_from)
    for start, stop in ((begin, whole_from), (whole_to, end)):
        row, place = start // width, start % width
        yield (*_coordinates(row, outer), Progression(phase + step * place, step, stop - start))
    rows = Progression(whole_from // width, 1, (whole_to - whole_from) // width)
    for rectangle in rectangles(rows, tuple(outer)):
        yield (*rectangle, Progression(phase, step, torch.full_like(count, width)))


def select(rectangle: Rectangle, index: Tensor) -> Rectangle:
    return tuple(side.select(index) for side in rectangle)


@dataclass(frozen=True)
class Rectangles:
    """R non-empty rectangles of a grid; run[r] is the index of the progression or slot run that holds rectangle r.

    sides: for each axis of the grid, outermost first, the R progressions of coordinates.
    """

    run: Int64[Tensor, " R"]
    sides: Rectangle

    def first_and_is_only(self, number: int) -> tuple[Int64[Tensor, " n"], Bool[Tensor, " n"]]:
        """Return two tensors (first, is_only) with one entry for each progression or slot run, 0 to number - 1.

        first: index of one rectangle of this progression or run, 0 if there is none.
        is_only: True if there is exactly one.
        """
        first = torch.zeros(number, dtype=torch.int64).scatter_(0, self.run, torch.arange(len(self.run)))
        return first, self.run.bincount(minlength=number) == 1


def rectangles_of(progression: Progression, grid: tuple[int, ...]) -> Rectangles:
    run, sides = torch.arange(len(progression.first)), []
    for part in rectangles(progression, grid):
        held = reduce(torch.logical_and, (side.count > 0 for side in part)).nonzero().squeeze(1)
        sides.append((run[held], select(part, held)))
    runs, found = zip(*sides, strict=True)
    return Rectangles(torch.cat(runs), joined(*found))


def joined(*boxes: Rectangle) -> Rectangle:
    """Return batches of rectangles concatenated into one; the batches must have equal steps along each axis."""
    return tuple(
        Progression(torch.cat([side.first for side in sides]), sides[0].step, torch.cat([side.count for side in sides]))
        for sides in zip(*boxes, strict=True)
    )


def pairs_of(q_run: Tensor, k_run: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return (i, j), the indices of all pairs with q_run[i] == k_run[j].

    q_run, k_run: `run` of the query and of the key rectangles (see `Rectangles`); all entries are below `number`.
    """
    k_order, k_number = k_run.argsort(), torch.bincount(k_run, minlength=number)
    k_first, partners = (k_number.cumsum(0) - k_number)[q_run], k_number[q_run]
    q_index = torch.repeat_interleave(partners)
    nth = torch.arange(len(q_index)) - (partners.cumsum(0) - partners)[q_index]
    return q_index, k_order[k_first[q_index] + nth]


def _coordinates(row: Tensor, grid: list[int]) -> Rectangle:
    """Return the coordinates of rows of a grid along its outer axes, as progressions of one term.

    row: row-major numbers of the rows.
    grid: lengths of the outer axes.

    For rows beyond the grid the outermost coordinate is at least the length of its axis.
    """
    one = torch.ones_like(row)
    coordinates = [row // prod(grid[axis + 1 :]) for axis in range(len(grid))]
    inner = [coordinate % length for coordinate, length in zip(coordinates[1:], grid[1:], strict=True)]
    return tuple(Progression(first, 1, one) for first in (coordinates[0], *inner))


def box_of(q: Progression, k: Progression) -> Box:
    """Return the boxes of n pairs of progressions of places, all of head 0: windows do not depend on the head."""
    return Box(torch.zeros_like(q.first), q, k)


@dataclass(frozen=True)
class Axis:
    """One axis of a grid, of `length` places, and the windows of `size` keys that queries see along it.

    Places with equal residues modulo `rate` form a class; they are numbered from 0 within it and see only their class.
    Each `stride` consecutive queries of a class form a group with one window, that of the group's leader. With
    `is_causal` the leader is the last query of the group, its window ends at itself, and each query sees the keys of
    the window up to its own place. Otherwise the leader is the middle of the group (the later one of two in
    the middle), with size // 2 keys of its window before it. Windows that would cross an end of the class are shifted
    inwards. `stride` must be at most `size`, and size * rate at most `length`.

    With `wraps` the axis is periodic: a window that crosses an end continues at the other end and is not shifted. Then
    rate * stride must divide the length, a window must be shorter than its class, and the axis must not be causal.
    """

    length: int
    size: int
    rate: int = 1
    stride: int = 1
    is_causal: bool = False
    wraps: bool = False

    @property
    def lead(self) -> int:
        """Number of keys of an unshifted window that are before the first query of its group; never below 0."""
        return self.size - self.stride if self.is_causal else self.size // 2 - self.stride // 2

    def seen(self, first: int, last: int) -> Ranges:
        """Return the places that the queries first, first + rate, ..., last see, as ascending ranges of step `rate`."""
        rate, residue = self.rate, first % self.rate
        held = self._class_length(residue)
        begin, end = (self._window_begin(place // rate, held) for place in (first, last))
        stop = last // rate + 1 if self.is_causal else end + self.size
        if stop - begin >= held:
            begin, stop = 0, held
        parts = (within(range(begin + turn, stop + turn), 0, held) for turn in self._wrap_shifts(held))
        return tuple(range(residue + rate * part[0], residue + rate * part[-1] + 1, rate) for part in parts if part)

    def _window_begin(self, number: int, held: int) -> int:
        """Return the first place of a query's window; below 0 if the window wraps around the beginning of the class.

        number: place of the query. Places are numbered from 0 within the class, in the result too.
        held: number of places of the class.
        """
        # NATTEN cuts causal windows off at the first key of the class: an equal rule, as a query sees no later key.
        begin = number // self.stride * self.stride - self.lead
        return begin if self.wraps else min(max(begin, 0), held - self.size)

    def _wrap_shifts(self, held: int) -> tuple[int, ...]:
        """Return the shifts to try for the places of a window: (-held, 0, held) if the axis wraps, else (0,).

        The shifted places that lie in [0, held) are together the whole window.

        held: number of places of the class; or the length of the axis, to shift distances key - query.
        """
        return (-held, 0, held) if self.wraps else (0,)

    def count(self, q: Progression, k: Progression) -> Bounds:
        """Return bounds on the number of pairs, in each of n boxes, whose key is in the query's window.

        Box i is all places of q's i-th progression with all places of k's; it may be empty. Bounds are exact if q and k
        have equal steps, and `rate` and `stride` are at most 64.
        """
        if self.rate > _MOST_CLASSES:
            return self._count_by_distance(q, k)
        low = high = torch.zeros_like(q.first)
        for residue in range(self.rate):
            box = box_of(terms_of_class(q, self.rate, residue), terms_of_class(k, self.rate, residue))
            bounds = self._count_in_class(box, self._class_length(residue))
            low, high = low + bounds.low, high + bounds.high
        return Bounds(low, high)

    def likeness(self, q: Progression, k: Progression) -> tuple[Tensor, Tensor]:
        """Return two integer tensors, with an entry for each of n boxes of places.

        Boxes with equal entries in both, and with equal counts and steps of queries and of keys, have equal masks. Far
        from the ends of the axis, the entries depend only on the distance from the first query to the first key, and on
        the first query modulo rate * stride. On an axis that wraps this holds everywhere, with distances modulo the
        length.
        """
        ahead = k.first - q.first
        if self.wraps:
            inner = (q.last < self.length) & (k.last < self.length)
            ahead = torch.where(inner, ahead.remainder(self.length), ahead)
        else:
            inner = q.first >= (self.lead + self.stride - 1) * self.rate
            inner &= self.length - 1 - q.last >= (self.size - self.lead - 1) * self.rate
        return torch.where(inner, -1 - q.first % (self.rate * self.stride), q.first), ahead

    def _class_length(self, residue: int) -> int:
        return (self.length - 1 - residue) // self.rate + 1

    def _count_by_distance(self, q: Progression, k: Progression) -> Bounds:
        """Return bounds on the allowed pairs of each box, from the distances key - query.

        low counts the pairs at distances that every window contains, high those at distances that any window may
        contain. For unequal steps of q and k, low is 0, and high bounds the number of pairs within a residue class.
        """
        box = box_of(*(clip(side, 0, self.length) for side in (q, k)))
        if q.step != k.step:
            return Bounds(torch.zeros_like(q.first), count_multiples(box, self.rate).high)
        surely = -self.lead, self.size - self.stride - self.lead
        perhaps = 1 - self.size, 0 if self.is_causal else self.size - 1
        if self.wraps:
            perhaps = 1 - self.stride - self.lead, self.size - 1 - self.lead
        reaches = (
            [(least * self.rate + turn, most * self.rate + turn) for turn in self._wrap_shifts(self.length)]
            for least, most in (surely, perhaps)
        )
        near, far = (
            reduce(torch.add, [count_multiples(box, self.rate, reach=reach).low for reach in turned])
            for turned in reaches
        )
        return Bounds(near, far.minimum(count_multiples(box, self.rate).high))

    def _count_in_class(self, box: Box, held: int) -> Bounds:
        """Return bounds on the allowed pairs of each box within one residue class of `held` places.

        Positions in `box` are numbered within the class.
        """
        # The pairs of a query are the keys before the end of its window minus the keys before the beginning of its
        # window; both are summed over all queries, by groups.
        q, k = clip(box.q, 0, held), clip(box.k, 0, held)
        groups = list(self._group_counts(q))
        unlike = q.step != k.step if self.is_causal else any(first.step % k.step for first, _ in groups)
        if unlike or not groups:
            return self._count_by_ends(q, k, held)
        none, every = torch.zeros_like(k.count), k.count
        latest, soonest = (
            (every, none) if self.wraps else (count_within(k, 0, stop) for stop in (held - self.size, self.size))
        )
        turns, end = self._wrap_shifts(held), self.size - self.lead
        pairs = -sum(
            times * _keys_before(first, turn - self.lead, k, 0, latest) for first, times in groups for turn in turns
        )
        if self.is_causal:
            pairs = pairs + count_below(Box(box.head, q, k), 0).low
        else:
            pairs = pairs + sum(
                times * _keys_before(first, turn + end, k, soonest, every) for first, times in groups for turn in turns
            )
        pairs = torch.where(q.count > 0, pairs, 0)
        return Bounds(pairs, pairs)

    def _group_counts(self, q: Progression) -> Iterator[tuple[Progression, Tensor | int]]:
        """Yield items (first places of some groups, number of queries in each), which add up to the queries of q.

        A group is the queries that share a window, see `Axis`. The numbers of a group, summed over all items that
        contain it, give the number of its queries that are in q. A negative number subtracts queries that an earlier
        item counted although q has only a part of the first or last group. Yields nothing if more than 64 items would
        be needed.
        """
        stride, cycle = self.stride, self.stride // gcd(self.stride, q.step)
        if q.step * cycle == stride and cycle > _FEW_CLASSES:
            begin, end, one = q.first // stride, q.last // stride, torch.ones_like(q.first)
            yield Progression(begin * stride, stride, end - begin + 1), cycle
            yield Progression(begin * stride, stride, one), -(q.first % stride // q.step)
            yield Progression(end * stride, stride, one), q.last % stride // q.step + 1 - cycle
        elif cycle <= _MOST_CLASSES:
            for index in range(cycle):
                first = (q.first + q.step * index) // stride * stride
                yield Progression(first, q.step * cycle, (q.count - index + cycle - 1) // cycle), 1

    def _count_by_ends(self, q: Progression, k: Progression, held: int) -> Bounds:
        """Return bounds on the allowed pairs of each box, from the windows of its first and its last query.

        All other windows are between these two. held: number of places of the residue class.
        """
        begins = [place // self.stride * self.stride - self.lead for place in (q.first, q.last)]
        if not self.wraps:
            begins = [begin.clamp(min=0, max=held - self.size) for begin in begins]
        stops = [q.first + 1, q.last + 1] if self.is_causal else [begin + self.size for begin in begins]

        def keys_in(begin: Tensor, stop: Tensor) -> Tensor:
            shifts = self._wrap_shifts(held)
            return reduce(torch.add, [count_within(k, begin + turn, stop.maximum(begin) + turn) for turn in shifts])

        shared, reached = keys_in(begins[1], stops[0]), keys_in(begins[0], stops[1])
        return Bounds(*(torch.where(q.count > 0, q.count * keys.minimum(k.count), 0) for keys in (shared, reached)))


def _keys_before(groups: Progression, ahead: int, k: Progression, least: Tensor | int, most: Tensor) -> Tensor:
    """Return, for each i, the number of keys of k[i] before p + `ahead`, summed over the places p of groups[i].

    Before the sum, the number for each place is clipped to [least, most]. The step of `groups` must be a multiple of
    the step of k.
    """
    step, count = groups.step // k.step, groups.count
    first = (groups.first + ahead - k.first + k.step - 1).div(k.step, rounding_mode="floor")
    fewer, further = (
        (limit - first + step - 1).div(step, rounding_mode="floor").clamp(min=0).minimum(count)
        for limit in (least, most)
    )
    ramp = (further - fewer) * first + step * ((further - fewer) * (fewer + further - 1) // 2)
    return fewer * least + ramp + (count - further) * most
