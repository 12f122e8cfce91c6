"""Stretches: runs of slots of one length, read as a view where they lie evenly, and gathered by blocks elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

# X heads or folds, S slots, n stretches, L slots in a stretch or blocks in a list


@dataclass(frozen=True)
class Even:
    """Stretch i holds the slots from start + i * step on; stretches may overlap, and with step 0 are the same."""

    start: int
    step: int
    count: int
    length: int

    def select(self, begin: int, end: int) -> Even:
        return replace(self, start=self.start + begin * self.step, count=min(end, self.count) - begin)

    def of(self, x: Shaped[Tensor, "X S ..."]) -> Shaped[Tensor, "X n L ..."]:
        """The stretches, as a view of x."""
        if self.step == 0:
            one = x[:, None, self.start : self.start + self.length]
            return one.expand(-1, self.count, *one.shape[2:])
        return x[:, self.start :].unfold(1, self.length, self.step)[:, : self.count].movedim(-1, 2)

    def put(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Write stretches that do not overlap, in place."""
        self.of(x).copy_(part)

    def add(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Add the stretches onto the slots of x, in place."""
        if self.step == 0:
            x[:, self.start : self.start + self.length].add_(part.sum(1))
            return
        # Pieces of one step's length from the same place of each stretch do not overlap.
        for begin in range(0, self.length, self.step):
            width = min(self.step, self.length - begin)
            piece = Even(self.start + begin, self.step, self.count, width)
            piece.of(x).add_(part[:, :, begin : begin + width])


@dataclass(frozen=True)
class Listed:
    """Stretch i is the blocks[i] of `side` slots one after the other, cut off at `length` slots."""

    blocks: Int[Tensor, "n L"]
    side: int
    length: int

    def select(self, begin: int, end: int) -> Listed:
        return replace(self, blocks=self.blocks[begin:end])

    def of(self, x: Shaped[Tensor, "X S ..."]) -> Shaped[Tensor, "X n L ..."]:
        """The stretches, gathered; listed blocks must be whole in x."""
        picked = self._cut(x).index_select(1, self.blocks.flatten())
        return picked.unflatten(1, self.blocks.shape).flatten(2, 3)[:, :, : self.length]

    def put(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Write stretches that do not overlap, in place."""
        self._cut(x).index_copy_(1, self.blocks.flatten().long(), self._cut(part.flatten(1, 2)).to(x.dtype))

    def add(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Add the stretches onto the slots of x, in place."""
        missing = self.blocks.shape[1] * self.side - self.length
        if missing:
            part = pad(part, (0,) * (2 * part.dim() - 6) + (0, missing))
        self._cut(x).index_add_(1, self.blocks.flatten(), self._cut(part.flatten(1, 2)).to(x.dtype))

    def _cut(self, x: Tensor) -> Tensor:
        """Slots by block: one entry of an index moves a whole block."""
        return x[:, : x.shape[1] // self.side * self.side].unflatten(1, (-1, self.side))


Stretches = Even | Listed


def evenly(starts: list[int] | Tensor, length: int) -> Even | None:
    """The stretches from these starts on, if they are evenly spaced and none comes before its predecessor."""
    begins = torch.as_tensor(starts).long()
    gaps = begins.diff().unique()
    if len(gaps) > 1 or (len(gaps) and int(gaps) < 0):
        return None
    # A single stretch is its own next.
    return Even(int(begins[0]), int(gaps) if len(gaps) else length, len(begins), length)
