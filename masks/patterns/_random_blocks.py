"""Random blocks: each query block sees a few key blocks, drawn reproducibly on every machine."""

from __future__ import annotations

from dataclasses import field, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Pair,
    Pattern,
    Ranges,
    Reason,
    at_least,
    constructor,
    listing,
    pattern_kind,
    within,
)
from ._block_list import BlockTable, TableRule, keys_of_blocks, padded

_TABLES_KEPT = 8
_ROWS_KEPT = 64  # cached rows of single query blocks, one for each head in a decoding step
_LARGEST_SEED = 2**63 - 1
_MOST_DRAWN = 1 << 25  # most blocks drawn for one table: a quarter of a gigabyte, in seconds
_DRAWN_AHEAD = 1 << 20  # fewest blocks drawn if the number of positions is unknown
_DRAWN_AT_ONCE = 1 << 21  # bounds the memory of a draw


@pattern_kind("random_blocks", positional=1)
class RandomBlocks(TableRule):
    """Pattern that allows a pair iff the query's block drew the key's block, and both positions are below `num_tokens`.

    Each query block of `block` tokens draws `drawn` key blocks, separately for each global head, or once for all heads
    with the draw of global head `head`. `positions`: number of tokens in use, None if unknown; if it is known, `table`
    has rows only for the query blocks of these tokens.
    """

    num_tokens: int = at_least(1)
    block: int = at_least(1)
    drawn: int = at_least(1, name="count")
    seed: int = at_least(0, maximum=_LARGEST_SEED)
    head: int | None = at_least(0, default=None)
    positions: int | None = field(default=None, compare=False, metadata={"stored": False})

    def check(self) -> None:
        if self.drawn > self.num_blocks:
            raise ValueError(
                f"count must be at most the number of key blocks; got count={self.drawn}, and "
                f"{self.num_tokens} tokens hold {self.num_blocks} blocks of {self.block}"
            )

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block)

    def for_head(self, head: int, num_heads: int) -> Pattern:
        return replace(self, head=head) if self.head is None else self

    def below(self, positions: int) -> Pattern:
        return replace(self, positions=positions)

    @property
    def by_head(self) -> bool:
        return self.head is None

    def table(self, num_heads: int) -> BlockTable:
        return self._table_of_first_rows(num_heads, self._num_rows())

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        rows = self._num_rows()
        if self.positions is None and len(box.head):  # unknown number of queries: further rows stay undecided
            needed = int(box.q.first.max()) // self.block + 1
            rows = min(rows, max(_next_power_of_two(needed), _DRAWN_AHEAD // self.drawn))
        bounds = self._table_of_first_rows(num_heads, rows).count(self.table_of_head(num_heads)[box.head], box)
        if rows == self._num_rows():
            return bounds
        return Bounds(bounds.low, torch.where(box.q.last // self.block < rows, bounds.high, box.area))

    def reason(self, pair: Pair) -> Reason:
        text = f"beyond the {self.num_tokens} tokens of the draw"
        if beyond := pair.those(lambda position: position >= self.num_tokens, text):
            return Reason(self, False, beyond)
        head = pair.head if self.head is None else self.head
        row, column = pair.query // self.block, pair.key // self.block
        drawn = _draw_row(self.num_blocks, self.drawn, self.seed, int(head), int(row)).tolist()
        text = f"{pair.the_query} is in block {row}, which drew key blocks {listing(drawn)} for head {head}"
        return Reason(self, column in drawn, f"{text}; {pair.the_key} is in block {column}")

    def _num_rows(self) -> int:
        """Return the number of query blocks that draw: those that begin below num_tokens and, if set, `positions`."""
        return self.num_blocks if self.positions is None else min(self.num_blocks, -(-self.positions // self.block))

    def _table_of_first_rows(self, num_heads: int, rows: int) -> BlockTable:
        heads = range(num_heads) if self.head is None else range(self.head, self.head + 1)
        self._require_few_draws(len(heads), rows)
        return _draw_table(self.num_tokens, self.block, self.drawn, self.seed, heads, rows)

    def _require_few_draws(self, heads: int, rows: int) -> None:
        if heads * rows * self.drawn > _MOST_DRAWN:
            raise ValueError(
                f"random_blocks draws count blocks for each head and each block of queries, {_MOST_DRAWN} in all at "
                f"most; got count={self.drawn} for {heads} heads and {rows} blocks: draw fewer, or larger blocks"
            )

    def row(self, query: int, keys: range) -> Ranges:
        if query >= self.num_tokens:
            return ()
        assert self.head is not None, "a rule for one head has its head resolved"
        self._require_few_draws(1, 1)
        drawn = _draw_row(self.num_blocks, self.drawn, self.seed, self.head, query // self.block)
        return keys_of_blocks(drawn.tolist(), self.block, within(keys, 0, self.num_tokens))


@constructor
def random_blocks(
    num_tokens: int, *, block: int = 64, count: int = 3, seed: int = 0, head: int | None = None
) -> Pattern:
    """Pattern in which each block of `block` queries of each head sees `count` distinct key blocks, drawn at random.

    num_tokens: tokens that the blocks cover; positions beyond them see no key and are seen by no query.
    block: tokens of a block. Kernels compute whole blocks of their own size, 128 tokens by default: prefer a multiple.
    count: number of key blocks of each query block.
    seed: in [0, 2**63).
    head: the head, counted over all devices, whose draw all heads use; None: each head has its own draw.

    The draw depends only on these arguments and on the global head, so all ranks and platforms agree on it: the seed,
    the head, the number of the query block and the number of the draw are hashed in this order with splitmix64 (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014). The upper 32 bits of the hash are scaled to
    block numbers, and Floyd's method makes them distinct. Source: BigBird, arXiv 2007.14062, section 2.

    Raises ValueError for num_tokens, block or count below 1, a seed outside [0, 2**63), a head below 0, and a count
    above the number of blocks. Blocks are drawn later, for positions in use only: planning or computing with the
    pattern raises ValueError if heads x query blocks x count exceeds 2**25.

    >>> masks.describe(masks.random_blocks(1024, block=64, count=3), 1024).useful_pairs  # 16 x 3 blocks
    196608
    """
    return RandomBlocks(num_tokens, block, count, seed, head)


@lru_cache(maxsize=_TABLES_KEPT)
def _draw_table(num_tokens: int, block: int, drawn: int, seed: int, heads: range, rows: int) -> BlockTable:
    return BlockTable(
        padded(_draw_blocks(-(-num_tokens // block), drawn, seed, heads, range(rows))), block, block, num_tokens
    )


@lru_cache(maxsize=_ROWS_KEPT)
def _draw_row(num_blocks: int, drawn: int, seed: int, head: int, row: int) -> Tensor:
    return _draw_blocks(num_blocks, drawn, seed, range(head, head + 1), range(row, row + 1)).flatten()


def _draw_blocks(num_blocks: int, drawn: int, seed: int, heads: range, rows: range) -> Tensor:
    """Return key blocks drawn for each head and query block: int64, (heads, query blocks, drawn), last dim ascending.

    num_blocks: number of key blocks.
    drawn: number of distinct key blocks for each query block.
    seed: seed of the draw.
    heads, rows: ranges of global heads and of query blocks.
    """
    head, row = torch.tensor(heads)[:, None], torch.arange(rows.start, rows.stop)
    state = _splitmix64(_splitmix64(_splitmix64(torch.tensor(seed)) + head) + row)
    parts = [
        _distinct_blocks(some, num_blocks, drawn) for some in state.flatten().split(max(1, _DRAWN_AT_ONCE // drawn))
    ]
    return torch.cat(parts).view(*state.shape, drawn)


def _distinct_blocks(state: Tensor, num_blocks: int, drawn: int) -> Tensor:
    """Return `drawn` distinct blocks below num_blocks for each hash state: int64, (states, drawn), each row ascending.

    Floyd's method: for each block m of the last `drawn` blocks, in ascending order, draw a block from 0 to m. Keep it,
    or keep m if the drawn block is already kept. A block is already kept if an earlier draw equals it, or if it is an
    earlier m that was kept instead of its draw. Whether that m was kept may depend on an m before it, and so on: these
    chains are followed in doubling steps.
    """
    index, first = torch.arange(drawn), num_blocks - drawn
    last = first + index
    upper = _shifted_right(_splitmix64(state[:, None] + index), 32)
    block = (upper * (last + 1)) >> 32  # below 2^32 times below 2^31: no overflow; uniform to one in 2^32
    ordered, order = block.int().sort(dim=-1, stable=True)  # half the time of int64
    same = torch.zeros_like(block, dtype=torch.bool)
    same[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    taken = torch.zeros_like(same).scatter_(1, order, same)
    earlier = torch.where((block >= first) & (block < last), block - first, index)
    while True:
        further = earlier.gather(1, earlier)
        taken |= taken.gather(1, earlier)
        if torch.equal(further, earlier):
            break
        earlier = further
    return torch.where(taken, last, block).int().sort(-1).values.long()


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _splitmix64(state: Tensor) -> Tensor:
    """Return the splitmix64 output for each 64-bit state, held in int64; sums and products wrap around."""
    z = state - 0x61C8864680B583EB  # plus 0x9E3779B97F4A7C15, modulo 2^64
    z = (z ^ _shifted_right(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ _shifted_right(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ _shifted_right(z, 31)


def _shifted_right(bits: Tensor, places: int) -> Tensor:
    """Return int64 bits shifted right by `places` and filled with zeros."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
