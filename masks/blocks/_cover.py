"""Roots of the search for blocks: squares that a pattern lists, else pairs of runs of slots.

Positions of a run are a progression, and bounds are computed for pairs of runs. In residue-major order there may be as
many runs as tokens. Most pairs of runs are ruled out by the rule's spacing, modulo which query and key of a pair agree,
and by bounds on each run against the whole other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import gcd

import torch
from torch import Tensor

from ..core import Box, Or, Pattern, Progression, Squares
from ..orders import Pieces
from ._quadtree import Leaves, Slots, descend, join_nodes
from ._rule import Nodes, Rule, Run, enumerated, span

_MOST_ALTERNATIVES = 16
_MOST_LEAVES = 1 << 20
_ALL_PAIRS = 1 << 12  # pairs of runs: up to this many, computing bounds is faster than ruling some out
_FEW_PAIRS = 1 << 16  # pairs of residue classes: up to this many are searched directly
_NODES_AT_ONCE = 1 << 20


def find_leaves(rule: Rule, tables: Sequence[int], slots: Slots, q_block: int, k_block: int) -> Iterator[Leaves]:
    """Yield the leaves of some tables and query slots.

    If pairs are scattered, a descent from the root classifies many boxes. Where the pattern lists squares that hold
    its pairs, the descent starts from these. The parts of a union with squares and the parts without are searched
    separately; the whole rule is then counted on the blocks found, unless these are too many.
    """
    parts = _alternatives(rule.pattern) if _in_order(rule) else []
    covered = {part: squares for part in parts if (squares := _covering(rule, part, tables)) is not None}
    whole = leaves_everywhere(rule, tables, slots, q_block, k_block)
    found = [
        descend(replace(rule, pattern=part), slots.of_nodes(nodes), q_block, k_block) for part, nodes in covered.items()
    ]
    if covered and (rest := [part for part in parts if part not in covered]):
        found.append(descend(replace(rule, pattern=Or.of(*rest)), roots(rule, tables, slots), q_block, k_block))
    yield from _together(rule, found or [whole], whole, q_block, k_block)


def leaves_everywhere(rule: Rule, tables: Sequence[int], slots: Slots, q_block: int, k_block: int) -> Iterator[Leaves]:
    """Search the blocks of some tables and query slots; yield those that have allowed pairs, as the descent finds them.

    A union with very many pairs of residue classes is searched part by part, as each part rules out other pairs.
    """
    if not has_many_pairs(rule, tables, slots):
        yield from descend(rule, roots(rule, tables, slots), q_block, k_block)
        return
    found = [descend_classes(rule, part, tables, slots, q_block, k_block) for part in _alternatives(rule.pattern)]
    whole = descend_classes(rule, rule.pattern, tables, slots, q_block, k_block)
    yield from _together(rule, found, whole, q_block, k_block)


def _together(
    rule: Rule, found: list[Iterator[Leaves]], whole: Iterator[Leaves], q_block: int, k_block: int
) -> Iterator[Leaves]:
    """Leaves of the rule on the blocks that its parts find; leaves of `whole` if these blocks are too many."""
    if len(found) == 1:
        yield from found[0]
        return
    rows, columns = (-(-int(side.lengths.sum()) // block) for side, block in ((rule.q, q_block), (rule.k, k_block)))
    blocks = _if_few(chain.from_iterable(found), rows, columns)
    yield from whole if blocks is None else descend_blocks(rule, blocks, (rows, columns), q_block, k_block)


def _alternatives(pattern: Pattern) -> list[Pattern]:
    """Patterns whose union is this pattern, with `&` distributed over `|`; [pattern] if they would be too many."""
    found = list(islice(_split(pattern), _MOST_ALTERNATIVES + 1))
    return found if len(found) <= _MOST_ALTERNATIVES else [pattern]


def _split(pattern: Pattern) -> Iterator[Pattern]:
    parts = pattern.alternatives()
    if len(parts) == 1:
        yield pattern
    else:
        yield from chain.from_iterable(map(_split, parts))


def _in_order(rule: Rule) -> bool:
    """True if each side is one run of consecutive positions."""
    return all(len(side.starts) == 1 and side.step == 1 for side in (rule.q, rule.k))


def _covering(rule: Rule, pattern: Pattern, tables: Sequence[int]) -> Nodes | None:
    """Nodes of listed squares that hold each pair of the pattern once; None if a table has no list of squares."""
    listed = [pattern.squares(rule.heads[table], rule.num_heads) for table in tables]
    known = [squares for squares in listed if squares is not None]
    if len(known) < len(tables):
        return None
    return join_nodes([_nodes(rule, table, squares) for table, squares in zip(tables, known, strict=True)])


def _nodes(rule: Rule, table: int, squares: Squares) -> Nodes:
    q = _run(rule.q, table, squares.q_first, squares.side)
    k = _run(rule.k, table, squares.k_first, squares.side)
    nodes = Nodes(torch.full_like(q.piece, table), q, k)
    return nodes.select(((q.count > 0) & (k.count > 0)).nonzero().squeeze(1))


def _run(pieces: Pieces, table: int, first: Tensor, length: int) -> Run:
    """Slots of positions first to first + length - 1, clipped to existing slots."""
    begin, last = first - pieces.firsts[table, 0], int(pieces.lengths[0])
    start = begin.clamp(0, last)
    return Run(torch.zeros_like(begin), start, (begin + length).clamp(0, last) - start)


def _if_few(found: Iterable[Leaves], rows: int, columns: int) -> Tensor | None:
    """Flat (table, row, column) indices of the blocks of these leaves; None if more than `_MOST_LEAVES`."""
    key, new, number = torch.zeros(0, dtype=torch.int64), [], 0
    for leaves in found:
        new.append((leaves.table * rows + leaves.row) * columns + leaves.column)
        number += len(leaves.row)
        if number > _MOST_LEAVES:  # a block counts once, however many leaves it has
            key, new, number = torch.cat([key, *new]).unique(), [], 0
            if len(key) > _MOST_LEAVES:
                return None
    return torch.cat([key, *new]).unique()


@dataclass(frozen=True)
class Meeting:
    """Pairs of runs of one table: query run i with the key runs order[begin[i] : begin[i] + partners[i]]."""

    table: int
    q: Run
    k: Run
    order: Tensor
    begin: Tensor
    partners: Tensor

    @classmethod
    def of(cls, rule: Rule, pattern: Pattern, table: int, q: Run, k: Run) -> Meeting:
        """All pairs of runs that the rule's spacing does not rule out."""
        own = pattern.for_head(rule.heads[table], rule.num_heads)
        classes = gcd(rule.q.step, rule.k.step, own.spacing())
        q_class, k_class = (side.firsts[table, run.piece] % classes for side, run in ((rule.q, q), (rule.k, k)))
        k_class, order = k_class.sort(stable=True)
        begin = torch.searchsorted(k_class, q_class)
        return cls(table, q, k, order, begin, torch.searchsorted(k_class, q_class, right=True) - begin)

    @property
    def number(self) -> int:
        return int(self.partners.sum())

    def nodes(self) -> Nodes:
        q, nth = enumerated(self.partners)
        k = self.order[self.begin[q] + nth]
        return Nodes(torch.full_like(q, self.table), self.q.select(q), self.k.select(k))


def roots(rule: Rule, tables: Sequence[int], slots: Slots) -> Nodes:
    """Nodes for the pairs of runs, within these query slots, that may hold allowed pairs."""
    _, q = runs_in(rule.q, slots)
    k = Run.of(rule.k)
    if len(q.start) * len(k.start) <= _ALL_PAIRS:
        indices = [torch.tensor(tables), torch.arange(len(q.start)), torch.arange(len(k.start))]
        table, mine, other = torch.cartesian_prod(*indices).unbind(1)
        return Nodes(table, q.select(mine), k.select(other))
    return join_nodes([Meeting.of(rule, rule.pattern, table, q, k).nodes() for table in tables])


def has_many_pairs(rule: Rule, tables: Sequence[int], slots: Slots) -> bool:
    """True if the rule has `rows` and more than `_FEW_PAIRS` pairs of runs remain after the spacing test."""
    if rule.rows is None:
        return False
    _, q = runs_in(rule.q, slots)
    return sum(Meeting.of(rule, rule.pattern, table, q, Run.of(rule.k)).number for table in tables) > _FEW_PAIRS


def descend_classes(
    rule: Rule, part: Pattern, tables: Sequence[int], slots: Slots, q_block: int, k_block: int
) -> Iterator[Leaves]:
    """Leaves of a part of the rule, over residue classes or over rows: the choice with fewer pairs of runs."""
    assert rule.rows is not None
    ways = []
    for each in (replace(rule, pattern=part, rows=None), replace(rule.rows, pattern=part)):
        _, q = runs_in(each.q, slots)
        found = []
        for table in tables:
            sides = (_that_see(each, table, q, Run.of(each.k), by_query=by_query) for by_query in (True, False))
            found.append(Meeting.of(each, part, table, *sides))
        ways.append((sum(meeting.number for meeting in found), each, found))
    _, best, found = min(ways, key=lambda way: way[0])
    yield from descend(best, join_nodes([meeting.nodes() for meeting in found]), q_block, k_block)


def descend_blocks(rule: Rule, key: Tensor, shape: tuple[int, int], q_block: int, k_block: int) -> Iterator[Leaves]:
    """Leaves of the blocks with these flat (table, row, column) indices."""
    rows, columns = shape
    rule = _shorter(rule, q_block, k_block)
    q, k = (_in_blocks(*side) for side in ((rule.q, rows, q_block), (rule.k, columns, k_block)))
    nodes = q.number[key // columns % rows] * k.number[key % columns]
    for some in torch.arange(len(key)).split(max(1, _NODES_AT_ONCE // int(nodes.max()) if len(key) else 1)):
        block, index = enumerated(nodes[some])
        number = key[some][block]
        row, column = number // columns % rows, number % columns
        width = k.number[column]
        sides = q.run.select(q.begin[row] + index // width), k.run.select(k.begin[column] + index % width)
        yield from descend(rule, Nodes(number // (rows * columns), *sides), q_block, k_block)


@dataclass(frozen=True)
class _InBlocks:
    """Runs cut at the block boundaries of a side: block i has number[i] parts, from index begin[i] on."""

    run: Run
    begin: Tensor
    number: Tensor


def _in_blocks(pieces: Pieces, blocks: int, block: int) -> _InBlocks:
    stretch, run = runs_in(pieces, Slots.of_rows(torch.arange(blocks), block))
    order = stretch.argsort(stable=True)
    number = torch.bincount(stretch, minlength=blocks)
    return _InBlocks(run.select(order), number.cumsum(0) - number, number)


def runs_in(pieces: Pieces, slots: Slots) -> tuple[Tensor, Run]:
    """(interval, part) for each non-empty intersection of a piece with an interval of slots."""
    first, last = slots.first, slots.last
    if pieces.strides is None:  # consecutive runs: an interval touches only a few
        begin = torch.searchsorted(pieces.starts, first, right=True) - 1
        stretch, nth = enumerated(torch.searchsorted(pieces.starts, last) - begin)
        piece = begin[stretch] + nth
    else:
        stretch, piece = torch.cartesian_prod(torch.arange(len(first)), torch.arange(len(pieces.starts))).unbind(1)
    run = Run.of(pieces).select(piece).within(first[stretch], last[stretch])
    held = (run.count > 0).nonzero().squeeze(1)
    return stretch[held], run.select(held)


def _that_see(rule: Rule, table: int, q: Run, k: Run, *, by_query: bool) -> Run:
    """Query runs that may see any key, or key runs that any query may see."""
    own, other = (q, rule.k) if by_query else (k, rule.q)
    number = torch.full_like(own.piece, table)
    first = other.firsts[table]
    length = (first + other.step * (other.lengths - 1)).max() + 1 - first.min()
    hull = Progression(first.min().expand(len(number)), 1, length.expand(len(number)))
    mine = span(rule.q if by_query else rule.k, number, own)
    sides = (mine, hull) if by_query else (hull, mine)
    box = Box(torch.tensor(rule.heads)[number], *sides)
    return own.select((rule.pattern.count(box, num_heads=rule.num_heads).high > 0).nonzero().squeeze(1))


def _shorter(rule: Rule, q_block: int, k_block: int) -> Rule:
    """The rule over residue classes or over rows: the choice with fewer pairs of runs in a block."""
    if rule.rows is None:
        return rule
    classes = _most_in_block(rule.q, q_block) * _most_in_block(rule.k, k_block)
    rows = _most_in_block(rule.rows.q, q_block) * _most_in_block(rule.rows.k, k_block)
    return replace(rule.rows, pattern=rule.pattern) if rows < classes else replace(rule, rows=None)


def _most_in_block(pieces: Pieces, block: int) -> int:
    if pieces.strides is None:
        return block // max(1, int(pieces.lengths.min())) + 1
    return min(int(pieces.strides.max()), block)
