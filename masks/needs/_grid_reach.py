"""Grid reach: the keys that a run of queries sees in neighbourhood attention, axis by axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ..core import Ranges, union_of
from ..patterns import Neighborhood, window_along
from ._asked import moved

Rectangle = tuple[range, ...]  # places along each axis, the outermost first


def seen_around(pattern: Neighborhood, queries: range) -> list[range]:
    """The keys that some query of a run sees; the parts of one rectangle may overlap those of another."""
    strides = [prod(pattern.grid[axis + 1 :]) for axis in range(len(pattern.grid))]
    run = range(queries.start, min(queries.stop, prod(pattern.grid)))
    found: list[range] = []
    for rectangle in _rectangles(run, strides):
        # The rule is one of each axis, and a rectangle has every combination of its places.
        along = [_windows(places, *axis) for places, axis in zip(rectangle, pattern.axes, strict=True)]
        found += _combined(along, strides)
    return found


def _rectangles(run: range, strides: Sequence[int]) -> Iterator[Rectangle]:
    """A run of tokens in row-major order as rectangles: a last part of a row, whole rows, a first part of one."""
    if not run:
        return
    stride, *inner = strides
    if not inner:
        yield (run,)
        return
    first, last = -(-run.start // stride), run.stop // stride
    if last < first:  # within one row
        yield from _in_row(last, range(run.start - last * stride, run.stop - last * stride), inner)
        return
    if run.start < first * stride:
        yield from _in_row(first - 1, range(run.start - (first - 1) * stride, stride), inner)
    if first < last:
        yield (range(first, last), *(range(outer // each) for outer, each in zip(strides, inner, strict=False)))
    if last * stride < run.stop:
        yield from _in_row(last, range(run.stop - last * stride), inner)


def _in_row(row: int, run: range, strides: Sequence[int]) -> Iterator[Rectangle]:
    return ((range(row, row + 1), *rest) for rest in _rectangles(run, strides))


def _windows(places: range, length: int, radius: int, rate: int) -> Ranges:
    """The places along an axis that lie in the window of one of these: by residue, the first window to the last."""
    found = []
    for first in places[:rate]:
        last = first + (places[-1] - first) // rate * rate
        begin, end = window_along(first, length, radius, rate), window_along(last, length, radius, rate)
        found.append(range(begin.start, end.stop, rate))
    return union_of(found)


def _combined(along: Sequence[Ranges], strides: Sequence[int]) -> list[range]:
    """The tokens whose place along each axis is one of these."""
    *outer, found = along
    for rows, stride in zip(reversed(outer), reversed(strides[:-1]), strict=True):
        if found == (range(stride),):
            runs = (run for each in rows for run in ([each] if each.step == 1 else _ones(each)))
            found = tuple(range(run.start * stride, run.stop * stride) for run in runs)
        else:
            found = tuple(moved(each, row * stride) for run in rows for row in run for each in found)
    return [*found]


def _ones(rows: range) -> Iterator[range]:
    return (range(row, row + 1) for row in rows)
