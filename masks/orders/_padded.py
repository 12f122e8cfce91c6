"""Padded: the active tokens of each segment, segment after segment, each filled up to whole blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

# H heads, F segments, S slots


@dataclass(frozen=True)
class Padded:
    """Every `step`-th token of each segment, from each head's offset on, in `width` slots a segment.

    Slot s of head i holds token start + f * segment + offsets[i] + p * step, where f, p = divmod(s, width): if that
    lies in segment f and is one of tokens `begin` to `end` - 1, the first of which lies in segment 0. Other slots hold
    nothing. `width` and all slots are whole blocks of `side`, at least two: a graph compiled for any number of them
    would take one for a constant.
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
        """The same with each segment filled up to whole blocks of this side."""
        return replace(self, width=-(-self.segment // (self.step * side)) * side, side=side)

    @property
    def num_segments(self) -> int:
        return -(-(self.end - self.start) // self.segment)

    @property
    def num_slots(self) -> int:
        """Up to the block of the last that holds a token of any head."""
        last = self.num_segments - 1
        held = last * self.width + int(self.held()[1][:, last].max())
        return max(2, -(-held // self.side)) * self.side

    def held(self) -> tuple[Int64[Tensor, "H F"], Int64[Tensor, "H F"]]:
        """Of each head and segment the first place p that holds a token, and one past the last."""
        start = self.start + torch.arange(self.num_segments) * self.segment
        first = start + torch.tensor(self.offsets)[:, None]
        last = (start + self.segment).clamp(max=self.end)
        past = ((last - first + self.step - 1) // self.step).clamp(min=0)
        return (((self.begin - first).clamp(min=0) + self.step - 1) // self.step).minimum(past), past

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "H 1 S"]:
        """The token in each slot; -1 where there is none."""
        slot = torch.arange(self.num_slots, device=device)
        place = torch.tensor(self.offsets, device=device)[:, None] + slot % self.width * self.step
        token = self.start + slot // self.width * self.segment + place
        return torch.where((place < self.segment) & (token >= self.begin) & (token < self.end), token, -1)[:, None]

    def moved(self, tokens: int) -> Padded:
        """The same over tokens that lie so far further on."""
        return replace(self, start=self.start + tokens, begin=self.begin + tokens, end=self.end + tokens)
