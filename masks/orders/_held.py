"""Held: the active tokens of each segment among those that a device holds, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.functional import pad

from ..core import Ranges

# H heads, T rows of tokens, S slots


@dataclass(frozen=True)
class Held:
    """The positions of some runs at every `step`-th place of a segment from an offset on, ascending.

    Heads of the same offset and runs share a row of them; `rows` has that of each head, `offsets` and `runs` are those
    of each row. Slots beyond a row's last hold nothing; all of them are whole blocks of `side`, at least two: a graph
    compiled for any number of them would take one for a constant.
    """

    offsets: tuple[int, ...]
    runs: tuple[Ranges, ...]
    rows: tuple[int, ...]
    step: int
    segment: int
    side: int = 1
    folds = 1
    is_natural = False
    is_copied = True

    def in_blocks_of(self, side: int) -> Held:
        """The same, filled up to whole blocks of this side."""
        return replace(self, side=side)

    @property
    def num_slots(self) -> int:
        return self.positions.shape[1]

    @cached_property
    def positions(self) -> Int64[Tensor, "T S"]:
        """The position in each slot of each row; -1 where there is none."""
        rows = [self._active(*row) for row in zip(self.offsets, self.runs, strict=True)]
        slots = max(2, -(-max(map(len, rows)) // self.side)) * self.side
        return torch.stack([pad(row, (0, slots - len(row)), value=-1) for row in rows])

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "H 1 S"]:
        """The position in each slot of each head, of the one fold; -1 where there is none."""
        return self.positions[list(self.rows), None].to(device or "cpu")

    def _active(self, offset: int, runs: Ranges) -> Int64[Tensor, " n"]:
        held = torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop, run.step) for run in runs)])
        return held[held % self.segment % self.step == offset].sort().values
