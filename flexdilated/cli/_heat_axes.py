"""Axes of a heat map: round numbers beside the cells in which they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks.inspection import round_places
from ._sizes import tokens_text


class Tick(NamedTuple):
    """The number of a cell, and the slot that lies in it as text."""

    cell: int
    label: str


def round_slots(window: range, most: int) -> dict[int, str]:
    """About so many round slots of the window, and how they are written."""
    places = round_places(window, most)
    text = tokens_text if places.step % 1024 == 0 else "{:,}".format
    return {slot: text(slot) for slot in places if slot in window}


def ticks(window: range, edges: Tensor, most: int) -> list[Tick]:
    """Round slots, and the cells in which they lie."""
    slots = round_slots(window, most)
    cells = torch.searchsorted(edges, torch.tensor(list(slots), dtype=torch.int64), right=True) - 1
    return [Tick(cell, text) for cell, text in zip(cells.tolist(), slots.values(), strict=True)]


def labels_above(marks: Sequence[Tick], width: int, columns: int) -> tuple[str, list[int]]:
    """The labels in a line of at most so many columns, each above its cell, and the columns of those that fit."""
    line, shown = "", []
    for mark in marks:
        column = mark.cell * width
        if column < len(line) + bool(line) or column + len(mark.label) > columns:
            continue
        line, shown = line.ljust(column) + mark.label, [*shown, column]
    return line, shown
