"""Search for the blocks of the slot matrix that can hold allowed pairs, by bounds on ever smaller boxes.

The slot matrix has a row for each query slot and a column for each key slot. The search starts from squares of pairs
that a pattern lists, or else from pairs of a query run and a key run. If there are many, as in residue-major order,
pairs of runs are ruled out first: by the rule's spacing (query and key of an allowed pair are congruent modulo it), and
by bounds on each run against all keys or all queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import Box, Or, Pattern, Progression
from ..orders import Pieces
from ._pair_search import settle_by_diagonals
from ._rule import Nodes, Rule, SlotRun, owners_and_places, positions_of_runs

_FRONTIER = 1 << 18  # most nodes whose bounds are computed at once: limits the memory
_FEW_BLOCKS = 1 << 12  # nodes with at most this many blocks in total are cut into single blocks: faster than halving
_MOST_ALTERNATIVES = 16
_MOST_LEAVES = 1 << 20
_FEW_RUN_PAIRS = 1 << 12  # pairs of runs: up to this many, computing bounds is faster than ruling some out
_MOST_ROOTS = 1 << 16  # pairs of residue classes: with more, runs are first ruled out by bounds
_NODES_AT_ONCE = 1 << 20

Sides = tuple[int, int]  # (query side, key side) of a block


class Leaves(NamedTuple):
    """Parts of blocks, with bounds low <= allowed pairs <= high for each part; int64 tensors of equal length.

    table: index of the table; heads with equal rules share one.
    row, column: indices of the query block and of the key block that contain the part.

    A block can have several parts. They share no pair of slots, and no pair of the block outside them is allowed.
    """

    table: Tensor
    row: Tensor
    column: Tensor
    low: Tensor
    high: Tensor


class SlotIntervals(NamedTuple):
    """Intervals of slots; interval i is first[i] to stop[i] - 1."""

    first: Tensor
    stop: Tensor

    @classmethod
    def of_blocks(cls, blocks: range | Tensor, side: int) -> SlotIntervals:
        """Return one interval for a range of consecutive blocks, or one for each block of a tensor.

        blocks: indices of blocks.
        side: slots of a block.
        """
        if isinstance(blocks, range):
            return cls(torch.tensor([blocks.start * side]), torch.tensor([blocks.stop * side]))
        return cls(blocks * side, (blocks + 1) * side)


def find_leaves(rule: Rule, tables: Sequence[int], rows: range, sides: Sides) -> Iterator[Leaves]:
    """Yield the blocks, or parts of blocks, that may have allowed pairs, with bounds on their number of allowed pairs.

    tables: indices of the tables to search.
    rows: query blocks to search.
    sides: (queries, keys) of a block.

    If slots are in the order of positions and the pattern lists squares that contain all its pairs, the search
    subdivides only these squares, not all keys. In a union, alternatives that list squares are searched in this way,
    and the union of the other alternatives over all keys. The bounds of the whole rule are then computed on the blocks
    found. If these are too many, the whole rule is searched over all keys instead.
    """
    slots = SlotIntervals.of_blocks(rows, sides[0])
    parts = _alternatives(rule.pattern) if _in_position_order(rule) else []
    covered = {part: nodes for part in parts if (nodes := _square_nodes(rule, part, tables, slots)) is not None}
    whole = leaves_everywhere(rule, tables, slots, sides)
    found = [descend(replace(rule, pattern=part), nodes, sides) for part, nodes in covered.items()]
    if covered and (rest := [part for part in parts if part not in covered]):
        found.append(descend(replace(rule, pattern=Or.of(*rest)), _roots(rule, tables, slots), sides))
    yield from _leaves_of_union(rule, found or [whole], whole, sides)


def leaves_everywhere(rule: Rule, tables: Sequence[int], slots: SlotIntervals, sides: Sides) -> Iterator[Leaves]:
    """Yield the blocks, or parts of blocks, that may have allowed pairs, with bounds on their number of allowed pairs.

    tables: indices of the tables to search.
    slots: query slots to search.
    sides: (queries, keys) of a block.

    Unlike `find_leaves`, this searches all keys. If the rule has rows, and over 2**16 pairs of residue classes are left
    in the tables, the alternatives of a union are searched one by one, as each may rule out other classes.
    """
    if rule.rows is None or sum(each.number for each in _run_pairs(rule, tables, slots)) <= _MOST_ROOTS:
        yield from descend(rule, _roots(rule, tables, slots), sides)
        return
    found = [_descend_part(rule, part, tables, slots, sides) for part in _alternatives(rule.pattern)]
    yield from _leaves_of_union(rule, found, _descend_part(rule, rule.pattern, tables, slots, sides), sides)


def _leaves_of_union(
    rule: Rule, found: list[Iterator[Leaves]], whole: Iterator[Leaves], sides: Sides
) -> Iterator[Leaves]:
    """Yield the leaves (parts of blocks, with bounds) of a rule whose pattern is a union of alternatives.

    found: the leaves of each alternative. The bounds of the whole rule are computed on the blocks of these leaves, but
        the leaves of a single alternative are yielded unchanged.
    whole: the leaves of the whole rule, yielded instead if the alternatives have too many blocks.
    """
    if len(found) == 1:
        yield from found[0]
        return
    shape = rule.in_blocks(*sides)
    blocks = _distinct_blocks_if_few(chain.from_iterable(found), *shape)
    yield from whole if blocks is None else _descend_blocks(rule, blocks, shape, sides)


def _alternatives(pattern: Pattern) -> list[Pattern]:
    """Return patterns whose union is this pattern, with `&` distributed over `|`; [pattern] if there are over 16."""
    found = list(islice(_split_union(pattern), _MOST_ALTERNATIVES + 1))
    return found if len(found) <= _MOST_ALTERNATIVES else [pattern]


def _split_union(pattern: Pattern) -> Iterator[Pattern]:
    parts = pattern.alternatives()
    if len(parts) == 1:
        yield pattern
    else:
        yield from chain.from_iterable(map(_split_union, parts))


def _in_position_order(rule: Rule) -> bool:
    """Return True if the queries are one slot run of consecutive positions, and the keys are one, too."""
    return all(len(side.starts) == 1 and side.step == 1 for side in (rule.q, rule.k))


def _square_nodes(rule: Rule, pattern: Pattern, tables: Sequence[int], slots: SlotIntervals) -> Nodes | None:
    """Return one node (query run, key run) for each square of pairs that `pattern` lists for each table.

    None if it does not list squares for one of the tables, see `Pattern.squares`. Query runs are cut to `slots`, one
    interval, and nodes without pairs are dropped. The rule must be `_in_position_order`.
    """
    found = []
    for table in tables:
        squares = pattern.squares(rule.heads[table], rule.num_heads)
        if squares is None:
            return None
        q = _slots_of_positions(rule.q, table, squares.q_first, squares.side).within(slots.first, slots.stop)
        k = _slots_of_positions(rule.k, table, squares.k_first, squares.side)
        nodes = Nodes(torch.full_like(q.piece, table), q, k)
        found.append(nodes.select(((q.count > 0) & (k.count > 0)).nonzero().squeeze(1)))
    return join_nodes(found)


def _slots_of_positions(pieces: Pieces, table: int, first: Tensor, length: int) -> SlotRun:
    """Return as run i the existing slots of positions first[i] to first[i] + length - 1; run i may be empty.

    pieces: the slots of queries or of keys, one slot run of consecutive positions.
    table: index of the table.
    """
    begin, last = first - pieces.firsts[table, 0], int(pieces.lengths[0])
    start = begin.clamp(0, last)
    return SlotRun(torch.zeros_like(begin), start, (begin + length).clamp(0, last) - start)


def _distinct_blocks_if_few(found: Iterable[Leaves], rows: int, columns: int) -> Tensor | None:
    """Return the distinct blocks of the leaves as ascending numbers (table * rows + row) * columns + column.

    None if there are over 2**21, and possibly if there are over 2**20.

    rows, columns: number of query blocks and number of key blocks.
    """
    key, new, number = torch.zeros(0, dtype=torch.int64), [], 0
    for leaves in found:
        new.append((leaves.table * rows + leaves.row) * columns + leaves.column)
        number += len(leaves.row)
        if number > _MOST_LEAVES:  # a block counts once, however many leaves it has
            key, new, number = torch.cat([key, *new]).unique(), [], 0
            if len(key) > _MOST_LEAVES:
                return None
    return torch.cat([key, *new]).unique()


class _RunPairs(NamedTuple):
    """Pairs of runs of one table: query run i is paired with the key runs order[begin[i] : begin[i] + partners[i]].

    order: indices into the runs of `k`.
    """

    table: int
    q: SlotRun
    k: SlotRun
    order: Tensor
    begin: Tensor
    partners: Tensor

    @classmethod
    def of(cls, rule: Rule, table: int, q: SlotRun, k: SlotRun) -> _RunPairs:
        """Return the pairs of a query run and a key run that the rule's spacing does not rule out.

        In such a pair, queries and keys are congruent modulo the gcd of rule.q.step, rule.k.step and the spacing.
        """
        own = rule.pattern.for_head(rule.heads[table], rule.num_heads)
        classes = gcd(rule.q.step, rule.k.step, own.spacing())
        q_class, k_class = (side.firsts[table, run.piece] % classes for side, run in ((rule.q, q), (rule.k, k)))
        k_class, order = k_class.sort(stable=True)
        begin = torch.searchsorted(k_class, q_class)
        return cls(table, q, k, order, begin, torch.searchsorted(k_class, q_class, right=True) - begin)

    @property
    def number(self) -> int:
        return int(self.partners.sum())

    def nodes(self) -> Nodes:
        q, nth = owners_and_places(self.partners)
        k = self.order[self.begin[q] + nth]
        return Nodes(torch.full_like(q, self.table), self.q.select(q), self.k.select(k))


def _run_pairs(rule: Rule, tables: Sequence[int], slots: SlotIntervals) -> list[_RunPairs]:
    _, q = _runs_in(rule.q, slots)
    return [_RunPairs.of(rule, table, q, SlotRun.of(rule.k)) for table in tables]


def _roots(rule: Rule, tables: Sequence[int], slots: SlotIntervals) -> Nodes:
    """Return the nodes (query run, key run) with which a search begins, with query runs cut to `slots`.

    For each table, all combinations of runs are returned if they are at most 2**12, else only those that the rule's
    spacing does not rule out.
    """
    _, q = _runs_in(rule.q, slots)
    k = SlotRun.of(rule.k)
    if len(q.start) * len(k.start) > _FEW_RUN_PAIRS:
        return join_nodes([_RunPairs.of(rule, table, q, k).nodes() for table in tables])
    indices = [torch.tensor(tables), torch.arange(len(q.start)), torch.arange(len(k.start))]
    table, mine, other = torch.cartesian_prod(*indices).unbind(1)
    return Nodes(table, q.select(mine), k.select(other))


def _descend_part(
    rule: Rule, part: Pattern, tables: Sequence[int], slots: SlotIntervals, sides: Sides
) -> Iterator[Leaves]:
    """Yield the leaves (parts of blocks, with bounds) of `part`, the rule's pattern or one of its `_alternatives`.

    The search starts from runs of residue classes or, as in `rule.rows`, of neighbouring tokens, whichever gives fewer
    pairs of runs. The rule must have `rows`.
    """
    assert rule.rows is not None
    ways = []
    for each in (replace(rule, pattern=part, rows=None), replace(rule.rows, pattern=part)):
        _, q = _runs_in(each.q, slots)
        k = SlotRun.of(each.k)
        runs = (
            (table, _runs_not_ruled_out(each, table, q, of_queries=True), _runs_not_ruled_out(each, table, k))
            for table in tables
        )
        found = [_RunPairs.of(each, *run) for run in runs]
        ways.append((sum(pairs.number for pairs in found), each, found))
    _, best, found = min(ways, key=lambda way: way[0])
    yield from descend(best, join_nodes([pairs.nodes() for pairs in found]), sides)


def _descend_blocks(rule: Rule, key: Tensor, shape: tuple[int, int], sides: Sides) -> Iterator[Leaves]:
    """Yield the leaves (parts, with bounds) of some blocks.

    key: numbers of the blocks, as in `_distinct_blocks_if_few`.
    shape: (number of query blocks, number of key blocks).
    """
    rows, columns = shape
    rule = _rule_of_fewer_runs(rule, sides)
    (q, q_begin, q_number), (k, k_begin, k_number) = map(_cut_at_blocks, (rule.q, rule.k), shape, sides)
    nodes = q_number[key // columns % rows] * k_number[key % columns]
    for some in torch.arange(len(key)).split(max(1, _NODES_AT_ONCE // int(nodes.max()) if len(key) else 1)):
        block, index = owners_and_places(nodes[some])
        number = key[some][block]
        row, column = number // columns % rows, number % columns
        width = k_number[column]
        runs = q.select(q_begin[row] + index // width), k.select(k_begin[column] + index % width)
        yield from descend(rule, Nodes(number // (rows * columns), *runs), sides)


def _cut_at_blocks(pieces: Pieces, blocks: int, block: int) -> tuple[SlotRun, Tensor, Tensor]:
    """Return (parts, begin, number): slot runs cut at the boundaries of blocks, and where each block's parts are.

    Block i contains the number[i] parts from index begin[i] on.

    blocks: number of blocks.
    block: slots per block.
    """
    stretch, run = _runs_in(pieces, SlotIntervals.of_blocks(torch.arange(blocks), block))
    order = stretch.argsort(stable=True)
    number = torch.bincount(stretch, minlength=blocks)
    return run.select(order), number.cumsum(0) - number, number


def _runs_in(pieces: Pieces, slots: SlotIntervals) -> tuple[Tensor, SlotRun]:
    """Return (intervals, runs): the non-empty intersections of slot runs with the intervals of `slots`.

    Run i of `runs` is inside the interval with index intervals[i].
    """
    first, stop = slots
    if pieces.strides is None:  # consecutive runs: an interval touches only a few
        begin = torch.searchsorted(pieces.starts, first, right=True) - 1
        stretch, nth = owners_and_places(torch.searchsorted(pieces.starts, stop) - begin)
        piece = begin[stretch] + nth
    else:
        stretch, piece = torch.cartesian_prod(torch.arange(len(first)), torch.arange(len(pieces.starts))).unbind(1)
    run = SlotRun.of(pieces).select(piece).within(first[stretch], stop[stretch])
    held = (run.count > 0).nonzero().squeeze(1)
    return stretch[held], run.select(held)


def _runs_not_ruled_out(rule: Rule, table: int, own: SlotRun, *, of_queries: bool = False) -> SlotRun:
    """Return the runs in `own` that may have an allowed pair with a slot of the other side, by a bound for each run.

    own: key runs, with the queries as the other side; if `of_queries`, query runs, with the keys as the other side.
    table: index of the table.
    """
    mine, other = (rule.q, rule.k) if of_queries else (rule.k, rule.q)
    number = torch.full_like(own.piece, table)
    first = other.firsts[table]
    length = (first + other.step * (other.lengths - 1)).max() + 1 - first.min()
    hull = Progression(first.min().expand(len(number)), 1, length.expand(len(number)))
    runs = positions_of_runs(mine, number, own)
    box = Box(torch.tensor(rule.heads)[number], *((runs, hull) if of_queries else (hull, runs)))
    return own.select((rule.pattern.count(box, num_heads=rule.num_heads).high > 0).nonzero().squeeze(1))


def _rule_of_fewer_runs(rule: Rule, sides: Sides) -> Rule:
    """Return `rule`, or `rule.rows` with its pattern if that is estimated to have fewer pairs of runs in a block.

    The result has no `rows`. A rule without `rows` is returned unchanged.
    """
    if rule.rows is None:
        return rule
    classes, rows = (prod(map(_most_runs_in_block, (each.q, each.k), sides)) for each in (rule, rule.rows))
    return replace(rule.rows, pattern=rule.pattern) if rows < classes else replace(rule, rows=None)


def _most_runs_in_block(pieces: Pieces, block: int) -> int:
    if pieces.strides is None:
        return block // max(1, int(pieces.lengths.min())) + 1
    return min(int(pieces.strides.max()), block)


def descend(rule: Rule, roots: Nodes, sides: Sides) -> Iterator[Leaves]:
    """Yield leaves, each inside one block, by subdividing `roots`, which are pairs of a query run and a key run.

    Parts that by their bounds have no allowed pair are dropped. Parts that by their bounds have only allowed pairs are
    cut into blocks without further bounds.
    """
    stack = _chunks(roots)
    while stack:
        nodes = stack.pop()
        sizes = nodes.q.num_blocks(sides[0]) * nodes.k.num_blocks(sides[1])
        if int(sizes.sum()) <= _FEW_BLOCKS:
            nodes = _single_blocks(nodes, sides)
            sizes = torch.ones_like(nodes.table)
        box, single = rule.boxes(nodes), sizes == 1
        bounds = rule.pattern.count(box, num_heads=rule.num_heads)
        bounds = settle_by_diagonals(rule.pattern, box, bounds, num_heads=rule.num_heads, where=single)
        occupied, certain = bounds.high > 0, bounds.low == box.area
        leaf = (single & occupied).nonzero().squeeze(1)
        row, column = nodes.q.start[leaf] // sides[0], nodes.k.start[leaf] // sides[1]
        yield Leaves(nodes.table[leaf], row, column, bounds.low[leaf], bounds.high[leaf])
        if bool(single.all()):
            continue
        full = _single_blocks(nodes.select((certain & ~single).nonzero().squeeze(1)), sides)
        area = full.q.count * full.k.count
        yield Leaves(full.table, full.q.start // sides[0], full.k.start // sides[1], area, area)
        inner = nodes.select((occupied & ~certain & ~single).nonzero().squeeze(1))
        if len(inner):
            stack += _chunks(_quarters(inner, sides))


def _chunks(nodes: Nodes) -> list[Nodes]:
    parts = torch.arange(len(nodes)).split(_FRONTIER)
    return [nodes] if len(parts) == 1 else [nodes.select(part) for part in parts]


def _single_blocks(nodes: Nodes, sides: Sides) -> Nodes:
    """Return the non-empty parts of pairs of runs, cut at all boundaries of query blocks and of key blocks."""
    width = nodes.k.num_blocks(sides[1])
    node, index = owners_and_places(nodes.q.num_blocks(sides[0]) * width)
    width = width[node]
    q = _nth_block(nodes.q.select(node), index // width, sides[0])
    single = Nodes(nodes.table[node], q, _nth_block(nodes.k.select(node), index % width, sides[1]))
    if q.stride is None and single.k.stride is None:
        return single
    return single.select(((q.count > 0) & (single.k.count > 0)).nonzero().squeeze(1))


def _nth_block(run: SlotRun, index: Tensor, block: int) -> SlotRun:
    """Return the slots of each run i in the block that is index[i] blocks after the block of the run's first slot.

    block: slots per block.

    The result is empty for a run whose stride skips the block.
    """
    first = (run.start // block + index) * block
    return run.within(first, first + block)


def _quarters(nodes: Nodes, sides: Sides) -> Nodes:
    """Return up to four parts of each pair of runs: a run over several blocks is halved at a block boundary."""
    node_q, q = _halves(nodes.q, sides[0])
    nodes = Nodes(nodes.table[node_q], q, nodes.k.select(node_q))
    node_k, k = _halves(nodes.k, sides[1])
    return Nodes(nodes.table[node_k], nodes.q.select(node_k), k)


def _halves(run: SlotRun, block: int) -> tuple[Tensor, SlotRun]:
    blocks = run.num_blocks(block)
    middle = (run.start // block + (blocks + 1) // 2) * block
    many = (blocks > 1).nonzero().squeeze(1)
    first, second = run.split(middle)
    return torch.cat([torch.arange(len(run.start)), many]), join_runs([first, second.select(many)])


def join_nodes(parts: Sequence[Nodes]) -> Nodes:
    if len(parts) == 1:
        return parts[0]
    q, k = (join_runs([getattr(part, side) for part in parts]) for side in ("q", "k"))
    return Nodes(torch.cat([part.table for part in parts]), q, k)


def join_runs(runs: Sequence[SlotRun]) -> SlotRun:
    """Return several batches of runs as one; either each batch must have strides, or none."""
    strides = [run.stride for run in runs if run.stride is not None]
    piece, start, count = (torch.cat([getattr(run, name) for run in runs]) for name in ("piece", "start", "count"))
    return SlotRun(piece, start, count, torch.cat(strides) if strides else None)
