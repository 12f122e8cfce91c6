"""The blocks that a table names for a call, without those in which the rest of the rule has no pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...masks.core import Box, Pattern, Progression
from ...masks.patterns import require_row, require_tables
from .._call_key import CallKey

# T tables, R rows of query blocks, W entries of a row, n of all entries


@dataclass(frozen=True, eq=False)
class Listed:
    """Entry w of row r of table t names key block column[t, r, w] of the call's, or -1; `full`: all its pairs count.

    Row 0 is about the block of the call's first query, column 0 about that of its first key.
    """

    key: CallKey
    rule: Pattern
    block: tuple[int, int]
    column: Int64[Tensor, "T R W"]
    full: Bool[Tensor, "T R W"]

    @classmethod
    def of(
        cls, key: CallKey, rule: Pattern, rows: Int64[Tensor, "T R W"], block: tuple[int, int], first: int
    ) -> Listed:
        """rows: ascending, from query block `first` on."""
        q_block, k_block = block
        require_tables(len(rows), key.num_heads_global)
        require_row(q_block, first, rows.shape[1], key.q_offset)
        skipped = key.q_offset // q_block - first
        rows = _of_heads(key, rule, rows)[:, skipped:]
        shape, row = rows.shape, (key.q_offset // q_block + torch.arange(rows.shape[1]))[None, :, None]
        head = torch.arange(shape[0])[:, None, None] * (key.num_heads // shape[0]) + key.head_offset
        q = _within(row * q_block, q_block, key.q_offset, key.num_queries)
        k = _within(rows * k_block, k_block, key.k_offset, key.num_keys)
        head, *sides = (x.expand(shape).reshape(-1).contiguous() for x in (head, *q, *k))
        box = Box(head, Progression(sides[0], 1, sides[1]), Progression(sides[2], 1, sides[3]))
        bounds = rule.count(box, num_heads=key.num_heads_global)
        there = ((bounds.high > 0) & (box.area > 0)).view(shape)
        column = torch.where(there, rows - key.k_offset // k_block, -1)
        return cls(key, rule, block, column, (bounds.low == box.area).view(shape) & there)

    @property
    def num_tables(self) -> int:
        return len(self.column)


def _within(begin: Tensor, length: int, first: int, number: int) -> tuple[Tensor, Tensor]:
    """(first, how many) of the positions from `begin` on that lie among `number` from `first` on."""
    start, stop = begin.clamp(min=first), (begin + length).clamp(max=first + number)
    return start, (stop - start).clamp(min=0)


def _of_heads(key: CallKey, rule: Pattern, rows: Int64[Tensor, "T R W"]) -> Int64[Tensor, "t R W"]:
    """The tables of this device's heads: as they are where each serves as many heads whose rule is one, or by head."""
    heads = range(key.head_offset, key.head_offset + key.num_heads)
    tables = [head * len(rows) // key.num_heads_global for head in heads]
    used = range(tables[0], tables[-1] + 1)
    each = key.num_heads // len(used)
    even = all(tables.count(table) == each for table in used)
    if even and (each == 1 or len({rule.for_head(head, key.num_heads_global) for head in heads}) == 1):
        return rows[used.start : used.stop]
    return rows[tables]
