"""Quadtree search for the blocks of the slot matrix that can hold allowed pairs, by bounds on ever smaller boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._diagonals import settle_by_diagonals
from ._rule import Nodes, Rule, Run, enumerated

_FRONTIER = 1 << 18  # nodes classified per step: bounds the builder's memory
_FEW_BLOCKS = 1 << 12  # nodes with at most this many blocks in total are cut into single blocks: faster than halving


@dataclass(frozen=True)
class Leaves:
    """Parts of blocks with bounds on their allowed pairs; a block of several pairs of runs has a leaf for each."""

    table: Tensor
    row: Tensor
    column: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Slots:
    """Intervals of query slots, first to last - 1 each."""

    first: Tensor
    last: Tensor

    @classmethod
    def of_rows(cls, rows: range | Tensor, q_block: int) -> Slots:
        """One interval for a range of block rows; one for each block row of a tensor."""
        if isinstance(rows, range):
            return cls(torch.tensor([rows.start * q_block]), torch.tensor([rows.stop * q_block]))
        return cls(rows * q_block, (rows + 1) * q_block)

    def of_runs(self, run: Run) -> tuple[Tensor, Run]:
        """(index of the run, part) for each non-empty intersection of a run with an interval."""
        each, stretch = torch.cartesian_prod(torch.arange(len(run.start)), torch.arange(len(self.first))).unbind(1)
        cut = run.select(each).within(self.first[stretch], self.last[stretch])
        held = (cut.count > 0).nonzero().squeeze(1)
        return each[held], cut.select(held)

    def of_nodes(self, nodes: Nodes) -> Nodes:
        """Cut the query runs of nodes to the intervals; drop empty parts."""
        each, q = self.of_runs(nodes.q)
        return Nodes(nodes.table[each], q, nodes.k.select(each))


def descend(rule: Rule, roots: Nodes, q_block: int, k_block: int) -> Iterator[Leaves]:
    """Yield the leaves of these nodes that can hold pairs; a full node is expanded into its blocks without a search."""
    stack = list(_chunks(roots))
    while stack:
        nodes = stack.pop()
        rows, columns = nodes.q.num_blocks(q_block), nodes.k.num_blocks(k_block)
        sizes = rows * columns
        if int(sizes.sum()) <= _FEW_BLOCKS:
            nodes = single_blocks(nodes, q_block, k_block)
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
        yield _expand(nodes.select(full), q_block, k_block)
        inner = nodes.select((occupied & ~certain & ~single).nonzero().squeeze(1))
        if len(inner):
            stack.extend(_chunks(_split(inner, q_block, k_block)))


def _chunks(nodes: Nodes) -> Iterator[Nodes]:
    if len(nodes) <= _FRONTIER:
        yield nodes
        return
    for part in torch.arange(len(nodes)).split(_FRONTIER):
        yield nodes.select(part)


def _expand(nodes: Nodes, q_block: int, k_block: int) -> Leaves:
    """One leaf for each block of nodes whose pairs are all allowed."""
    single = single_blocks(nodes, q_block, k_block)
    area = single.q.count * single.k.count
    return Leaves(single.table, single.q.start // q_block, single.k.start // k_block, area, area)


def single_blocks(nodes: Nodes, q_block: int, k_block: int) -> Nodes:
    """Cut nodes at all block boundaries; drop empty parts."""
    width = nodes.k.num_blocks(k_block)
    sizes = nodes.q.num_blocks(q_block) * width
    node, index = enumerated(sizes)
    width = width[node]
    q = _nth_block(nodes.q.select(node), index // width, q_block)
    single = Nodes(nodes.table[node], q, _nth_block(nodes.k.select(node), index % width, k_block))
    if q.stride is None and single.k.stride is None:
        return single
    return single.select(((q.count > 0) & (single.k.count > 0)).nonzero().squeeze(1))


def _nth_block(run: Run, index: Tensor, block: int) -> Run:
    """Slots of each run in its index-th block; empty where the stride skips that block."""
    first = (run.start // block + index) * block
    return run.within(first, first + block)


def _split(nodes: Nodes, q_block: int, k_block: int) -> Nodes:
    """Halve each side that spans more than one block, at a block boundary."""
    node_q, q = _halves(nodes.q, q_block)
    nodes = Nodes(nodes.table[node_q], q, nodes.k.select(node_q))
    node_k, k = _halves(nodes.k, k_block)
    return Nodes(nodes.table[node_k], nodes.q.select(node_k), k)


def _halves(run: Run, block: int) -> tuple[Tensor, Run]:
    blocks = run.num_blocks(block)
    middle = (run.start // block + (blocks + 1) // 2) * block
    many = (blocks > 1).nonzero().squeeze(1)
    node = torch.cat([torch.arange(len(run.start)), many])
    first, second = run.split(middle)
    return node, join_runs([first, second.select(many)])


def join_nodes(parts: Sequence[Nodes]) -> Nodes:
    if len(parts) == 1:
        return parts[0]
    q, k = (join_runs([getattr(part, side) for part in parts]) for side in ("q", "k"))
    return Nodes(torch.cat([part.table for part in parts]), q, k)


def join_runs(runs: Sequence[Run]) -> Run:
    """Concatenate runs; all or none of them have strides."""
    strides = [run.stride for run in runs if run.stride is not None]
    piece, start, count = (torch.cat([getattr(run, name) for run in runs]) for name in ("piece", "start", "count"))
    return Run(piece, start, count, torch.cat(strides) if strides else None)
