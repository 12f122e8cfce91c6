"""Block lists: explicit tables of the key blocks that each query block sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from math import isqrt
from typing import Any

import torch
from jaxtyping import Bool, Int32
from torch import Tensor

from ..core import (
    OF_PATTERNS,
    Bounds,
    Box,
    MaskMod,
    Pair,
    Pattern,
    Ranges,
    Reason,
    Squares,
    advises,
    among,
    at_least,
    clip,
    constructor,
    count_within,
    index_dtype,
    listing,
    parameters,
    pattern_kind,
    require_int,
    within,
)

# T tables, R query blocks (rows), W entries of the longest row, rounded up to a power of two

NOTHING = 1 << 30  # pads short rows: a key block that no sequence reaches
_MOST_COMPARED = 8  # rows of at most this many entries are compared entry by entry
_EXACT_ROWS = 8  # a box over more block rows than this is bounded by `CellSums`
_MOST_CELLS = 1 << 24  # cells of all tables together: bounds the memory of `CellSums`
_ENTRIES_AT_ONCE = 1 << 20

# (line, inside, column) -> bool: True if `inside`, and row `line` of the flattened tables names key block `column`
RowTest = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Tables of key block numbers: entries[t, r] lists the key blocks that query block r sees in table t.

    Each row entries[t, r] is ascending and padded at its end with NOTHING (2**30). Query blocks have `q_block` tokens,
    key blocks have `block` tokens. Queries after the last row's block, and queries and keys at positions >= limit, are
    in no allowed pair.
    """

    entries: Tensor  # int64, (T, R, W)
    q_block: int
    block: int
    limit: int

    def mask_mod(self, table_of_head: Tensor, device: torch.device) -> MaskMod:
        """Return the mask_mod (b, h, q, k) -> bool with tensors on `device`; head h uses table table_of_head[h].

        Requires q_block == block.
        """
        _, rows, width = self.entries.shape
        # No arithmetic of captured numbers alone: FlexAttention's FLASH backend cannot lower it.
        last_row, block, limit = parameters(device, rows - 1, self.block, self.limit)
        listed = (_test_by_comparing if width <= _MOST_COMPARED else _test_by_binary_search)(
            self.entries.flatten(0, 1), device
        )
        first_line = (table_of_head * rows).to(device, index_dtype(device, 0, self.entries.numel()))

        def seen(b, h, q, k):
            row = q // block
            line = first_line[h] + torch.minimum(row, last_row)
            return listed(line, (row <= last_row) & (q < limit), torch.where(k < limit, k // block, -1))

        return seen

    def count(self, table: Tensor, box: Box) -> Bounds:
        """Return bounds on the allowed (query, key) pairs of each of n boxes of queries and keys.

        table: index of the table for each box, shape (n,); the heads in `box` are ignored.

        Bounds are exact for boxes that span at most 8 query blocks, and may be coarser for larger ones.
        """
        box = Box(table, *(clip(side, 0, self.limit) for side in (box.q, box.k)))
        rows = torch.where(box.q.count > 0, box.q.last // self.q_block - box.q.first // self.q_block + 1, 0)
        low, high = torch.zeros_like(table), torch.zeros_like(table)
        few, many = ((rows <= _EXACT_ROWS).nonzero().squeeze(1), (rows > _EXACT_ROWS).nonzero().squeeze(1))
        for some in few.split(max(1, _ENTRIES_AT_ONCE // self.entries.shape[2])):
            low[some] = high[some] = self._count_pairs_exactly(box.select(some), rows[some])
        if len(many):
            bounds = self._cells.bounds(table[many], box.select(many), self.q_block, self.block)
            low[many], high[many] = bounds.low, bounds.high
        return Bounds(low, high)

    def squares(self, table: int) -> Squares:
        """Return the squares of `block` queries by `block` keys that a table lists: one for each entry below NOTHING.

        Requires q_block == block. table: index of the table.
        """
        row, place = (self.entries[table] < NOTHING).nonzero().unbind(1)
        return Squares(row * self.block, self.entries[table, row, place] * self.block, self.block)

    def row(self, table: int, query: int, keys: range) -> Ranges:
        """Return the keys in `keys` that one query sees in one table, as ranges; adjacent blocks form one range."""
        row = query // self.q_block
        if query >= self.limit or row >= self.entries.shape[1]:
            return ()
        listed = (block for block in self.entries[table, row].tolist() if block < NOTHING)
        return keys_of_blocks(listed, self.block, within(keys, 0, self.limit))

    def keys_of(self, table: int, queries: Bool[Tensor, " N"]) -> Bool[Tensor, " N"]:
        """Return a mask of the key positions below N, True where at least one query sees the key in table `table`.

        queries: True at the positions of the queries. `limit` is not applied.
        """
        length = len(queries)
        row = torch.nn.functional.pad(queries, (0, -length % self.q_block)).view(-1, self.q_block).any(1).nonzero()
        named = self.entries[table, row[row < self.entries.shape[1]]].flatten()
        columns = -(-length // self.block)
        seen = torch.zeros(columns + 1, dtype=torch.bool)  # the last one takes blocks beyond the keys, and padding
        seen[named.clamp(max=columns)] = True
        return seen[:-1].repeat_interleave(self.block)[:length]

    def _count_pairs_exactly(self, box: Box, rows: Tensor) -> Tensor:
        """Return the exact number of allowed pairs of each box i, which spans rows[i] query blocks.

        The head of each box is the index of its table.
        """
        pairs = torch.zeros_like(box.area)
        first, height = box.q.first // self.q_block, self.entries.shape[1]
        for row in (first + step for step in range(int(rows.max()) if len(rows) else 0)):
            queries = count_within(box.q, row * self.q_block, (row + 1) * self.q_block)
            seen = self.entries[box.head, row.clamp(max=height - 1)].T * self.block
            pairs += torch.where(row < height, queries * count_within(box.k, seen, seen + self.block).sum(0), 0)
        return pairs

    @cached_property
    def _cells(self) -> CellSums:
        table, row, place = (self.entries < NOTHING).nonzero().unbind(1)
        column = self.entries[table, row, place]
        columns = int(column.max()) + 1 if len(column) else 1
        return CellSums.of(len(self.entries), (self.entries.shape[1], columns), table, row, column)


@dataclass(frozen=True, eq=False)
class CellSums:
    """Cumulative numbers of listed blocks in the cells of each table: a cell is a square of blocks.

    side: blocks along an edge of a cell.
    sums: sums[t, i, j] counts the listed blocks of table t in the first i rows and the first j columns of cells.
    """

    side: int
    sums: Int32[Tensor, "T rows columns"]

    @classmethod
    def of(cls, tables: int, shape: tuple[int, int], table: Tensor, row: Tensor, column: Tensor) -> CellSums:
        """Return the sums for listed blocks: block n is at row[n] and column[n] of table[n], and `table` ascends.

        tables: number of tables.
        shape: numbers of rows and of columns of blocks in a table.
        """
        side = -(-max(shape) // isqrt(_MOST_CELLS // tables))
        height, width = -(-shape[0] // side), -(-shape[1] // side)
        sums = torch.zeros(tables, height + 1, width + 1, dtype=torch.int32)
        cells = (row // side * width + column // side).split(table.bincount(minlength=tables).tolist())
        for of_table, own in zip(sums, cells, strict=True):
            of_table[1:, 1:] = own.bincount(minlength=height * width).view(height, width).cumsum(0).cumsum(1)
        return cls(side, sums)

    def bounds(self, table: Tensor, box: Box, q_block: int, k_block: int) -> Bounds:
        """Return bounds on the number of each box's pairs that are in listed blocks.

        low is the area of the box if all blocks of the cells that the box touches are listed, else 0. high is the
        number of listed blocks in these cells times the most pairs that the box can have in a block, up to its area.

        table: index of the table for each box.
        q_block, k_block: queries and keys of a block.
        """
        height, width = self.side * q_block, self.side * k_block
        top, bottom = box.q.first // height, box.q.last // height + 1
        left, right = box.k.first // width, box.k.last // width + 1
        held = (bottom - top) * (right - left) * self.side**2
        top, bottom = (row.clamp(max=self.sums.shape[1] - 1) for row in (top, bottom))
        left, right = (column.clamp(max=self.sums.shape[2] - 1) for column in (left, right))
        listed = (self.sums[table, bottom, right] - self.sums[table, top, right]).long()
        listed -= self.sums[table, bottom, left] - self.sums[table, top, left]
        area, each = box.area, -(-q_block // box.q.step) * -(-k_block // box.k.step)
        return Bounds(torch.where(listed == held, area, 0), (listed * each).clamp(min=0).minimum(area))


def _test_by_comparing(entries: Tensor, device: torch.device) -> RowTest:
    """Return a test (line, inside, column) -> bool: True if `inside`, and row entries[line] contains `column`."""
    # Entries depend on the query only: a kernel loads them once for all its keys.
    used = entries[:, : max(1, int((entries < NOTHING).sum(1).max()))]
    places = used.T.to(device, index_dtype(device, 0, NOTHING)).contiguous().unbind(0)

    def listed(line, inside, column):
        found = torch.where(inside, places[0][line], NOTHING) == column
        for place in places[1:]:
            found = found | (torch.where(inside, place[line], NOTHING) == column)
        return found

    return listed


def _test_by_binary_search(entries: Tensor, device: torch.device) -> RowTest:
    named = binary_search(entries.shape[1], device)
    entries = entries.to(device, index_dtype(device, 0, entries.numel()))
    return lambda line, inside, column: named(entries, line, column) & inside


def binary_search(width: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a binary search (entries, line, column) -> bool: True if row entries[line] contains `column`.

    Rows are ascending and have `width` entries, a power of two.
    """
    halves = parameters(device, *(1 << bit for bit in reversed(range(width.bit_length() - 1))))

    def named(entries, line, column):
        place = column - column  # zeros of its shape and dtype
        # All entries before `place` are below `column`, after each step.
        for half in halves:
            place = place + torch.where(entries[line, place + half - 1] < column, half, 0)
        return entries[line, place] == column

    return named


class TableRule(Pattern):
    """Base of patterns that allow a pair iff a table lists the key's block in the row of the query's block.

    There is one table for all heads, or one for each global head; `table` returns all of them as one `BlockTable`.
    """

    @property
    def by_head(self) -> bool:
        """True if each global head has a separate table."""
        raise NotImplementedError

    def table(self, num_heads: int) -> BlockTable:
        raise NotImplementedError

    def table_of_head(self, num_heads: int) -> Tensor:
        return torch.arange(num_heads) if self.by_head else torch.zeros(num_heads, dtype=torch.int64)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return self.table(num_heads).mask_mod(self.table_of_head(num_heads), device)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return self.table(num_heads).count(self.table_of_head(num_heads)[box.head], box)

    def squares(self, head: int, num_heads: int) -> Squares:
        return self.table(num_heads).squares(head if self.by_head else 0)


def keys_of_blocks(blocks: Iterable[int], block: int, keys: range) -> Ranges:
    """Return the keys in `keys` whose block, of `block` tokens, has a number in `blocks`.

    The result has at most one range for each run of consecutive numbers.
    """
    seen = set(blocks)
    firsts = sorted(number for number in seen if number - 1 not in seen)
    lasts = sorted(number for number in seen if number + 1 not in seen)
    return among((range(a * block, (b + 1) * block) for a, b in zip(firsts, lasts, strict=True)), keys)


def padded(entries: Tensor) -> Tensor:
    """Return `entries` with rows (the last dim) padded at the end with NOTHING, to a length that is a power of two."""
    width = 1 << max(0, entries.shape[-1] - 1).bit_length()
    return torch.nn.functional.pad(entries, (0, width - entries.shape[-1]), value=NOTHING)


_TABLES_KEPT = 8
_HEADS_KEPT = 128
_SEQUENCES = (list, tuple, range)


@pattern_kind("block_list")
class BlockList(TableRule):
    """Pattern that allows a pair iff the table row of the query's block contains the number of the key's block.

    `rows` is one table for all heads, or a tuple of tables, one for each global head. A table is a tuple of rows, one
    for each query block, and a row is a tuple of key block numbers, which are stored in ascending order. Blocks have
    `block` tokens.
    """

    rows: tuple[Any, ...]
    block: int = at_least(1)

    def check(self) -> None:
        object.__setattr__(self, "rows", _checked_rows(self.rows))

    def __hash__(self) -> int:
        return hash(self.text)  # a str caches its hash, a nested tuple does not

    def write(self) -> str:
        # Fast for large tables: str() of nested tuples is JSON except for brackets, commas and spaces.
        rows = str(self.rows).replace(" ", "").replace(",)", "]").replace("(", "[").replace(")", "]")
        return f'{{"block":{self.block},"kind":"block_list","rows":{rows}}}'

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> BlockList:
        """Return the pattern with the stored fields `data`.

        Raises ValueError or TypeError for values that `block_list` refuses, and ValueError for rows that are not in
        ascending order.
        """
        made, rows = cls(data["rows"], data["block"]), data["rows"]
        given, kept = (rows, made.rows) if made.by_head else ([rows], (made.rows,))
        pairs = (pair for tables in zip(given, kept, strict=True) for pair in zip(*tables, strict=True))
        if any(tuple(row) != ascending for row, ascending in pairs):
            raise ValueError("each row must name its blocks in ascending order")
        return made

    @property
    def by_head(self) -> bool:
        return _is_table(self.rows[0])

    def for_head(self, head: int, num_heads: int) -> Pattern:
        return _pattern_of_head(self, head) if self.by_head else self

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        """Return self. Raises ValueError unless `block` divides, or is a multiple of, each of q_side and k_side."""
        if any(self.block % side and side % self.block for side in (q_side, k_side)):
            raise ValueError(
                "the blocks of a block_list cannot be rounded: list blocks whose side divides those "
                f"of the kernel, ({q_side}, {k_side}), or is a multiple of them; got block={self.block}"
            )
        return self

    def check_heads(self, num_heads: int) -> None:
        if self.by_head and len(self.rows) != num_heads:
            raise ValueError(
                f"block_list needs one list of rows for each head; got {len(self.rows)} for {num_heads} heads"
            )

    def check_tokens(self, queries: range, keys: range) -> None:
        """Raise ValueError if the row of one of these queries names a key block that begins after the last key."""
        begin, blocks = queries.start // self.block, -(-keys.stop // self.block)
        used = _block_table(self).entries[:, begin : (queries.stop - 1) // self.block + 1]
        beyond = ((used >= blocks) & (used < NOTHING)).nonzero()
        if len(beyond):
            table, row, place = beyond[0].tolist()
            whose = f" of head {table}" if self.by_head else ""
            raise ValueError(
                f"block_list must name blocks below the number of key blocks, {blocks} blocks of {self.block} for "
                f"{keys.stop} keys; got block {used[table, row, place]} in row {begin + row}{whose}"
            )

    def table(self, num_heads: int) -> BlockTable:
        return _block_table(self)

    def reason(self, pair: Pair) -> Reason:
        rows = self.rows[pair.head] if self.by_head else self.rows
        row, column = pair.query // self.block, pair.key // self.block
        seen = rows[row] if row < len(rows) else ()
        whose = f" of head {pair.head}" if self.by_head else ""
        named = f"whose row{whose} names key blocks {listing(seen)}"
        where = named if row < len(rows) else f"beyond the {len(rows)} rows{whose}"
        text = f"{pair.the_query} is in block {row}, {where}; {pair.the_key} is in block {column}"
        return Reason(self, column in seen, text)

    def row(self, query: int, keys: range) -> Ranges:
        return _block_table(self).row(0, query, keys)

    def keys_of(self, queries: Bool[Tensor, " N"]) -> Bool[Tensor, " N"]:
        return _block_table(self).keys_of(0, queries)


@constructor
@advises(keywords=OF_PATTERNS, how="write masks.block_list(rows, block=128)")
def block_list(rows: Sequence[Any] | Tensor, *, block: int) -> Pattern:
    """Pattern in which the queries of block i see the key blocks whose numbers are in rows[i].

    block: tokens of a query block and of a key block; block 0 begins at position 0.
    rows: a table, which has a row of key block numbers for each query block; or a sequence of tables, one for each head
        over all devices. A tensor also works: integers of shape (rows, blocks) or (heads, rows, blocks), or booleans of
        these shapes, True where the row sees the key block of that column.

    Queries beyond the last row see no key.

    Raises ValueError for numbers outside [0, 2**30), a number that a row names twice, a table without rows, a tensor of
    another shape and a block below 1; TypeError for entries that are not integers and for uneven nesting. `bind` raises
    ValueError if the row of a query names a block beyond the last key, and for another number of heads than of tables.

    >>> masks.describe(masks.block_list([[0], [0, 1]], block=64), 128).useful_pairs  # 3 blocks of 64 x 64
    12288
    """
    return BlockList(_rows_of_tensor(rows) if isinstance(rows, Tensor) else rows, block)  # type: ignore[arg-type]


def _rows_of_tensor(rows: Tensor) -> list[Any]:
    if rows.dtype.is_floating_point or rows.dtype.is_complex:
        raise TypeError(f"a tensor of rows must hold integers or booleans; got {rows.dtype}")
    if rows.dim() not in (2, 3):
        raise ValueError(
            f"a tensor of rows must have shape (rows, blocks) or (heads, rows, blocks); got {tuple(rows.shape)}"
        )
    if 0 in rows.shape[:-1]:
        raise ValueError(
            f"a block list needs at least one row of block numbers; got a tensor of shape {tuple(rows.shape)}"
        )
    if rows.dtype != torch.bool:
        return rows.tolist()
    if rows.dim() == 3:
        return [_rows_of_tensor(table) for table in rows]
    columns = rows.nonzero()[:, 1].split(rows.sum(1).tolist())
    return [row.tolist() for row in columns]


def _checked_rows(rows: Any) -> tuple[Any, ...]:
    if not isinstance(rows, _SEQUENCES):
        raise TypeError(
            f"rows must be rows of block numbers, or one list of such rows for each head; got {type(rows).__name__}"
        )
    if any(_is_table(each) for each in rows):
        return tuple(_checked_table(table, f"rows[{head}]") for head, table in enumerate(rows))
    return _checked_table(rows, "rows")


def _checked_table(table: Any, name: str) -> tuple[tuple[int, ...], ...]:
    if isinstance(table, _SEQUENCES) and not table:
        raise ValueError(f"a block list needs at least one row of block numbers; got {name}={table!r}")
    if not isinstance(table, _SEQUENCES):
        raise TypeError(_mixed_rows_text(name, table))
    return tuple(_checked_row(row, f"{name}[{index}]") for index, row in enumerate(table))


def _checked_row(row: Any, name: str) -> tuple[int, ...]:
    if not isinstance(row, _SEQUENCES) or _is_table(row):
        raise TypeError(_mixed_rows_text(name, row))
    # Tables can be large: entries are checked one by one only to report an error.
    if row and not (set(map(type, row)) == {int} and min(row) >= 0 and max(row) < NOTHING):
        for place, entry in enumerate(row):
            if require_int(f"{name}[{place}]", entry, minimum=0) >= NOTHING:
                raise ValueError(f"{name}[{place}] must be below 2**30; got {name}[{place}]={entry}")
    ascending = tuple(sorted(row))
    if len(set(row)) < len(row):
        twice = next(entry for entry, following in pairwise(ascending) if entry == following)
        raise ValueError(f"a row must name each key block at most once; got {name} with block {twice} twice")
    return ascending


def _is_table(value: Any) -> bool:
    return isinstance(value, _SEQUENCES) and any(issubclass(kind, _SEQUENCES) for kind in set(map(type, value)))


def _mixed_rows_text(name: str, value: Any) -> str:
    rule = "rows must be rows of block numbers, or one list of such rows for each head, not a mix"
    return f"{rule}; got {name}={value!r:.60}"


@lru_cache(maxsize=_HEADS_KEPT)
def _pattern_of_head(pattern: BlockList, head: int) -> BlockList:
    return BlockList(pattern.rows[head], pattern.block)


@lru_cache(maxsize=_TABLES_KEPT)
def _block_table(pattern: BlockList) -> BlockTable:
    tables = pattern.rows if pattern.by_head else (pattern.rows,)
    height = max(map(len, tables))
    rows = [row for table in tables for row in (*table, *((),) * (height - len(table)))]
    lengths = torch.tensor([len(row) for row in rows])
    entries = torch.full((len(rows), max(1, int(lengths.max()))), NOTHING)
    entries[torch.arange(entries.shape[1]) < lengths[:, None]] = torch.tensor(list(chain.from_iterable(rows))).long()
    last = max((row[-1] for row in rows if row), default=0)
    limit = max(height, last + 1) * pattern.block
    return BlockTable(padded(entries).view(len(tables), height, -1), pattern.block, pattern.block, limit)
