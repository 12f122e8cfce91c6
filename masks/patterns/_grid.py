"""Token grids in row-major order: progressions of positions as rectangles of coordinates, and windows along an axis."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ..core import Bounds, Box, Progression, clip, count_between, count_multiples, count_within, terms_of_class

_MOST_CLASSES = 64

# One progression for each axis of the grid, the outermost first: their product.
Rectangle = tuple[Progression, ...]


def fits(step: int, grid: tuple[int, ...]) -> bool:
    """Whether progressions of this step fall into rectangles: the step goes through rows evenly, or over whole rows."""
    inner = grid[-1]
    if len(grid) == 1 or inner % step == 0:
        return True
    return step % inner == 0 and fits(step // inner, grid[:-1])


def hull(progression: Progression) -> Progression:
    """All positions from the first to the last."""
    return Progression(progression.first, 1, progression.step * (progression.count - 1) + 1)


def rectangles(progression: Progression, grid: tuple[int, ...]) -> Iterator[Rectangle]:
    """Rectangles whose terms together are those of the progressions, of a step that fits; some may be empty.

    A row-major run is the rest of a row, whole rows, and the beginning of another row.
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


def _coordinates(row: Tensor, grid: list[int]) -> Rectangle:
    """One row's coordinates along the outer axes; beyond the grid they go on along the outermost."""
    one = torch.ones_like(row)
    coordinates = [row // prod(grid[axis + 1 :]) for axis in range(len(grid))]
    inner = [coordinate % length for coordinate, length in zip(coordinates[1:], grid[1:], strict=True)]
    return tuple(Progression(first, 1, one) for first in (coordinates[0], *inner))


def count_window(head: Tensor, q: Progression, k: Progression, *, length: int, radius: int, rate: int) -> Bounds:
    """Pairs of coordinates, each n progressions, whose key lies in the query's window.

    Coordinates of one residue modulo `rate` are neighbours of each other; a window holds 2 * radius + 1 of
    them. Exact for equal steps and up to 64 classes; with more, exact where no window is shifted. Progressions may
    be empty.
    """
    if rate > _MOST_CLASSES:
        return _count_by_distance(head, q, k, length, radius * rate, rate)
    low = high = torch.zeros_like(q.first)
    for residue in range(rate):
        box = Box(head, terms_of_class(q, rate, residue), terms_of_class(k, rate, residue))
        bounds = _count_in_class(box, (length - 1 - residue) // rate + 1, radius)
        low, high = low + bounds.low, high + bounds.high
    return Bounds(low, high)


def _count_by_distance(head: Tensor, q: Progression, k: Progression, length: int, reach: int, rate: int) -> Bounds:
    """All keys of the class within `reach` tokens are in the window; a shifted one holds some up to twice as far."""
    box = Box(head, *(clip(side, 0, length) for side in (q, k)))
    if q.step != k.step:
        return Bounds(torch.zeros_like(q.first), count_multiples(box, rate).high)
    near, far = (count_multiples(box, rate, reach=(-most, most)) for most in (reach, 2 * reach))
    return Bounds(near.low, far.high)


def _count_in_class(box: Box, length: int, radius: int) -> Bounds:
    """Queries near the start share the first window, those near the end the last; the others have their own."""
    window = 2 * radius + 1
    edges = count_within(box.q, 0, radius) * count_within(box.k, 0, window)
    edges += count_within(box.q, length - radius, length) * count_within(box.k, length - window, length)
    inner = Box(box.head, clip(box.q, radius, length - radius), clip(box.k, 0, length))
    near, area = count_between(inner, -radius, radius), inner.area
    return Bounds(edges + near.low.minimum(area), edges + near.high.clamp(min=0).minimum(area))
