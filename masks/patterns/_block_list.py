"""Block list: explicit tables of the key blocks that each query block sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from ..core import (
    OF_PATTERNS,
    Pair,
    Pattern,
    Ranges,
    Reason,
    advises,
    constructor,
    listing,
    pattern_kind,
    require_int,
)
from ._block_table import NOTHING, BlockTable, TableRule, padded

_TABLES_KEPT = 8
_HEADS_KEPT = 128
_SEQUENCES = (list, tuple, range)


@pattern_kind("block_list")
class BlockList(TableRule):
    """Allowed iff the row of the query's block names the key's block.

    `rows` is one table of rows for all heads, or one for each global head. Rows are stored in ascending order.
    """

    rows: tuple[Any, ...]
    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _checked(self.rows))
        require_int("block", self.block, minimum=1)
        super().__post_init__()

    def __hash__(self) -> int:
        return hash(self.text)  # a str caches its hash, a nested tuple does not

    def write(self) -> str:
        # Fast for large tables: str() of nested tuples is JSON except for brackets, commas and spaces.
        rows = str(self.rows).replace(" ", "").replace(",)", "]").replace("(", "[").replace(")", "]")
        return f'{{"block":{self.block},"kind":"block_list","rows":{rows}}}'

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> BlockList:
        """Construct from stored data; ValueError for rows that are not in ascending order."""
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
        return _of_head(self, head) if self.by_head else self

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        """Return self; ValueError unless the block side divides these sides or is a multiple of them."""
        if any(self.block % side and side % self.block for side in (q_side, k_side)):
            raise ValueError(
                "a block_list names blocks of its own, which cannot be rounded: list blocks whose side divides those "
                f"of the kernel, ({q_side}, {k_side}), or is a multiple of them; got block={self.block}"
            )
        return self

    def check_heads(self, num_heads: int) -> None:
        if self.by_head and len(self.rows) != num_heads:
            raise ValueError(f"block_list needs one table a head; got {len(self.rows)} for {num_heads} heads")

    def check_tokens(self, queries: range, keys: range) -> None:
        """Raise ValueError if a row of these queries names a key block that begins after the last key."""
        begin, blocks = queries.start // self.block, -(-keys.stop // self.block)
        used = _table(self).entries[:, begin : (queries.stop - 1) // self.block + 1]
        beyond = ((used >= blocks) & (used < NOTHING)).nonzero()
        if len(beyond):
            table, row, place = beyond[0].tolist()
            whose = f" of head {table}" if self.by_head else ""
            raise ValueError(
                f"block_list is out of range: row {begin + row}{whose} names key block {used[table, row, place]}, "
                f"but {keys.stop} tokens hold {blocks} blocks of {self.block}"
            )

    def table(self, num_heads: int) -> BlockTable:
        return _table(self)

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
        return _table(self).row(0, query, keys)


@constructor
@advises(keywords=OF_PATTERNS, how="write masks.block_list(rows, block=128)")
def block_list(rows: Sequence[Any] | Tensor, *, block: int) -> Pattern:
    """Queries of block i see the key blocks that rows[i] names. Blocks have `block` tokens; number 0 is the first.

    For a table for each head, give a sequence of tables, one for each head over all devices. A tensor
    works too: integers of shape (rows, blocks) or (heads, rows, blocks), or booleans of these shapes, True
    where a row sees the key block of that column. Queries beyond the last row see nothing.

    Raises ValueError for a negative number or one that a row names twice, and for no rows; a TypeError for
    anything but integers and for uneven nesting. Binding raises ValueError where the row of a query names a
    block beyond the last key.

    >>> masks.describe(masks.block_list([[0], [0, 1]], block=64), 128).useful_pairs  # 3 blocks of 64 x 64
    12288
    """
    return BlockList(_listed(rows) if isinstance(rows, Tensor) else rows, block)  # type: ignore[arg-type]


def _listed(rows: Tensor) -> list[Any]:
    """Convert a tensor to nested lists of block numbers."""
    if rows.dtype.is_floating_point or rows.dtype.is_complex:
        raise TypeError(f"a tensor of rows must hold integers or booleans; got {rows.dtype}")
    if rows.dim() not in (2, 3):
        raise ValueError(f"a tensor of rows must have 2 dims, or 3 with heads first; got shape {tuple(rows.shape)}")
    if 0 in rows.shape[:-1]:
        raise ValueError(f"a table needs at least one row; got a tensor of shape {tuple(rows.shape)}")
    if rows.dtype != torch.bool:
        return rows.tolist()
    if rows.dim() == 3:
        return [_listed(table) for table in rows]
    columns = rows.nonzero()[:, 1].split(rows.sum(1).tolist())
    return [row.tolist() for row in columns]


def _checked(rows: Any) -> tuple[Any, ...]:
    if not isinstance(rows, _SEQUENCES):
        raise TypeError(f"rows must be a table of rows, or one such table a head; got {type(rows).__name__}")
    if any(_is_table(each) for each in rows):
        return tuple(_checked_table(table, f"rows[{head}]") for head, table in enumerate(rows))
    return _checked_table(rows, "rows")


def _checked_table(table: Any, name: str) -> tuple[tuple[int, ...], ...]:
    if isinstance(table, _SEQUENCES) and not table:
        raise ValueError(f"a table needs at least one row; got {name}={table!r}")
    if not isinstance(table, _SEQUENCES):
        raise TypeError(_uneven(name, table))
    return tuple(_checked_row(row, f"{name}[{index}]") for index, row in enumerate(table))


def _checked_row(row: Any, name: str) -> tuple[int, ...]:
    if not isinstance(row, _SEQUENCES) or _is_table(row):
        raise TypeError(_uneven(name, row))
    # Tables can be large: entries are checked one by one only to report an error.
    if row and not (set(map(type, row)) == {int} and min(row) >= 0 and max(row) < NOTHING):
        for place, entry in enumerate(row):
            if require_int(f"{name}[{place}]", entry, minimum=0) >= NOTHING:
                raise ValueError(f"{name}[{place}] must be below 2**30; got {name}[{place}]={entry}")
    ascending = tuple(sorted(row))
    if len(set(row)) < len(row):
        twice = next(entry for entry, following in pairwise(ascending) if entry == following)
        raise ValueError(f"a row must name each key block once; got {name} with block {twice} twice")
    return ascending


def _is_table(value: Any) -> bool:
    return isinstance(value, _SEQUENCES) and any(issubclass(kind, _SEQUENCES) for kind in set(map(type, value)))


def _uneven(name: str, value: Any) -> str:
    return f"rows must be rows of block numbers, or for each head a table of such rows; got {name}={value!r:.60}"


@lru_cache(maxsize=_HEADS_KEPT)
def _of_head(pattern: BlockList, head: int) -> BlockList:
    return BlockList(pattern.rows[head], pattern.block)


@lru_cache(maxsize=_TABLES_KEPT)
def _table(pattern: BlockList) -> BlockTable:
    tables = pattern.rows if pattern.by_head else (pattern.rows,)
    height = max(map(len, tables))
    rows = [row for table in tables for row in (*table, *((),) * (height - len(table)))]
    lengths = torch.tensor([len(row) for row in rows])
    entries = torch.full((len(rows), max(1, int(lengths.max()))), NOTHING)
    entries[torch.arange(entries.shape[1]) < lengths[:, None]] = torch.tensor(list(chain.from_iterable(rows))).long()
    last = max((row[-1] for row in rows if row), default=0)
    limit = max(height, last + 1) * pattern.block
    return BlockTable(padded(entries).view(len(tables), height, -1), pattern.block, pattern.block, limit)
