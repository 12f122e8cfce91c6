"""Ranges of positions: the keys of a query in closed form, intersections, and unions in few ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import gcd

import torch
from jaxtyping import Int64
from torch import Tensor

Ranges = tuple[range, ...]  # steps above 0, non-empty, disjoint

_MOST_INTERSECTIONS = 1 << 14  # most pairs of ranges to intersect, which takes milliseconds
# With more comparisons of two ranges, listing all positions is faster.
_MOST_COMPARISONS = 1 << 16
# Up to this many positions are also regrouped one by one: short ranges combine in more ways than long ones.
_FEW_POSITIONS = 1 << 10


def as_ranges(keys: range) -> Ranges:
    """Return (keys,), or () for an empty range."""
    return (keys,) if keys else ()


def within(keys: range, start: int, stop: int) -> range:
    """Return the positions of an ascending range that are in [start, stop)."""
    skipped = max(0, -(-(start - keys.start) // keys.step))
    return range(keys.start + skipped * keys.step, min(keys.stop, stop), keys.step)


def intersect(left: range, right: range) -> range:
    """Return the positions that two ascending ranges have in common, as one range."""
    if right.step == 1:
        return within(left, right.start, right.stop)
    if left.step == 1:
        return within(right, left.start, left.stop)
    divisor = gcd(left.step, right.step)
    if (right.start - left.start) % divisor:
        return range(0)
    # left.start + left.step * index meets right at one index in every right.step / divisor.
    cycle = right.step // divisor
    index = (right.start - left.start) // divisor * pow(left.step // divisor, -1, cycle) % cycle
    both = range(left.start + left.step * index, min(left.stop, right.stop), left.step * cycle)
    return within(both, right.start, both.stop)


def among(listed: Iterable[range], keys: range) -> Ranges:
    """Return the nonempty intersections of the disjoint ranges `listed` with `keys`; all steps must be above 0.

    >>> masks.extend.among([range(0, 20, 4), range(30, 40)], range(10, 30))
    (range(12, 20, 4),)
    """
    return tuple(both for each in listed if (both := intersect(each, keys)))


def intersect_all(left: Ranges, right: Ranges) -> Ranges | None:
    """Return the positions in both sets of ranges; None if there are more than 2**14 pairs of ranges."""
    if len(left) * len(right) > _MOST_INTERSECTIONS:
        return None
    return tuple(both for a in left for b in right if (both := intersect(a, b)))


def unite(ranges: Ranges) -> Ranges | None:
    """Return the union as disjoint ranges; None for more than 128 ranges, or if two ranges of steps above 1 overlap.

    Positions that are also in a range of step 1 do not count as overlap.
    """
    if len(ranges) ** 2 > _MOST_INTERSECTIONS:
        return None
    joined: list[range] = []
    for keys in sorted(ranges, key=lambda keys: keys.step):  # ranges of step 1 first: they can be cut out of later ones
        rest = [keys]
        for earlier in joined:
            if earlier.step == 1:
                rest = [left for piece in rest for left in _difference(piece, earlier)]
            elif any(intersect(piece, earlier) for piece in rest):
                return None
        joined += rest
    return tuple(joined)


def union_of(ranges: Iterable[range]) -> Ranges:
    """Return the union of ranges as disjoint ranges, ascending by their first positions.

    Ranges may be merged or cut. The result is not always the shortest, and arguments with equal positions may give
    different ranges.
    """
    runs, strided = _split_by_step(ranges)
    runs = _joined_runs(runs)
    comparisons = len(strided) * (len(runs) + len(strided))
    if comparisons > min(_MOST_COMPARISONS, max(_FEW_POSITIONS, sum(map(len, [*runs, *strided])))):
        return ranges_of(_sorted_positions([*runs, *strided]))
    parts = _disjoint_ranges(runs, strided)
    while (joined := _join_ranges(parts)) != parts:
        parts = joined
    if len(parts) > 1 and sum(map(len, parts)) <= _FEW_POSITIONS:
        parts = min(parts, ranges_of(_sorted_positions(parts)), key=len)
    return tuple(parts)


def ranges_of(positions: Int64[Tensor, " n"]) -> Ranges:
    """Return distinct ascending positions as ranges, cut where the distance to the next position changes.

    Consecutive integers always become one range of step 1. A larger distance joins positions only if it occurs twice
    or more in succession: 0 and 7 are two ranges. Positions 0, 4, 8, 9, 10 and 20 are range(0, 5, 4), range(8, 11) and
    range(20, 21).
    """
    if not len(positions):
        return ()
    distances = positions.diff().unique_consecutive(return_counts=True)
    steps, times = (each.tolist() for each in distances)
    ranges: list[range] = []
    # at: the position reached, where a run of equal distances begins; taken: True if a range has it already.
    at, taken = int(positions[0]), False
    for step, number, next_step in zip(steps, times, [*steps, 0][1:], strict=True):
        end = at + step * number
        # A distance that occurs once, or before consecutive positions, gives its last position to the next range.
        gives_last = step > 1 and (number == 1 or next_step == 1)
        start = at + step if taken else at
        last = end - step if gives_last else end
        if start <= last:
            ranges.append(range(start, last + 1, step if start < last else 1))
        at, taken = end, not gives_last
    return tuple(ranges) if taken else (*ranges, range(at, at + 1))


def joined_intervals(begin: Int64[Tensor, " n"], end: Int64[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Return the union of n non-empty intervals [begin[i], end[i]) as (begin, end) of ascending, separate intervals."""
    begin, order = begin.sort()
    reach = end[order].cummax(0).values
    first = (torch.nn.functional.pad(reach[:-1], (1, 0), value=-(1 << 62))[: len(begin)] < begin).nonzero().squeeze(1)
    last = torch.cat([first[1:] - 1, torch.tensor([len(begin) - 1])])[: len(first)]
    return begin[first], reach[last]


def _split_by_step(ranges: Iterable[range]) -> tuple[list[range], list[range]]:
    """Return (ranges of step 1, ranges of larger steps), without repeats and empty ranges.

    A single position is a range of step 1.
    """
    runs, strided = [], []
    for each in dict.fromkeys(ranges):
        if len(each) == 1:
            runs.append(range(each.start, each.start + 1))
        elif each:
            (runs if each.step == 1 else strided).append(each)
    return runs, strided


def _joined_runs(runs: list[range]) -> list[range]:
    joined: list[range] = []
    for run in sorted(runs, key=lambda run: run.start):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return joined


def _disjoint_ranges(runs: list[range], strided: list[range]) -> list[range]:
    """Return disjoint ranges with the positions of `runs` (step 1, disjoint) and `strided` (steps above 1).

    Runs are kept; other ranges, by ascending step, lose the positions of runs and of earlier ranges.
    """
    parts = list(runs)
    for each in sorted(strided, key=lambda each: (each.step, each.start)):
        rest = [each]
        for earlier in tuple(parts):
            if earlier.start < each.stop and each.start < earlier.stop:
                rest = [left for piece in rest for left in _difference(piece, earlier)]
        parts += rest
    return parts


def _difference(piece: range, other: range) -> Iterator[range]:
    both = intersect(piece, other)
    if not both:
        yield piece
        return
    # The step of a single common position has no meaning.
    times = both.step // piece.step if len(both) > 1 else 1
    parts = [within(piece, piece.start, both.start), within(piece, both[-1] + 1, piece.stop)]
    parts += [range(both.start + shift * piece.step, both[-1], both.step) for shift in range(1, times)]
    yield from (part for part in parts if part)


def _join_ranges(parts: Sequence[range]) -> list[range]:
    """Return the ranges, ascending by first positions, after merging some that continue each other or interleave."""
    runs, strided = _split_by_step(parts)
    joined = list(runs)
    for step, group in groupby(sorted(strided, key=lambda each: (each.step, each.start)), key=lambda each: each.step):
        joined += _join_interleaved(_join_continuing(list(group)), step)
    runs, strided = _split_by_step(joined)
    return sorted((*_joined_runs(runs), *strided), key=lambda each: each.start)


def _join_continuing(ranges: list[range]) -> list[range]:
    """Return disjoint ascending ranges of one step, merged where one continues another, as 8, 12 continues 0, 4."""
    by_end: dict[int, range] = {}
    for each in ranges:  # in ascending order of their first positions
        before = by_end.pop(each.start, None)
        whole = each if before is None else range(before.start, each.stop, each.step)
        by_end[whole[-1] + each.step] = whole
    return sorted(by_end.values(), key=lambda each: each.start)


def _join_interleaved(ranges: list[range], step: int) -> list[range]:
    """Return ranges of one step, merged into one range of a smaller step if they fill each other's gaps evenly.

    Positions before or after the merged range stay in ranges of the old step. Ranges that do not fit together are
    returned unchanged: e.g. 0, 4, 8 and 2, 6 become 0, 2, 4, 6, 8, but 0, 4, 8 and 1, 5 remain.
    """
    residues = sorted({each.start % step for each in ranges})
    gap = step // len(residues)
    evenly = step % len(residues) == 0 and all(b - a == gap for a, b in pairwise(residues))
    if len(residues) < 2 or len(residues) < len(ranges) or not evenly:
        return ranges
    begin = max(each.start for each in ranges) - step + gap
    end = min(each[-1] for each in ranges) + step
    if begin >= end:
        return ranges
    filled = range(begin, end - gap + 1, gap)
    edges = [within(each, *side) for each in ranges for side in ((each.start, begin), (end, each.stop))]
    return [filled, *(edge for edge in edges if edge)]


def _sorted_positions(ranges: Iterable[range]) -> Int64[Tensor, " n"]:
    first, step, count = torch.tensor([(each.start, each.step, len(each)) for each in ranges]).unbind(1)
    place = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    return (first.repeat_interleave(count) + step.repeat_interleave(count) * place).unique()
