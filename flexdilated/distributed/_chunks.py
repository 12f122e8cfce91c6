"""Chunks: the runs of positions that ranks hold, in the order of their positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ._sharding import Sharding

# n chunks, W ranks


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunk i holds the positions from start[i] to stop[i] - 1 and lies on rank[i]; none is empty."""

    start: Int64[Tensor, " n"]
    stop: Int64[Tensor, " n"]
    rank: Int64[Tensor, " n"]
    num_ranks: int

    @classmethod
    def of(cls, sharding: Sharding) -> Chunks:
        ranks = range(sharding.num_ranks)
        runs = sorted((run.start, run.stop, rank) for rank in ranks for run in sharding.ranges(rank))
        start, stop, rank = torch.tensor(runs, dtype=torch.int64).unbind(1)
        return cls(start, stop, rank, sharding.num_ranks)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def length(self) -> Int64[Tensor, " n"]:
        return self.stop - self.start

    @cached_property
    def runs(self) -> list[range]:
        """The positions of each chunk."""
        return [range(*run) for run in zip(self.start.tolist(), self.stop.tolist(), strict=True)]

    def by_target(self, table: Tensor) -> Tensor:
        """(W, n) from a boolean table (n, n): where any chunk of the rank has an entry."""
        rows = torch.zeros(self.num_ranks, len(self), dtype=torch.bool)
        for chunk in self._turns():
            rows[self.rank[chunk]] |= table[chunk]
        return rows

    def by_source(self, tokens: Int64[Tensor, "W n"]) -> Int64[Tensor, "W W"]:
        """Sums over the chunks of each rank; nothing of itself."""
        counts = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        return counts.index_add_(1, self.rank, tokens).fill_diagonal_(0)

    def _turns(self) -> list[Tensor]:
        """The chunks, in parts in which no rank has two."""
        order = self.rank.argsort(stable=True)
        again = torch.zeros_like(order, dtype=torch.bool)
        again[1:] = self.rank[order][1:] == self.rank[order][:-1]
        return [order[~again], order[again]]
