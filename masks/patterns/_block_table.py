"""Tables of the key blocks that each query block sees: look-up by pair, and counts in boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import torch
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    MaskMod,
    Pattern,
    Ranges,
    Squares,
    among,
    clip,
    count_within,
    index_dtype,
    parameters,
    within,
)

# T tables, R rows of query blocks, W entries of the longest row, rounded up to a power of two

NOTHING = 1 << 30  # pads short rows: a key block that no sequence reaches
_COMPARED = 8  # rows of at most this many entries are compared entry by entry
_EXACT_ROWS = 8  # a box over more rows than this is bounded by the picture
_PICTURE_CELLS = 1 << 24  # of all tables together: bounds their memory
_ENTRIES_AT_ONCE = 1 << 20

Listed = Callable[[Tensor, Tensor, Tensor], Tensor]  # (line, inside, column): True if the row names the key block


@dataclass(frozen=True, eq=False)
class BlockTable:
    """entries[t, r]: the key blocks that query block r sees in table t, ascending, padded with NOTHING.

    Key blocks have `block` tokens, query blocks `q_block`. Positions from `limit` on are in no pair.
    """

    entries: Tensor  # int64, (T, R, W)
    q_block: int
    block: int
    limit: int

    def mask_mod(self, table_of_head: Tensor, device: torch.device) -> MaskMod:
        """Closure (b, h, q, k) -> bool for heads that follow these tables; block sides must be equal."""
        _, rows, width = self.entries.shape
        # No arithmetic of captured numbers alone: FlexAttention's FLASH backend cannot lower it.
        last_row, block, limit = parameters(device, rows - 1, self.block, self.limit)
        listed = (_compared if width <= _COMPARED else _halved)(self.entries.flatten(0, 1), device)
        first_line = (table_of_head * rows).to(device, index_dtype(device, 0, self.entries.numel()))

        def seen(b, h, q, k):
            row = q // block
            line = first_line[h] + torch.minimum(row, last_row)
            return listed(line, (row <= last_row) & (q < limit), torch.where(k < limit, k // block, -1))

        return seen

    def count(self, table: Tensor, box: Box) -> Bounds:
        """Bounds on the pairs of each box in its table: exact over a few rows of blocks, coarse over more."""
        box = Box(table, *(clip(side, 0, self.limit) for side in (box.q, box.k)))
        rows = torch.where(box.q.count > 0, box.q.last // self.q_block - box.q.first // self.q_block + 1, 0)
        low, high = torch.zeros_like(table), torch.zeros_like(table)
        few, many = ((rows <= _EXACT_ROWS).nonzero().squeeze(1), (rows > _EXACT_ROWS).nonzero().squeeze(1))
        for some in few.split(max(1, _ENTRIES_AT_ONCE // self.entries.shape[2])):
            low[some] = high[some] = self._count_entries(box.select(some), rows[some])
        if len(many):
            bounds = self._count_cells(box.select(many))
            low[many], high[many] = bounds.low, bounds.high
        return Bounds(low, high)

    def squares(self, table: int) -> Squares:
        """Listed pairs of blocks of one table; block sides must be equal."""
        row, place = (self.entries[table] < NOTHING).nonzero().unbind(1)
        return Squares(row * self.block, self.entries[table, row, place] * self.block, self.block)

    def row(self, table: int, query: int, keys: range) -> Ranges:
        """Keys of a run that one query sees; adjacent blocks become one range."""
        row = query // self.q_block
        if query >= self.limit or row >= self.entries.shape[1]:
            return ()
        listed = (block for block in self.entries[table, row].tolist() if block < NOTHING)
        return keys_of_blocks(listed, self.block, within(keys, 0, self.limit))

    def _count_entries(self, box: Box, rows: Tensor) -> Tensor:
        """Exact counts, row by row and entry by entry."""
        pairs = torch.zeros_like(box.area)
        first, height = box.q.first // self.q_block, self.entries.shape[1]
        for row in (first + step for step in range(int(rows.max()) if len(rows) else 0)):
            queries = count_within(box.q, row * self.q_block, (row + 1) * self.q_block)
            seen = self.entries[box.head, row.clamp(max=height - 1)].T * self.block
            pairs += torch.where(row < height, queries * count_within(box.k, seen, seen + self.block).sum(0), 0)
        return pairs

    def _count_cells(self, box: Box) -> Bounds:
        """Bounds from the number of entries in all cells of the picture that a box touches."""
        cell, sums = self._picture
        height, width = cell * self.q_block, cell * self.block
        top, bottom = box.q.first // height, box.q.last // height + 1
        left, right = box.k.first // width, box.k.last // width + 1
        held = (bottom - top) * (right - left) * cell**2
        top, bottom = (row.clamp(max=sums.shape[1] - 1) for row in (top, bottom))
        left, right = (column.clamp(max=sums.shape[2] - 1) for column in (left, right))
        table = box.head
        listed = (sums[table, bottom, right] - sums[table, top, right]).long()
        listed -= sums[table, bottom, left] - sums[table, top, left]
        area, each = box.area, -(-self.q_block // box.q.step) * -(-self.block // box.k.step)
        return Bounds(torch.where(listed == held, area, 0), (listed * each).clamp(min=0).minimum(area))

    @cached_property
    def _picture(self) -> tuple[int, Tensor]:
        """(blocks along a cell's side, number of entries above and to the left of each cell corner)."""
        tables, rows, _ = self.entries.shape
        listed = self.entries < NOTHING
        columns = int(self.entries[listed].max()) + 1 if listed.any() else 1
        cell = -(-max(rows, columns) // isqrt(_PICTURE_CELLS // tables))
        height, width = -(-rows // cell), -(-columns // cell)
        sums = torch.zeros(tables, height + 1, width + 1, dtype=torch.int32)
        row = torch.arange(rows)[:, None] // cell * width
        for table, entries, kept in zip(sums, self.entries, listed, strict=True):
            cells = torch.bincount((row + entries // cell)[kept], minlength=height * width)
            table[1:, 1:] = cells.view(height, width).cumsum(0).cumsum(1)
        return cell, sums


def _compared(entries: Tensor, device: torch.device) -> Listed:
    """Compare each of a few entries. They depend on the query only: a kernel loads them once for all its keys."""
    used = entries[:, : max(1, int((entries < NOTHING).sum(1).max()))]
    places = used.T.to(device, index_dtype(device, 0, NOTHING)).contiguous().unbind(0)

    def listed(line, inside, column):
        found = torch.where(inside, places[0][line], NOTHING) == column
        for place in places[1:]:
            found = found | (torch.where(inside, place[line], NOTHING) == column)
        return found

    return listed


def _halved(entries: Tensor, device: torch.device) -> Listed:
    named = by_halving(entries.shape[1], device)
    entries = entries.to(device, index_dtype(device, 0, entries.numel()))
    return lambda line, inside, column: named(entries, line, column) & inside


def by_halving(width: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Binary search for a column in a line of ascending entries, 2**n of them: (entries, line, column) -> bool.

    `place` is narrowed to the only entry that can equal the column.
    """
    halves = parameters(device, *(1 << bit for bit in reversed(range(width.bit_length() - 1))))

    def named(entries, line, column):
        place = column - column
        for half in halves:
            place = place + torch.where(entries[line, place + half - 1] < column, half, 0)
        return entries[line, place] == column

    return named


class TableRule(Pattern):
    """Allowed iff the row of the query's block names the key's block, in a table for all heads or one for each."""

    @property
    def by_head(self) -> bool:
        """True if each global head has a separate table."""
        raise NotImplementedError

    def table(self, num_heads: int) -> BlockTable:
        """The tables: one for all heads, or one for each."""
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
    """Keys of a run that are in these blocks; adjacent blocks become one range."""
    seen = set(blocks)
    firsts = sorted(number for number in seen if number - 1 not in seen)
    lasts = sorted(number for number in seen if number + 1 not in seen)
    return among((range(a * block, (b + 1) * block) for a, b in zip(firsts, lasts, strict=True)), keys)


def padded(entries: Tensor) -> Tensor:
    """Pad rows of ascending entries with NOTHING to a power of two."""
    width = 1 << max(0, entries.shape[-1] - 1).bit_length()
    return torch.nn.functional.pad(entries, (0, width - entries.shape[-1]), value=NOTHING)
