"""Padded orders: the active tokens of segments in whole blocks of slots, some of which are empty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.functional import pad

from ..core import Ranges

# H heads, F segments, T rows of tokens, S slots


@dataclass(frozen=True)
class Padded:
    """Every `step`-th token of each segment, from each head's offset on, in `width` slots a segment.

    Slot s of head i holds token t = start + f * segment + offsets[i] + p * step, where f, p = divmod(s, width), if t is
    in segment f and begin <= t < end; else the slot is empty. Token `begin` is in segment 0. `width` and the number of
    slots are multiples of `side`, and there are at least two blocks: a graph compiled for a dynamic number of blocks
    would specialize on one.
    """

    offsets: tuple[int, ...]
    step: int
    segment: int
    width: int
    start: int
    begin: int
    end: int
    side: int = 1
    folds = 1
    is_natural = False
    is_copied = True

    def in_blocks_of(self, side: int) -> Padded:
        """Pad each segment to whole blocks of this side."""
        return replace(self, width=-(-self.segment // (self.step * side)) * side, side=side)

    @property
    def num_segments(self) -> int:
        return -(-(self.end - self.start) // self.segment)

    @property
    def num_slots(self) -> int:
        """Slots up to the last block that holds a token of any head; at least two blocks."""
        last = self.num_segments - 1
        held = last * self.width + int(self.held()[1][:, last].max())
        return max(2, -(-held // self.side)) * self.side

    def held(self) -> tuple[Int64[Tensor, "H F"], Int64[Tensor, "H F"]]:
        """(first place p that holds a token, one past the last) of each head and segment."""
        start = self.start + torch.arange(self.num_segments) * self.segment
        first = start + torch.tensor(self.offsets)[:, None]
        last = (start + self.segment).clamp(max=self.end)
        past = ((last - first + self.step - 1) // self.step).clamp(min=0)
        return (((self.begin - first).clamp(min=0) + self.step - 1) // self.step).minimum(past), past

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "H 1 S"]:
        """Token in each slot; -1 if empty."""
        slot = torch.arange(self.num_slots, device=device)
        place = torch.tensor(self.offsets, device=device)[:, None] + slot % self.width * self.step
        token = self.start + slot // self.width * self.segment + place
        return torch.where((place < self.segment) & (token >= self.begin) & (token < self.end), token, -1)[:, None]

    def moved(self, tokens: int) -> Padded:
        """Shift by a number of tokens."""
        return replace(self, start=self.start + tokens, begin=self.begin + tokens, end=self.end + tokens)


@dataclass(frozen=True)
class Held:
    """Positions of some runs with position mod segment mod step equal to an offset, ascending.

    Heads with equal offset and runs share a row: `rows` has the row of each head, `offsets` and `runs` have an entry
    for each row. Slots past the end of a row are empty. The number of slots is a multiple of `side`, at least two
    blocks: a graph compiled for a dynamic number of blocks would specialize on one.
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
        """Pad to whole blocks of this side."""
        return replace(self, side=side)

    @property
    def num_slots(self) -> int:
        return self.positions.shape[1]

    @cached_property
    def positions(self) -> Int64[Tensor, "T S"]:
        """Position in each slot of each row; -1 if empty."""
        rows = [self._active(*row) for row in zip(self.offsets, self.runs, strict=True)]
        slots = max(2, -(-max(map(len, rows)) // self.side)) * self.side
        return torch.stack([pad(row, (0, slots - len(row)), value=-1) for row in rows])

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "H 1 S"]:
        """Position in each slot of each head, in a single fold; -1 if empty."""
        return self.positions[list(self.rows), None].to(device or "cpu")

    def _active(self, offset: int, runs: Ranges) -> Int64[Tensor, " n"]:
        held = torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop, run.step) for run in runs)])
        return held[held % self.segment % self.step == offset].sort().values
