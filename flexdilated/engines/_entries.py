"""Entries: the batch entries that one program computes, as they are or as one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor

# B batch, H heads, N tokens; b of these batch entries


@dataclass(frozen=True)
class Some:
    """Neighbours whose rules are equal."""

    rows: slice

    def of(self, x: Shaped[Tensor, "B H N ..."]) -> Shaped[Tensor, "b H N ..."]:
        return x[self.rows]

    def put(self, x: Shaped[Tensor, "B H N ..."], part: Shaped[Tensor, "b H N ..."]) -> None:
        """Write their part of x, in place."""
        x[self.rows] = part


@dataclass(frozen=True)
class Packed:
    """All entries, each head's tokens of one after those of the other."""

    def of(self, x: Shaped[Tensor, "B H N ..."]) -> Shaped[Tensor, "1 H n ..."]:
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def put(self, x: Shaped[Tensor, "B H N ..."], part: Shaped[Tensor, "1 H n ..."]) -> None:
        """Write all of x, in place."""
        x.copy_(part.squeeze(0).unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1))


Entries = Some | Packed
