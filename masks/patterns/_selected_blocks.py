"""Selected blocks: a run-time tensor that names the key blocks which each query block sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Every,
    Extent,
    MaskMod,
    Pair,
    Pattern,
    Phrase,
    Progression,
    Ranges,
    Reason,
    at_least,
    call,
    constructor,
    index_dtype,
    listing,
    parameters,
    pattern_kind,
    require_int,
)
from ._block_list import NOTHING, BlockTable, binary_search, padded
from ._key_rows import KeyRows, require_tables
from ._run_time import RunTime, Table, as_tensor, of_tensor

# B batch entries, T tables, R query blocks (rows), W entries of a row

_NONE = -1  # pads rows that name fewer than W blocks


@pattern_kind("selected_blocks", positional=1)
class SelectedBlocks(RunTime):
    """Pattern that allows a pair iff, in the table of its head, the row of the query's block lists the key's block.

    The tables are a run-time tensor with `most` entries in each row. block: (tokens of a query block, tokens of a key
    block).
    """

    num_dims = 3

    block: tuple[int, int] = (1, 1)
    most: int = at_least(1, default=1)

    def check(self) -> None:
        object.__setattr__(self, "block", _checked_block(self.block))
        super().check()

    def phrase(self) -> Phrase:
        if self.block == (1, 1):
            return call("selected_keys", self.name, most=self.most)
        return call(self.kind, self.name, block=self.block, most=self.most)

    @property
    def _noun(self) -> str:
        return "selected keys" if self.block == (1, 1) else "selected blocks"

    def snapped(self, q_side: int, k_side: int) -> SelectedBlocks | None:
        """Return the pattern with block[0] rounded up to a divisor or multiple of q_side, and block[1] of k_side.

        None if the pattern carries a table, whose block numbers refer to the present `block`.
        """
        if self.given is not None:
            return None
        q_block, k_block = (_fitting_size(own, side) for own, side in zip(self.block, (q_side, k_side), strict=True))
        return replace(self, block=(q_block, k_block))

    def table(self, tensor: Tensor, extent: Extent) -> SelectedTable:
        rows, first = self.rows(tensor, extent)
        return SelectedTable.of(padded(rows), self.block, first)

    def rows(self, tensor: Tensor, extent: Extent) -> tuple[Int64[Tensor, "B T R W"], int]:
        """Return (rows, first): key blocks of each row, and the number of the query block of row 0.

        Key blocks of a row are ascending and unique, padded with NOTHING (2**30).

        Raises TypeError or ValueError as `first_row` does, and ValueError for key blocks beyond `extent.keys`.
        """
        first = self.first_row(tensor, extent)
        rows = tensor.detach().to("cpu", torch.int64)
        rows = rows if rows.dim() == 4 else rows[None]
        columns = -(-extent.keys // self.block[1])
        beyond = rows >= columns  # before they are put in order, where a large number stands for none
        if bool(beyond.any()):
            batch, table, row, place = beyond.nonzero()[0].tolist()
            number = f"the {columns} blocks of {self.block[1]} keys that {extent.keys} positions hold"
            number = f"{extent.keys}, the number of positions" if self.block == (1, 1) else number
            raise ValueError(
                f"{self._noun} must be below {number}, or {_NONE} for none; got "
                f"{int(rows[batch, table, row, place])} in row {row} of table {table}, batch entry {batch}"
            )
        return _sorted_unique_entries(rows), first

    def key_rows(self, tensor: Tensor, extent: Extent) -> list[KeyRows]:
        """Return the keys of each query in each table: one item for each batch entry, or a single one for all entries.

        Blocks are whole: queries and keys of the last blocks may be beyond `extent`. Raises as `rows` does.
        """
        rows, first = self.rows(tensor, extent)
        return [_key_rows(entry, self.block, first) for entry in rows]

    def first_row(self, tensor: Tensor, extent: Extent) -> int:
        """Return the number of the query block of row 0, given that the last row is for the last query's block.

        Raises TypeError unless the tensor holds integers. Raises ValueError unless its shape is (tables, rows, most) or
        (batch, tables, rows, most), without dims of size 0 and with at most one row for each query block.
        """
        if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
            raise TypeError(f"{self._noun} must be integers; got a tensor of {tensor.dtype}")
        if tensor.dim() not in (3, 4) or tensor.shape[-1] != self.most or 0 in tensor.shape:
            raise ValueError(
                f"{self._noun} must have shape (tables, rows, most) or (batch, tables, rows, most), without "
                f"empty dims and with most={self.most}; got {tuple(tensor.shape)}"
            )
        first = -(-extent.queries // self.block[0]) - tensor.shape[-2]
        if first < 0:
            raise ValueError(
                f"{self._noun} must have at most one row for each "
                f"{f'block of {self.block[0]} queries' if self.block[0] > 1 else 'query'}; got {tensor.shape[-2]} rows "
                f"for {extent.queries} positions"
            )
        return first

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """Return a tensor of this shape in which each row lists key blocks 0, 1, ..., as many as fit, then -1."""
        named = torch.arange(shape[-1])
        return torch.where(named * self.block[1] < extent.keys, named, _NONE).expand(shape)


@dataclass(frozen=True, eq=False)
class SelectedTable(Table):
    """Table of `SelectedBlocks`: rows[b, t, r] names the key blocks that query block first + r sees.

    Each of the T tables serves num_heads / T consecutive heads. Rows are ascending, and padded with NOTHING (2**30) to
    W entries, a power of two.
    """

    kind = "selected blocks table"

    rows: Int64[Tensor, "B T R W"]
    block: tuple[int, int] = (1, 1)
    first: int = 0

    @classmethod
    def of(cls, rows: Tensor, block: tuple[int, int] = (1, 1), first: int = 0) -> Self:  # type: ignore[override]
        made = super().of(rows)
        return replace(made, digest=f"{first} {block} {made.digest}", block=block, first=first)

    def of_entry(self, batch: int) -> Self:
        return self if len(self.rows) == 1 else self._with_rows(self.rows[batch, None], "an entry")

    def for_head(self, head: int, num_heads: int) -> Self:
        tables = self.rows.shape[1]
        table = head * tables // num_heads
        return self if tables == 1 else self._with_rows(self.rows[:, table, None], f"table {table}")

    def _with_rows(self, rows: Tensor, which: str) -> Self:
        return self.part(type(self).of(rows, self.block, self.first), which)

    def check_heads(self, num_heads: int) -> None:
        require_tables(self.rows.shape[1], num_heads)

    def check_tokens(self, queries: range, keys: range) -> None:
        require_row(self.block[0], self.first, self.rows.shape[2], queries.start)

    def described(self) -> str:
        tables, rows = self.rows.shape[1:3]
        kind = "keys" if self.block == (1, 1) else "blocks"
        return f"{int((self.rows < NOTHING).sum())} {kind} in {tables} x {rows} rows"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        held, step = self.on(device), self.batch_step(device)
        tables, height, width = self.rows.shape[1:]
        numbers = (num_heads // tables, tables, height, height - 1, *self.block, self.first)
        per_table, tables, rows, last_row, q_block, k_block, first = parameters(device, *numbers)
        named = binary_search(width, device)

        def seen(b, h, q, k):
            row, column = q // q_block - first, k // k_block
            line = (b * step * tables + h // per_table) * rows + torch.minimum(row.clamp(min=0), last_row)
            return named(held.rows, line, column) & (row >= 0) & (row <= last_row)

        return seen

    def copied_to(self, device: torch.device) -> Tensor:
        """Return the rows of all batch entries and tables on a device, flattened to shape (B * T * R, W)."""
        lines = self.rows.flatten(0, 2)
        return lines.to(device, index_dtype(device, 0, max(NOTHING, lines.numel())), copy=True)

    def key_rows(self) -> KeyRows:
        """Return the keys of each query in each table; the last blocks may have queries and keys beyond the sequence.

        All batch entries must have equal tables.
        """
        return _key_rows(self.only_row, self.block, self.first)

    @cached_property
    def _block_table(self) -> BlockTable:
        """Return the rows as a `BlockTable` in which the first query of row 0 has position 0."""
        rows = self.only_row
        listed = rows[rows < NOTHING]
        columns = int(listed.max()) + 1 if len(listed) else 1
        q_block, k_block = self.block
        return BlockTable(rows, q_block, k_block, max(rows.shape[1] * q_block, columns * k_block))

    def _table_index(self, head: Any, num_heads: int) -> Any:
        return head * self.rows.shape[1] // num_heads

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        q = Progression(box.q.first - self.first * self.block[0], box.q.step, box.q.count)
        return self._block_table.count(self._table_index(box.head, num_heads), Box(box.head, q, box.k))

    def reason(self, pair: Pair) -> Reason:
        table, row = self._table_index(pair.head, pair.num_heads), pair.query // self.block[0]
        column = pair.key // self.block[1]
        inside = 0 <= row - self.first < self.rows.shape[2]
        seen = self.only_row[int(table), int(row - self.first)].tolist() if inside else []
        names = [block for block in seen if block < NOTHING]
        whose = f" of table {table}" if self.rows.shape[1] > 1 else ""
        where = f"whose row{whose} names key blocks {listing(names)}" if inside else "which has no row"
        text = f"{pair.the_query} is in block {row}, {where}; {pair.the_key} is in block {column}"
        if self.block == (1, 1):
            where = f"has a row{whose} that names keys {listing(names)}" if inside else "has no row"
            text = f"{pair.the_query} {where}; {pair.the_key} is {'among them' if column in names else 'no such key'}"
        return Reason(self, column in names, text)

    def row(self, query: int, keys: range) -> Ranges | None:
        if self.rows.shape[1] > 1 or query < self.first * self.block[0]:
            return None if self.rows.shape[1] > 1 else ()
        return self._block_table.row(0, query - self.first * self.block[0], keys)

    def keys_of(self, queries: Bool[Tensor, " N"]) -> Bool[Tensor, " N"] | None:
        if self.rows.shape[1] > 1:
            return None
        before = self.first * self.block[0]  # the table counts queries from its first row, keys from position 0
        own = torch.zeros_like(queries)
        own[: max(0, len(queries) - before)] = queries[before:]
        return self._block_table.keys_of(0, own)

    def superset(self) -> Pattern:
        return Every()


def require_row(side: int, first: int, rows: int, query: int) -> None:
    """Raise ValueError if `query`, the position of a call's first query, is before the query block of a table's row 0.

    side: queries of a block.
    first: number of the query block of row 0.
    rows: number of rows, for the error.
    """
    if query < first * side:
        raise ValueError(
            f"selected blocks must have a row for each block of {side} queries; got {rows} rows, the first for "
            f"position {first * side}, and queries from {query} on"
        )


def _key_rows(rows: Int64[Tensor, "T R W"], block: tuple[int, int], first: int) -> KeyRows:
    """Return the keys of each query of each row's block: all tokens of the key blocks that the row lists.

    The last blocks count as whole, also where they go beyond the sequence. first: query block of row 0.
    """
    (q_block, k_block), listed = block, rows < NOTHING
    if block != (1, 1):
        rows = (rows[..., None] * k_block + torch.arange(k_block)).flatten(2).repeat_interleave(q_block, 1)
        listed = listed.repeat_interleave(k_block, 2).repeat_interleave(q_block, 1)
    return KeyRows(rows[listed], listed.sum(2).flatten().cumsum(0), (rows.shape[0], rows.shape[1]), first * q_block)


def _sorted_unique_entries(rows: Int64[Tensor, "... W"]) -> Int64[Tensor, "... W"]:
    """Return rows in ascending order; negative and repeated entries are replaced by NOTHING (2**30), at the end."""
    rows = torch.where(rows < 0, NOTHING, rows).sort(-1).values
    again = rows[..., 1:] == rows[..., :-1]
    rows[..., 1:].masked_fill_(again, NOTHING)
    uneven = again.any(-1)
    rows[uneven] = rows[uneven].sort(-1).values
    return rows


def _fitting_size(least: int, side: int) -> int:
    """Return the smallest number from `least` on that divides `side` or is a multiple of it."""
    return next(size for size in range(least, least + side) if size % side == 0 or side % size == 0)


def _checked_block(block: Any) -> tuple[int, int]:
    sides = tuple(block) if isinstance(block, tuple | list) else (block, block)
    if len(sides) != 2:
        raise ValueError(f"block must be one number or (tokens of a query block, tokens of a key block); got {block=}")
    return require_int("block", sides[0], minimum=1), require_int("block", sides[1], minimum=1)


@constructor
def selected_blocks(blocks: Any, *, block: int | tuple[int, int], most: int, name: str = "selected_blocks") -> Pattern:
    """Pattern in which each query block sees the key blocks that a run-time table names, often chosen from the data.

    blocks: integers of shape (tables, rows, most) or (batch, tables, rows, most): the numbers of the key blocks that
        each query block sees, in any order. -1 is an empty entry; a repeated block counts once. The number of tables
        divides the number of heads: one for all heads, one for each key-value head, or one for each head. The last row
        is that of the last query's block, so a call that continues a sequence needs rows for its own queries only. Or a
        string, the name under which `attend(bindings=)` passes the tensor.
    block: tokens of a block, or (tokens of a query block, tokens of a key block); block 0 begins at position 0.
    most: number of entries of each row.
    name: name of the tensor in texts and errors, unless `blocks` is a string. Names within a pattern must differ.

    In `(selected_blocks(...) | p) & q` with patterns p and q, or without p or q, engines "aten" and "flex" can read the
    table directly: new values then need no planning and no compilation. In other compositions, such as
    `~selected_blocks(...)` or two uses of it, each new table is planned.

    `attend` and `bind` raise TypeError for a tensor without integers, and ValueError for another shape or for blocks
    beyond the keys.

    >>> chosen = torch.tensor([[[0, -1], [0, 1]]])
    >>> masks.describe(masks.selected_blocks(chosen, block=64, most=2), 128).useful_pairs  # 3 blocks of 64 x 64
    12288
    """
    return of_tensor(SelectedBlocks, blocks, name, block=block, most=most)


@constructor
def selected_keys(keys: Any, *, most: int | None = None, name: str = "selected_keys") -> Pattern:
    """Pattern in which each query sees the keys that a run-time table names: nearest neighbours, or top-k tokens.

    It is `selected_blocks` with blocks of one token. On CPU, `attend` by default gathers the listed keys, so work and
    memory follow the number of entries; with many entries it uses a dense mask, for some queries at a time, if that is
    faster. On accelerators with Triton, kernels read the listed keys in place. The table may be new in each call.

    keys: integers of shape (tables, queries, most) or (batch, tables, queries, most): the positions of the keys that
        each query sees, in any order. -1 is an empty entry; a repeated key counts once. The number of tables divides
        the number of heads: one for all heads, one for each key-value head, or one for each head. The last row is that
        of the last query, so a call that continues a sequence needs rows for its own queries only. Or a string, the
        name under which `attend(bindings=)` passes the tensor.
    most: number of entries of each row; None takes it from the tensor.
    name: name of the tensor in texts and errors, unless `keys` is a string. Names within a pattern must differ.

    Raises ValueError for a string or a scalar without `most`; `attend` and `bind` raise TypeError for a tensor without
    integers, and ValueError for another shape or for keys beyond the last one.

    >>> nearest = torch.tensor([[[0, -1], [0, 1], [0, 2]]])
    >>> masks.describe(masks.selected_keys(nearest), 3).useful_pairs
    5
    """
    if not isinstance(keys, str):
        keys = as_tensor(name, keys)
        if most is None and keys.dim():
            most = int(keys.shape[-1])
    if most is None:
        raise ValueError(f"selected_keys needs most=, the number of entries of each row, beside a name; got {keys!r}")
    return of_tensor(SelectedBlocks, keys, name, block=(1, 1), most=most)
