"""Chunks: the runs of positions that ranks hold; and which pairs of them need all keys, some, or none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...masks.core import Box, Pattern, Progression
from ..group import Sharding

# n chunks, m pairs of them, W ranks, T turns (a rank's first chunk, its second)

_FRONTIER = 1 << 18  # pairs that are counted together: bounds the memory
_FEW_CHUNKS = 64  # so many have few enough pairs to count each


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

    def positions(self, run: Progression) -> Progression:
        """Those of the chunks of each run, which is one of their numbers."""
        first = self.start[run.first]
        return Progression(first, 1, self.stop[run.last] - first)

    def by_target(self, table: Bool[Tensor, "n n"]) -> Bool[Tensor, "W n"]:
        """Where any chunk of the rank has an entry."""
        rows = torch.cat([table, torch.zeros(1, len(self), dtype=torch.bool)])
        return torch.stack([rows[turn] for turn in self.by_turn]).any(0)

    def by_source(self, tokens: Int64[Tensor, "W n"]) -> Int64[Tensor, "W W"]:
        """Sums over the chunks of each rank; nothing of itself."""
        counts = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        return counts.index_add_(1, self.rank, tokens).fill_diagonal_(0)


def sort_pairs(
    rule: Pattern, head: int, num_heads: int, chunks: Chunks
) -> tuple[Bool[Tensor, "n n"], Int64[Tensor, "m 2"]]:
    """(where the queries of a chunk need all keys of another, pairs that bounds leave in doubt); others need none.

    By a rule for one head, which this head follows; bounds are computed for many chunks at once where they decide.
    """
    every = torch.zeros(len(chunks), len(chunks), dtype=torch.bool)
    doubtful = [torch.empty(0, 2, dtype=torch.int64)]
    stack = [_roots(len(chunks), head)]
    while stack:
        squares = stack.pop()  # of chunks, by their numbers
        if len(squares.head) > _FRONTIER:
            stack += [squares.select(half) for half in torch.arange(len(squares.head)).tensor_split(2)]
            continue
        box = Box(squares.head, chunks.positions(squares.q), chunks.positions(squares.k))
        bounds = rule.count(box, num_heads=num_heads)
        single = squares.area == 1
        # A key that no query needs misses all of them; of several chunks every pair must be one that counts.
        full = torch.where(single, box.area - bounds.low < box.q.count, box.area == bounds.low)
        every[squares.q.first[full & single], squares.k.first[full & single]] = True
        large = squares.select(full & ~single)
        for begin, end, first, last in torch.stack(
            [large.q.first, large.q.last, large.k.first, large.k.last], 1
        ).tolist():
            every[begin : end + 1, first : last + 1] = True
        open_squares = (bounds.high > 0) & ~full
        left = squares.select(open_squares & single)
        doubtful.append(torch.stack([left.q.first, left.k.first], 1))
        if bool((open_squares & ~single).any()):
            stack.append(_halves(squares.select(open_squares & ~single)))
    return every, torch.cat(doubtful)


def _roots(num_chunks: int, head: int) -> Box:
    """All pairs at once; as single ones where they are few."""
    each = 1 if num_chunks <= _FEW_CHUNKS else num_chunks
    first = torch.arange(0, num_chunks, each)
    q, k = torch.cartesian_prod(first, first).unbind(1)
    count = torch.full_like(q, each)
    return Box(torch.full_like(q, head), Progression(q, 1, count), Progression(k, 1, count))


def _halves(squares: Box) -> Box:
    """Each side halved, where it has more than one chunk."""
    square, q = _halved(squares.q)
    part, k = _halved(squares.k.select(square))
    return Box(squares.head[square][part], q.select(part), k)


def _halved(side: Progression) -> tuple[Tensor, Progression]:
    """(which it comes from, it) of the halves of longer runs, and of the others as they are."""
    half = (side.count + 1) // 2
    cut = (half < side.count).nonzero().squeeze(1)
    first = torch.cat([side.first, (side.first + half)[cut]])
    return torch.cat([torch.arange(len(half)), cut]), Progression(first, 1, torch.cat([half, (side.count - half)[cut]]))
