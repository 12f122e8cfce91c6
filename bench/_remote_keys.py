"""The keys that a rank needs and does not hold, marked token by token: the least that an exchange can send.

Written from LongNet's rule a second time, without the library's plans: slices of a row of marks, one row for each rank
and key/value head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from flexdilated.distributed.group._sharding import Order

from ._longnets import LongNet

# N tokens

Ranges = Sequence[range]


def shard_ranges(num_tokens: int, num_ranks: int, order: Order) -> list[Ranges]:
    """The tokens of each rank: one piece of equal length, or in zigzag the r-th of 2W pieces and the r-th from the end.

    `num_tokens` is a multiple of the pieces.
    """
    num_pieces = num_ranks * (2 if order == "zigzag" else 1)
    size, rest = divmod(num_tokens, num_pieces)
    assert not rest, f"shards must be equal; got {num_tokens} tokens in {num_pieces} pieces"
    pieces = [range(first, first + size) for first in range(0, num_tokens, size)]
    if order == "zigzag":
        return [(pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks)]
    return [(piece,) for piece in pieces]


@dataclass(frozen=True)
class Heads:
    """Query heads, and the key/value heads that equal groups of them share."""

    num_heads: int
    num_kv_heads: int

    def of(self, kv_head: int) -> range:
        """The query heads that read a key/value head."""
        group = self.num_heads // self.num_kv_heads
        return range(kv_head * group, (kv_head + 1) * group)


def least_received(spec: LongNet, num_tokens: int, shards: Sequence[Ranges], heads: Heads) -> list[int]:
    """For each rank, (token, key/value head) pairs outside its shard that its queries may attend to."""
    return [
        sum(
            int(_outside(needed(spec, num_tokens, heads.of(kv_head), shard), shard).sum())
            for kv_head in range(heads.num_kv_heads)
        )
        for shard in shards
    ]


def needed(spec: LongNet, num_tokens: int, heads: range, queries: Ranges) -> Bool[Tensor, " N"]:
    """Whether one of the queries, in one of the heads and branches, may attend to the token."""
    marks = torch.zeros(num_tokens, dtype=torch.bool)
    for length, rate in spec.branches:
        for offset in {head % rate for head in heads}:
            for piece in queries:
                _mark(marks, piece, length, rate, offset, causal=spec.causal)
    return marks


def _mark(marks: Bool[Tensor, " N"], queries: range, length: int, rate: int, offset: int, *, causal: bool) -> None:
    """The active tokens of each segment in which one of the queries is active; if causal, up to the last such query."""
    num_tokens = len(marks)
    for start in range(queries.start // length * length, queries.stop, length):
        end = min(start + length, num_tokens)
        active = range(start + offset, end, rate)
        first = -(-(max(queries.start, start) - active.start) // rate)
        among = active[max(0, first) : max(0, -(-(min(queries.stop, end) - active.start) // rate))]
        if among:
            marks[active.start : among[-1] + 1 if causal else end : rate] = True


def _outside(marks: Bool[Tensor, " N"], shard: Ranges) -> Bool[Tensor, " N"]:
    for piece in shard:
        marks[piece.start : piece.stop] = False
    return marks
