"""The quadtree: which blocks of the slot matrix can hold allowed pairs, from bounds on ever smaller boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._diagonals import settle_by_diagonals
from ._rule import Nodes, Rule, Run

_FRONTIER = 1 << 18  # nodes classified at once: bounds the builder's memory
_FEW_BLOCKS = 1 << 12  # so many are sooner looked at one by one than halved level by level


@dataclass(frozen=True)
class Leaves:
    """Parts of blocks: a block that several pieces share has one leaf for each pair of pieces."""

    table: Tensor
    row: Tensor
    column: Tensor
    low: Tensor
    high: Tensor


def roots(rule: Rule, tables: Tensor) -> Nodes:
    q_piece, k_piece = torch.arange(len(rule.q.starts)), torch.arange(len(rule.k.starts))
    table, q, k = torch.cartesian_prod(tables, q_piece, k_piece).unbind(1)
    return Nodes(
        table,
        Run(q, rule.q.starts[q], rule.q.starts[q] + rule.q.lengths[q]),
        Run(k, rule.k.starts[k], rule.k.starts[k] + rule.k.lengths[k]),
    )


def some_rows(nodes: Nodes, rows: Tensor, q_block: int) -> Nodes:
    """The parts of the nodes that lie in some block rows."""
    node, row = torch.cartesian_prod(torch.arange(len(nodes)), rows).unbind(1)
    return _within(nodes.select(node), row * q_block, (row + 1) * q_block)


def range_roots(rule: Rule, tables: range, rows: range, q_block: int) -> Nodes:
    """The roots of a range of block rows: the parts of the whole roots that lie in it."""
    return within_rows(roots(rule, torch.arange(tables.start, tables.stop)), rows, q_block)


def within_rows(nodes: Nodes, rows: range, q_block: int) -> Nodes:
    """The parts of the nodes that lie in a range of block rows."""
    return _within(nodes, torch.tensor(rows.start * q_block), torch.tensor(rows.stop * q_block))


def _within(nodes: Nodes, first: Tensor, last: Tensor) -> Nodes:
    """What of each node lies in query slots first to last - 1, without those of which nothing does."""
    start, stop = torch.maximum(nodes.q.start, first), torch.minimum(nodes.q.stop, last)
    cut = Nodes(nodes.table, Run(nodes.q.piece, start, stop), nodes.k)
    return cut.select((start < stop).nonzero().squeeze(1))


def descend(rule: Rule, roots: Nodes, q_block: int, k_block: int) -> Iterator[Leaves]:
    """The leaves of these nodes that can hold pairs; a node that is full is not looked into."""
    stack = list(_chunks(roots))
    while stack:
        nodes = stack.pop()
        rows, columns = nodes.q.num_blocks(q_block), nodes.k.num_blocks(k_block)
        sizes = rows * columns
        if int(sizes.sum()) <= _FEW_BLOCKS:
            nodes = _single_blocks(nodes, sizes, columns, q_block, k_block)
            sizes = torch.ones_like(nodes.table)
        box, single = rule.boxes(nodes), sizes == 1
        bounds = rule.pattern.count(box, num_heads=rule.num_heads)
        bounds = settle_by_diagonals(rule.pattern, box, bounds, num_heads=rule.num_heads, where=single)
        occupied, certain = bounds.high > 0, bounds.low == box.area
        leaf = (single & occupied).nonzero().squeeze(1)
        yield Leaves(
            nodes.table[leaf],
            nodes.q.start[leaf] // q_block,
            nodes.k.start[leaf] // k_block,
            bounds.low[leaf],
            bounds.high[leaf],
        )
        if bool(single.all()):
            continue
        full = (certain & ~single).nonzero().squeeze(1)
        yield _expand(nodes.select(full), sizes[full], columns[full], q_block, k_block)
        inner = nodes.select((occupied & ~certain & ~single).nonzero().squeeze(1))
        if len(inner):
            stack.extend(_chunks(_split(inner, q_block, k_block)))


def _chunks(nodes: Nodes) -> Iterator[Nodes]:
    if len(nodes) <= _FRONTIER:
        yield nodes
        return
    for part in torch.arange(len(nodes)).split(_FRONTIER):
        yield nodes.select(part)


def _expand(nodes: Nodes, sizes: Tensor, columns: Tensor, q_block: int, k_block: int) -> Leaves:
    """All blocks of nodes that are full."""
    single = _single_blocks(nodes, sizes, columns, q_block, k_block)
    area = (single.q.stop - single.q.start) * (single.k.stop - single.k.start)
    return Leaves(single.table, single.q.start // q_block, single.k.start // k_block, area, area)


def _single_blocks(nodes: Nodes, sizes: Tensor, columns: Tensor, q_block: int, k_block: int) -> Nodes:
    """The parts of the nodes that lie in one block each; `sizes` and `columns` say in how many the nodes do."""
    node = torch.repeat_interleave(sizes)
    index, width = torch.arange(len(node)) - (sizes.cumsum(0) - sizes)[node], columns[node]
    q = _nth_block(nodes.q.select(node), index // width, q_block)
    return Nodes(nodes.table[node], q, _nth_block(nodes.k.select(node), index % width, k_block))


def _nth_block(run: Run, index: Tensor, block: int) -> Run:
    """What of each run lies in the block of this number, counted from its first."""
    first = (run.start // block + index) * block
    return Run(run.piece, torch.maximum(run.start, first), torch.minimum(run.stop, first + block))


def _split(nodes: Nodes, q_block: int, k_block: int) -> Nodes:
    """Halve each side that spans more than one block, at a block boundary."""
    node_q, q = _halves(nodes.q, q_block)
    nodes = Nodes(nodes.table[node_q], q, nodes.k.select(node_q))
    node_k, k = _halves(nodes.k, k_block)
    return Nodes(nodes.table[node_k], nodes.q.select(node_k), k)


def _halves(run: Run, block: int) -> tuple[Tensor, Run]:
    middle = (run.start // block + (run.num_blocks(block) + 1) // 2) * block
    many = (run.num_blocks(block) > 1).nonzero().squeeze(1)
    node = torch.cat([torch.arange(len(run.start)), many])
    start = torch.cat([run.start, middle[many]])
    stop = torch.cat([torch.minimum(middle, run.stop), run.stop[many]])
    return node, Run(run.piece[node], start, stop)
