"""Chunks: the runs of positions that ranks hold, in the order of their positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ._sharding import Sharding

# n chunks, W ranks, T turns


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
        start, stop, rank = torch.tensor(runs, dtype=torch.int64).T.contiguous()
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

    @cached_property
    def by_turn(self) -> Int64[Tensor, "T W"]:
        """The number of each rank's first chunk, and of its second if any rank has two; -1 where it has none."""
        turns = torch.full((2, self.num_ranks), -1)
        order = self.rank.argsort(stable=True)
        again = torch.zeros_like(order)
        again[1:] = self.rank[order][1:] == self.rank[order][:-1]
        turns[again, self.rank[order]] = order
        return turns if bool(again.any()) else turns[:1]

    def by_target(self, table: Bool[Tensor, "n n"]) -> Bool[Tensor, "W n"]:
        """Where any chunk of the rank has an entry."""
        rows = torch.cat([table, torch.zeros(1, len(self), dtype=torch.bool)])
        return torch.stack([rows[turn] for turn in self.by_turn]).any(0)

    def by_source(self, tokens: Int64[Tensor, "W n"]) -> Int64[Tensor, "W W"]:
        """Sums over the chunks of each rank; nothing of itself."""
        counts = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        return counts.index_add_(1, self.rank, tokens).fill_diagonal_(0)
