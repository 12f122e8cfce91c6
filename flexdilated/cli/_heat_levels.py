"""Levels of a heat map: how full a cell is, and how that is shown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from ..masks._cells import Cells
from ._terminal import Terminal

# R rows, C columns

_MOST_TIMES = 9
_BOUNDS = (0.001, 0.01, 0.1, 1.0)  # shares of pairs below which the first levels lie


@dataclass(frozen=True)
class Level:
    """A shape, one in plain ASCII, the number of a colour of 256, and what it means."""

    shape: str
    ascii: str
    colour: int
    meaning: str


NONE = Level(" ", " ", 0, "none")
UNKNOWN = Level("?", "?", 240, "none found, some possible")
# More pairs than one in 1 means that a pair is allowed by several branches.
_SHARES = (
    Level("·", ".", 60, "below 0.1%"),
    Level("░", "-", 32, "0.1%"),
    Level("▒", "+", 37, "1%"),
    Level("▓", "*", 71, "10%"),
    Level("█", "#", 220, "all"),
)
_TIMES_COLOURS = (208, 202, 196, 199, 201, 165, 129, 93)


def levels_of(cells: Cells) -> tuple[tuple[Level, ...], Int64[Tensor, "R C"]]:
    """All levels that a picture may show, and the level of each cell by its number among them."""
    levels = (NONE, UNKNOWN, *(_of_pairs(cells) if bool((cells.area == 1).all()) else _SHARES), *_several(cells))
    share = cells.likely / cells.area
    number = 2 + torch.bucketize(share, torch.tensor(_BOUNDS, dtype=torch.float64), right=True)
    several = share > 1
    number[several] = 6 + share[several].ceil().clamp(max=_MOST_TIMES).long() - 1
    number[(share == 0) & (cells.high > 0)] = 1
    number[cells.high == 0] = 0
    return levels, number


def _of_pairs(cells: Cells) -> tuple[Level, ...]:
    """The same where each cell is a pair: it is allowed or it is not."""
    *others, last = _SHARES
    if len(cells.branches) > 1:
        return (*others, Level("1", "1", last.colour, "one branch allows it"))
    return (*others, Level(last.shape, last.ascii, last.colour, "allowed"))


def _several(cells: Cells) -> tuple[Level, ...]:
    """Levels of cells whose pairs count more than once."""
    single = bool((cells.area == 1).all())

    def meaning(times: int) -> str:
        least = f"{times} or more" if times == _MOST_TIMES else str(times)
        return f"{least} branches" if single else f"up to {least} times each on average"

    shown = [(str(times), colour) for times, colour in enumerate(_TIMES_COLOURS, start=2)]
    return tuple(Level(digit, digit, colour, meaning(int(digit))) for digit, colour in shown)


def shown(level: Level, terminal: Terminal) -> str:
    """The character of a level where there are no colours."""
    return level.shape if terminal.shapes else level.ascii


def legend(levels: tuple[Level, ...], number: Int64[Tensor, "R C"], terminal: Terminal) -> list[str]:
    """What the levels that occur mean, in lines that fit."""
    used = [levels[index] for index in number.unique().tolist()]
    return [""]
