"""Axes of a heat map: round numbers beside the cells in which they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from ._sizes import tokens_text

_BINARY, _EVEN = 1 << 12, 1 << 6  # windows of so many slots, or of a multiple of so many, have powers of 2 as steps


class Tick(NamedTuple):
    """The number of a cell, and the slot that lies in it as text."""

    cell: int
    label: str


def round_slots(window: range, most: int) -> dict[int, str]:
    """Multiples of the smallest round step of which about so many lie in the window, and how they are written."""
    binary = len(window) >= _BINARY or len(window) % _EVEN == 0
    steps = (1 << power for power in count()) if binary else _decimal_steps()
    step = next(step for step in steps if len(window) <= max(most, 1) * step)
    text = tokens_text if step % 1024 == 0 else "{:,}".format
    return {slot: text(slot) for slot in range(-(-window.start // step) * step, window.stop, step)}


def ticks(window: range, edges: Tensor, most: int) -> list[Tick]:
    """Round slots, and the cells in which they lie."""
    slots = round_slots(window, most)
    cells = torch.searchsorted(edges, torch.tensor(list(slots), dtype=torch.int64), right=True) - 1
    return [Tick(cell, text) for cell, text in zip(cells.tolist(), slots.values(), strict=True)]


def _decimal_steps() -> Iterator[int]:
    for power in count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)


def labels_above(marks: Sequence[Tick], width: int, columns: int) -> tuple[str, list[int]]:
    """The labels in a line of at most so many columns, each above its cell, and the columns of those that fit."""
    line, shown = "", []
    for mark in marks:
        column = mark.cell * width
        if column < len(line) + bool(line) or column + len(mark.label) > columns:
            continue
        line, shown = line.ljust(column) + mark.label, [*shown, column]
    return line, shown
