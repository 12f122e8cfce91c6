"""Levels of a heat map: how full a cell is, and how that is shown."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from ..masks.inspection import Cells

# R rows, C columns

_MOST_TIMES = 9


@dataclass(frozen=True)
class Level:
    """A shape, one in plain ASCII, the number of a colour of 256, and what it means."""

    shape: str
    ascii: str
    colour: int
    meaning: str

    @property
    def is_times(self) -> bool:
        """Whether the shape itself is a number of times."""
        return self.shape.isdigit()


NONE = Level(" ", " ", 0, "none")
UNKNOWN = Level("?", "?", 240, "none found, some possible")
_ALL = Level("█", "#", 220, "all")
# The least share of pairs for each level. Colours tell more apart than shapes do.
_BY_SHAPE = {
    0.0: Level("·", ".", 60, "less"),
    0.001: Level("░", "-", 26, "0.1%+"),
    0.01: Level("▒", "+", 37, "1%+"),
    0.1: Level("▓", "*", 113, "10%+"),
    1.0: _ALL,
}
_BY_COLOUR = {
    **_BY_SHAPE,
    0.003: Level("░", "-", 32, "0.3%+"),
    0.03: Level("▒", "+", 72, "3%+"),
    0.3: Level("▓", "*", 184, "30%+"),
}
_TIMES_COLOURS = (209, 203, 197, 198, 199, 164, 128, 92)


def levels_of(cells: Cells, *, colour: bool) -> tuple[tuple[Level, ...], Int64[Tensor, "R C"]]:
    """All levels that a picture may show, and the level of each cell by its number among them."""
    shares = dict(sorted((_BY_COLOUR if colour else _BY_SHAPE).items()))
    single, mixed = bool((cells.area == 1).all()), len(cells.branches) > 1
    levels = (NONE, UNKNOWN, *list(shares.values())[:-1], _full(single, mixed), *_several(single))
    share = cells.likely / cells.area
    number = 2 + torch.bucketize(share, torch.tensor(list(shares)[1:], dtype=torch.float64), right=True)
    several = share > 1
    number[several] = len(shares) + share[several].ceil().clamp(max=_MOST_TIMES).long()
    number[(share == 0) & (cells.high > 0)] = 1
    number[cells.high == 0] = 0
    return levels, number


def _full(single: bool, mixed: bool) -> Level:
    """The level of one for each pair, of cells of a single pair or of many."""
    if single:
        return replace(_ALL, meaning="branch", shape="1", ascii="1") if mixed else replace(_ALL, meaning="allowed")
    return replace(_ALL, meaning="once each") if mixed else _ALL


def _several(single: bool) -> tuple[Level, ...]:
    """Levels of pairs that count more than once."""

    def meaning(times: int) -> str:
        last = times == _MOST_TIMES
        if single:
            return "branches or more" if last else "branches"
        return f"more than {times - 1} times each" if last else f"{times - 1} to {times} times each"

    shapes = enumerate(_TIMES_COLOURS, start=2)
    return tuple(Level(str(times), str(times), colour, meaning(times)) for times, colour in shapes)


def levels_used(levels: tuple[Level, ...], number: Int64[Tensor, "R C"]) -> tuple[Level, ...]:
    """Those that occur, the fullest first; cells without a pair are not shown at all."""
    return tuple(levels[index] for index in reversed(number.unique().tolist()) if index)
