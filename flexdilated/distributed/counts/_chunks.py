"""Chunks: the runs of positions that ranks hold, in the order of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks.core import Ranges
from ..group import Sharding

# n chunks, W ranks, T turns (a rank's first chunk, its second)

_MOST_COUNTS = 1 << 20  # entries of a (chunk, range) table computed at once: bounds its memory


@dataclass(frozen=True, eq=False)
class Chunks:
    """Nonempty runs of positions: chunk i is [start[i], stop[i]), held by rank[i]."""

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
    def by_turn(self) -> Int64[Tensor, "T W"]:
        """Index of each rank's first chunk, and of its second if any rank has two; -1 for a missing chunk."""
        turns = torch.full((2, self.num_ranks), -1)
        order = self.rank.argsort(stable=True)
        again = torch.zeros_like(order)
        again[1:] = self.rank[order][1:] == self.rank[order][:-1]
        turns[again, self.rank[order]] = order
        return turns if bool(again.any()) else turns[:1]

    def by_source(self, tokens: Int64[Tensor, "W n"]) -> Int64[Tensor, "W W"]:
        """Sum over the chunks of each source rank; the diagonal is 0."""
        counts = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        return counts.index_add_(1, self.rank, tokens).fill_diagonal_(0)

    def holding(self, positions: Ranges) -> Int64[Tensor, " n"]:
        """Number of these positions in each chunk."""
        first, stop, step = torch.tensor([(run.start, run.stop, run.step) for run in positions] or [(0, 0, 1)]).T
        counts = torch.zeros(len(self), dtype=torch.int64)
        for some in torch.arange(len(first)).split(max(1, _MOST_COUNTS // len(self))):
            before = []
            for edge in (self.start, self.stop):
                span = (edge[:, None].minimum(stop[some]) - first[some]).clamp(min=0)
                before.append((span + step[some] - 1) // step[some])
            counts += (before[1] - before[0]).sum(1)
        return counts
