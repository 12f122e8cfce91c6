"""Blocks: which tiles of the slot matrix hold allowed pairs, found by quadtree descent over boxes."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from ._cover import find_leaves
from ._quadtree import Leaves, Slots
from ._rule import Places, Rule, alike

# T tables (one for each distinct head), E listed blocks

_CELLS = 1 << 18  # pairs evaluated at once when blocks are settled: fits a cache
_SLOTS_AT_ONCE = 1 << 17  # small tables are built together: fewer, larger tensor operations
_LEAVES_AT_ONCE = 1 << 21  # leaves held at once: beyond, they are summed by block
_DOUBTS_AT_ONCE = 1 << 17  # undecided blocks held at once: beyond, tables and rows are built in halves
_LISTED_AT_ONCE = 1 << 19  # listed blocks packed, or put into tables, at once
UNKNOWN = -1
_LEVEL = 1  # of zlib; higher levels take several times as long and save little
LISTED_BYTES = 17  # per block of `Blocks`: four int32 and a bool


@dataclass(frozen=True)
class Blocks:
    """The non-empty blocks of T tables, sorted by (table, row, column).

    Row r covers the query slots from r * q_block on, column c the key slots from c * k_block on. `full`: all
    q_block * k_block pairs exist and are allowed. `pairs`: number of allowed pairs of a block, or UNKNOWN.
    `heads`: the table of each head.
    """

    num_q_slots: int
    num_k_slots: int
    q_block: int
    k_block: int
    heads: tuple[int, ...]
    table: Int32[Tensor, " E"]
    row: Int32[Tensor, " E"]
    column: Int32[Tensor, " E"]
    full: Bool[Tensor, " E"]
    pairs: Int32[Tensor, " E"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(query slots, key slots, query side of a block, key side)."""
        return self.num_q_slots, self.num_k_slots, self.q_block, self.k_block

    @property
    def num_rows(self) -> int:
        return -(-self.num_q_slots // self.q_block)

    @property
    def num_columns(self) -> int:
        return -(-self.num_k_slots // self.k_block)

    @property
    def num_tables(self) -> int:
        return max(self.heads) + 1

    def places(self, index: Int64[Tensor, " n"]) -> Places:
        """Table, row and column of the blocks at these indices."""
        return Places(self.table[index], self.row[index], self.column[index])

    def portions(self) -> list[tuple[range, slice]]:
        """Split into (range of tables, slice of the list), of at most `_LISTED_AT_ONCE` blocks or one table each."""
        after = torch.arange(1, self.num_tables + 1, dtype=torch.int32)
        stops = torch.searchsorted(self.table.contiguous(), after).tolist()
        found, first, begin, end = [], 0, 0, 0
        for table, stop in enumerate(stops):
            if stop - begin > _LISTED_AT_ONCE and table > first:
                found.append((range(first, table), slice(begin, end)))
                first, begin = table, end
            end = stop
        return [*found, (range(first, self.num_tables), slice(begin, end))]

    def with_heads(self, heads: tuple[int, ...]) -> Blocks:
        """The same tables, of which head h reads heads[h]."""
        return replace(self, heads=heads)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.table, self.row, self.column, self.full, self.pairs))


def build_blocks(rule: Rule, *, q_block: int, k_block: int, settle: bool = True) -> Blocks:
    """List the non-empty blocks of a rule; single pairs are evaluated only where bounds do not decide.

    With settle=True the list is exact: blocks that the bounds leave undecided, and only these, are evaluated.
    With settle=False a listed block may hold no pair, and a full one may be listed as partial.

    Time grows with the number of blocks that bounds cannot rule out, memory with the number listed: where a
    rule has parts without bounds, block rows are settled range by range.
    """
    num_q, num_k = int(rule.q.lengths.sum()), int(rule.k.lengths.sum())
    at_once = max(1, _SLOTS_AT_ONCE // max(num_q, num_k))
    shape = (num_q, num_k, q_block, k_block)
    rows = range(-(-num_q // q_block))
    built = [
        part
        for begin in range(0, len(rule.heads), at_once)
        for part in _build(rule, range(begin, min(begin + at_once, len(rule.heads))), rows, shape, settle)
    ]
    table, row, column, full, pairs = (torch.cat(parts) for parts in zip(*built, strict=True))
    return Blocks(*shape, tuple(range(len(rule.heads))), table, row, column, full, pairs)


def repeat_blocks(blocks: Blocks, *, classes: int, times: int) -> Blocks:
    """Block list of `times` copies of a square list along the diagonal, within each of `classes` residue classes."""

    def spread(index: Tensor, total: int) -> Tensor:
        each = total // classes
        copies = torch.arange(times)[:, None] * each
        return (index // each * (each * times) + index % each + copies).flatten()

    row, column = spread(blocks.row.long(), blocks.num_rows), spread(blocks.column.long(), blocks.num_columns)
    table = blocks.table.long().repeat(times)
    rows, columns = blocks.num_rows * times, blocks.num_columns * times
    order = ((table * rows + row) * columns + column).argsort()
    return Blocks(
        blocks.num_q_slots * times,
        blocks.num_k_slots * times,
        blocks.q_block,
        blocks.k_block,
        blocks.heads,
        table[order].int(),
        row[order].int(),
        column[order].int(),
        blocks.full.repeat(times)[order],
        blocks.pairs.repeat(times)[order],
    )


def join_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Concatenate block lists of one shape; heads follow the order of `parts`.

    If in every part all heads share one table, each part counts as one head.
    """
    if len(parts) == 1:
        return parts[0]
    shared = all(part.num_tables == 1 for part in parts)
    firsts = [0, *accumulate(part.num_tables for part in parts)]
    heads = [first + table for first, part in zip(firsts, parts, strict=False) for table in part.heads]
    tables = [part.table + first for first, part in zip(firsts, parts, strict=False)]
    row, column, full, pairs = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("row", "column", "full", "pairs")
    )
    given = tuple(range(len(parts))) if shared else tuple(heads)
    return Blocks(*parts[0].shape, given, torch.cat(tables), row, column, full, pairs)


def _build(
    rule: Rule, tables: range, rows: range, shape: tuple[int, int, int, int], settle: bool
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the listed blocks in order; halves tables, then block rows, while too many blocks are undecided."""
    found = _look(rule, tables, rows, shape, settle)
    if found is not None:
        yield _list(rule, found, shape, settle)
        return
    for half in _halves(tables):
        for few in _halves(rows) if len(tables) == 1 else [rows]:
            yield from _build(rule, half, few, shape, settle)


def _look(
    rule: Rule, tables: range, rows: range, shape: tuple[int, int, int, int], settle: bool
) -> list[Leaves] | None:
    """Leaves of the quadtree; None if more than `_DOUBTS_AT_ONCE` are undecided and the range can be halved."""
    _, _, q_block, k_block = shape
    found, held, doubts, may_stop = [], 0, 0, settle and len(tables) * len(rows) > 1
    for leaves in find_leaves(rule, tables, Slots.of_rows(rows, q_block), q_block, k_block):
        doubts += int((leaves.low != leaves.high).sum())
        if may_stop and doubts > _DOUBTS_AT_ONCE:
            return None
        found.append(leaves)
        held += len(leaves.row)
        if held > _LEAVES_AT_ONCE:
            found = [join_leaves(found, shape)]
            held = max(0, 2 * len(found[0].row) - _LEAVES_AT_ONCE)
    return found


def _halves(some: range) -> list[range]:
    middle = (len(some) + 1) // 2
    return [half for half in (some[:middle], some[middle:]) if half]


def _list(rule: Rule, found: list[Leaves], shape: tuple[int, int, int, int], settle: bool) -> tuple[Tensor, ...]:
    _, _, q_block, k_block = shape
    leaves = join_leaves(found, shape)
    table, row, column, low, high = leaves.table, leaves.row, leaves.column, leaves.low, leaves.high
    whole = q_block * k_block
    if settle:
        doubtful = ((low == 0) | ((low < whole) & (high >= whole))).nonzero().squeeze(1)
        places = Places(table[doubtful], row[doubtful], column[doubtful])
        low[doubtful] = high[doubtful] = count_pairs(rule, places, shape)
        keep = high > 0
        table, row, column, low, high = (x[keep] for x in (table, row, column, low, high))
    pairs = torch.where(low == high, low, UNKNOWN).int()
    return table.int(), row.int(), column.int(), low == whole, pairs


def count_pairs(rule: Rule, places: Places, shape: tuple[int, int, int, int]) -> Int64[Tensor, " n"]:
    """Number of allowed pairs of each block; of blocks that are alike only one is evaluated."""
    number, one_of_each = alike(rule, places, shape)
    # Into one tensor: small results kept between large temporaries would fragment the heap.
    counts, begin = torch.zeros(len(one_of_each), dtype=torch.int64), 0
    for mask in evaluate(rule, Places(*(each[one_of_each] for each in places)), shape):
        counts[begin : begin + len(mask)] = mask.sum((1, 2))
        begin += len(mask)
    return counts[number]


def evaluate(
    rule: Rule, places: Places, shape: tuple[int, int, int, int]
) -> Iterator[Bool[Tensor, "n q_block k_block"]]:
    """Evaluate the rule on every pair of these blocks, a chunk of blocks at a time; False beyond the last slot."""
    num_q, num_k, q_block, k_block = shape
    for part in torch.arange(len(places.table)).split(max(1, _CELLS // (q_block * k_block))):
        q = (places.row[part, None].long() * q_block + torch.arange(q_block))[:, :, None]
        k = (places.column[part, None].long() * k_block + torch.arange(k_block))[:, None, :]
        inside = (q < num_q) & (k < num_k)
        tables = places.table[part, None, None].long()
        yield rule.allowed(tables, q.clamp(max=num_q - 1), k.clamp(max=num_k - 1)) & inside


def join_leaves(found: list[Leaves], shape: tuple[int, int, int, int]) -> Leaves:
    """Sort leaves by (table, row, column) and sum the leaves of each block."""
    table, row, column, low, high = (
        torch.cat([getattr(leaves, name) for leaves in found]) for name in ("table", "row", "column", "low", "high")
    )
    num_q, num_k, q_block, k_block = shape
    num_rows, num_columns = -(-num_q // q_block), -(-num_k // k_block)
    key, order = ((table * num_rows + row) * num_columns + column).sort()
    key, index = key.unique_consecutive(return_inverse=True)
    low = torch.zeros_like(key).index_add_(0, index, low[order])
    high = torch.zeros_like(key).index_add_(0, index, high[order])
    return Leaves(key // (num_rows * num_columns), key // num_columns % num_rows, key % num_columns, low, high)


@dataclass(frozen=True)
class PackedBlocks:
    """Block lists as compressed bytes; `unpack` restores them exactly.

    A block is stored as its distance from the previous block of the list. Patterns repeat along the sequence, and
    so do these distances, which zlib compresses. Randomly drawn lists shrink least.
    """

    shape: tuple[int, int, int, int]
    heads: tuple[int, ...]
    lengths: tuple[int, ...]
    data: tuple[bytes, ...]

    @classmethod
    def pack(cls, blocks: Blocks) -> PackedBlocks:
        parts = [part for _, part in blocks.portions()]
        data = tuple(zlib.compress(_written(blocks, part), _LEVEL) for part in parts)
        return cls(blocks.shape, blocks.heads, tuple(part.stop - part.start for part in parts), data)

    def unpack(self) -> Blocks:
        length, begin = sum(self.lengths), 0
        table, row, column, pairs = (torch.empty(length, dtype=torch.int32) for _ in range(4))
        blocks = Blocks(*self.shape, self.heads, table, row, column, torch.empty(length, dtype=torch.bool), pairs)
        for number, written in zip(self.lengths, self.data, strict=True):
            _read(written, blocks, slice(begin, begin + number))
            begin += number
        return blocks

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.data)) + 8 * len(self.heads)


def _written(blocks: Blocks, part: slice) -> bytes:
    """Serialize a part of the list: distances, pair counts and `full`."""
    key = (blocks.table[part].long() * blocks.num_rows + blocks.row[part]) * blocks.num_columns + blocks.column[part]
    steps = key.diff(prepend=key.new_zeros(1))
    return b"".join(map(_bytes_of, (steps, blocks.pairs[part], blocks.full[part])))


def _read(written: bytes, blocks: Blocks, part: slice) -> None:
    """Write the bytes of `_written` back into this part of `blocks`."""
    data, length = bytearray(zlib.decompress(written)), part.stop - part.start
    line, column = _divmod(_tensor(data, torch.int64, 0, length).cumsum(0), blocks.num_columns)
    blocks.table[part], blocks.row[part] = _divmod(line, blocks.num_rows)
    blocks.column[part] = column
    blocks.pairs[part] = _tensor(data, torch.int32, 8 * length, length)
    blocks.full[part] = _tensor(data, torch.bool, 12 * length, length)


def _bytes_of(x: Tensor) -> bytes:
    """Bytes of a tensor, without numpy."""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _tensor(data: bytearray, dtype: torch.dtype, begin: int, length: int) -> Tensor:
    if length == 0:  # torch.frombuffer refuses an empty buffer
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=length, offset=begin)


def _divmod(x: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    quotient = x // divisor
    return quotient, x - quotient * divisor
