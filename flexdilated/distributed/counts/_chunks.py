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

    def by_target(self, table: Bool[Tensor, "n n"]) -> Bool[Tensor, "W n"]:
        """Where any chunk of the rank has an entry."""
        rows = torch.cat([table, torch.zeros(1, len(self), dtype=torch.bool)])
        return torch.stack([rows[turn] for turn in self.by_turn]).any(0)

    def by_source(self, tokens: Int64[Tensor, "W n"]) -> Int64[Tensor, "W W"]:
        """Sums over the chunks of each rank; nothing of itself."""
        counts = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        return counts.index_add_(1, self.rank, tokens).fill_diagonal_(0)


@dataclass(frozen=True)
class _Nodes:
    """Squares of pairs: chunks a_begin to a_end - 1 of queries, and chunks c_begin to c_end - 1 of keys."""

    a_begin: Tensor
    a_end: Tensor
    c_begin: Tensor
    c_end: Tensor

    def __len__(self) -> int:
        return len(self.a_begin)

    def select(self, index: Tensor) -> _Nodes:
        return _Nodes(self.a_begin[index], self.a_end[index], self.c_begin[index], self.c_end[index])

    def halves(self) -> _Nodes:
        """Each side halved, where it has more than one chunk."""
        a_begin, a_end, node = _halved(self.a_begin, self.a_end)
        c_begin, c_end, part = _halved(self.c_begin[node], self.c_end[node])
        return _Nodes(a_begin[part], a_end[part], c_begin, c_end)


def sort_pairs(
    rule: Pattern, head: int, num_heads: int, chunks: Chunks
) -> tuple[Bool[Tensor, "n n"], Int64[Tensor, "m 2"]]:
    """(where the queries of a chunk need all keys of another, pairs that bounds leave in doubt); others need none.

    By a rule for one head, which this head follows; bounds are computed for many chunks at once where they decide.
    """
    every = torch.zeros(len(chunks), len(chunks), dtype=torch.bool)
    doubtful = [torch.empty(0, 2, dtype=torch.int64)]
    stack = [_roots(len(chunks))]
    while stack:
        nodes = stack.pop()
        if len(nodes) > _FRONTIER:
            stack += [nodes.select(half) for half in torch.arange(len(nodes)).tensor_split(2)]
            continue
        box = _box(nodes, chunks, head)
        bounds = rule.count(box, num_heads=num_heads)
        single = (nodes.a_end - nodes.a_begin == 1) & (nodes.c_end - nodes.c_begin == 1)
        # A key that no query needs misses all of them; of several chunks every pair must be one that counts.
        full = torch.where(single, box.area - bounds.low < box.q.count, box.area == bounds.low)
        _mark(every, nodes.select(full))
        left = nodes.select((bounds.high > 0) & ~full & single)
        doubtful.append(torch.stack([left.a_begin, left.c_begin], 1))
        inner = nodes.select((bounds.high > 0) & ~full & ~single)
        if len(inner):
            stack.append(inner.halves())
    return every, torch.cat(doubtful)


def _roots(num_chunks: int) -> _Nodes:
    """All pairs at once; as single ones where they are few."""
    cuts = torch.arange(num_chunks + 1) if num_chunks <= _FEW_CHUNKS else torch.tensor([0, num_chunks])
    part, other = torch.cartesian_prod(torch.arange(len(cuts) - 1), torch.arange(len(cuts) - 1)).unbind(1)
    return _Nodes(cuts[part], cuts[part + 1], cuts[other], cuts[other + 1])


def _box(nodes: _Nodes, chunks: Chunks, head: int) -> Box:
    sides = []
    for begin, end in ((nodes.a_begin, nodes.a_end), (nodes.c_begin, nodes.c_end)):
        first = chunks.start[begin]
        sides.append(Progression(first, 1, chunks.stop[end - 1] - first))
    return Box(torch.full_like(nodes.a_begin, head), *sides)


def _mark(table: Tensor, nodes: _Nodes) -> None:
    single = (nodes.a_end - nodes.a_begin == 1) & (nodes.c_end - nodes.c_begin == 1)
    table[nodes.a_begin[single], nodes.c_begin[single]] = True
    large = nodes.select(~single)
    sides = (large.a_begin, large.a_end, large.c_begin, large.c_end)
    for a_begin, a_end, c_begin, c_end in zip(*(side.tolist() for side in sides), strict=True):
        table[a_begin:a_end, c_begin:c_end] = True


def _halved(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(begin, end, which it comes from) of the halves of longer runs, and of the others as they are."""
    middle = torch.where(end - begin > 1, (begin + end + 1) // 2, end)
    cut = (middle < end).nonzero().squeeze(1)
    origin = torch.cat([torch.arange(len(begin)), cut])
    return torch.cat([begin, middle[cut]]), torch.cat([middle, end[cut]]), origin
