"""Estimated number of blocks that a rule lists, from a sample of its rows; the planner compares these."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._blocks import evaluate, join_leaves
from ._cover import leaves_everywhere
from ._quadtree import Slots
from ._rule import Places, Rule

_SAMPLED_BLOCKS = 1 << 14  # blocks sampled in addition to the first rows
_FEW_CELLS = 1 << 16  # pairs in all blocks and tables: up to this many are evaluated, faster than bounds
_FIRST_ROWS = 4  # always sampled: global tokens there may see all keys


class ListedBlocks(NamedTuple):
    """Blocks of a table: in rows of adjacent blocks (`runs`), in other rows without and with a partial block."""

    runs: float
    plain: float
    masked: float

    @property
    def blocks(self) -> float:
        return self.runs + self.plain + self.masked


def estimate_blocks(rule: Rule, *, q_block: int, k_block: int) -> ListedBlocks:
    """Mean numbers over tables, from evenly sampled rows and tables. Undecided blocks count: the bias is upwards.

    With few pairs in all, the counts are exact.
    """
    shape = (int(rule.q.lengths.sum()), int(rule.k.lengths.sum()), q_block, k_block)
    rows, columns = -(-shape[0] // q_block), -(-shape[1] // k_block)
    if len(rule.heads) * rows * columns * q_block * k_block <= _FEW_CELLS:
        return _counted(rule, rows, columns, shape)
    tables = _evenly(len(rule.heads), 4)
    first = min(rows, _FIRST_ROWS)
    others = first + _evenly(rows - first, max(8, _SAMPLED_BLOCKS // (columns * len(tables))))
    line, length, run, masked = _rows_of(rule, tables, torch.cat([torch.arange(first), others]), shape)
    each = torch.where(line % rows < first, 1.0, (rows - first) / max(len(others), 1)) * length / len(tables)
    return ListedBlocks(*(float(each[kind].sum()) for kind in (run, ~run & ~masked, ~run & masked)))


def _counted(rule: Rule, rows: int, columns: int, shape: tuple[int, int, int, int]) -> ListedBlocks:
    """Exact counts over all rows and tables, by evaluating every pair."""
    num_q, num_k, q_block, k_block = shape
    everywhere = torch.cartesian_prod(torch.arange(len(rule.heads)), torch.arange(rows), torch.arange(columns))
    places = Places(*everywhere.unbind(1))
    pairs = torch.cat([tiles.sum((1, 2)) for tiles in evaluate(rule, places, shape)])
    height = (num_q - places.row * q_block).clamp(max=q_block)
    width = (num_k - places.column * k_block).clamp(max=k_block)
    lines = len(rule.heads) * rows, columns
    listed, full = (pairs > 0).view(lines), (pairs == height * width).view(lines)
    run = (pad(listed.int(), (1, 0)).diff(dim=1) == 1).sum(1) == 1
    masked = (listed & ~full).any(1)
    each = listed.sum(1) / len(rule.heads)
    return ListedBlocks(*(float(each[kind].sum()) for kind in (run, ~run & ~masked, ~run & masked)))


def _rows_of(rule: Rule, tables: Tensor, sampled: Tensor, shape: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
    """(table * rows + row, number of blocks, True if adjacent, True if any is partial) of each row with blocks."""
    num_q, num_k, q_block, k_block = shape
    rows = -(-num_q // q_block)
    slots = Slots.of_rows(range(rows) if len(sampled) == rows else sampled, q_block)
    # Leaves of one block are summed before the test for a full block.
    found = join_leaves(list(leaves_everywhere(rule, tables.tolist(), slots, q_block, k_block)), shape)
    height = (num_q - found.row * q_block).clamp(max=q_block)
    width = (num_k - found.column * k_block).clamp(max=k_block)
    line, of, length = (found.table * rows + found.row).unique_consecutive(return_inverse=True, return_counts=True)
    partial = torch.zeros(len(line), dtype=torch.int64).index_add_(0, of, (found.low < height * width).long())
    column = found.column
    last = length.cumsum(0) - 1
    return line, length, column[last] - column[last - length + 1] == length - 1, partial > 0


def _evenly(size: int, number: int) -> Tensor:
    """At most `number` indices below `size`: one from each equal interval, at offsets that follow no period."""
    if size <= number:
        return torch.arange(size)
    stretch = torch.arange(number, dtype=torch.float64)
    return ((stretch + (stretch * 0.6180339887).frac()) * size / number).long()
