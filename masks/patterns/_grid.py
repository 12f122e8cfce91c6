"""Token grids in row-major order: progressions of positions as rectangles of coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ..core import Progression

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
