"""Where to look for blocks: in the squares that tables list, where a rule has tables, else everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from ..core import Or, Pattern, Squares
from ..orders import Pieces
from ._class_pairs import descend_blocks, descend_classes, has_many_pairs, roots
from ._quadtree import Leaves, Slots, descend, join_nodes
from ._rule import Nodes, Rule, Run

_MOST_ALTERNATIVES = 16
_MOST_LEAVES = 1 << 20


def find_leaves(rule: Rule, tables: Sequence[int], slots: Slots, q_block: int, k_block: int) -> Iterator[Leaves]:
    """The leaves of some tables and query slots.

    For pairs that lie scattered, a descent from the root looks at many boxes each: where a table lists squares
    that hold them, it begins with those. Of a union, the parts with and without such squares find their blocks
    apart, and the whole is then counted on these blocks only, unless they are many.
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
    """The same without squares.

    In an order of very many residue classes all parts of a union find their blocks apart: each part has its own
    pairs of classes that can meet.
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
    """The leaves of the rule on the blocks of its parts; those of the `whole` where that are too many blocks."""
    if len(found) == 1:
        yield from found[0]
        return
    rows, columns = (-(-int(side.lengths.sum()) // block) for side, block in ((rule.q, q_block), (rule.k, k_block)))
    blocks = _if_few(chain.from_iterable(found), rows, columns)
    yield from whole if blocks is None else descend_blocks(rule, blocks, (rows, columns), q_block, k_block)


def _alternatives(pattern: Pattern) -> list[Pattern]:
    """Patterns whose union this is, unions inside intersections drawn out; itself alone where they would be many."""
    found = list(islice(_split(pattern), _MOST_ALTERNATIVES + 1))
    return found if len(found) <= _MOST_ALTERNATIVES else [pattern]


def _split(pattern: Pattern) -> Iterator[Pattern]:
    parts = pattern.alternatives()
    if len(parts) == 1:
        yield pattern
    else:
        yield from chain.from_iterable(map(_split, parts))


def _in_order(rule: Rule) -> bool:
    """Whether slots are positions, counted from where they begin."""
    return all(len(side.starts) == 1 and side.step == 1 for side in (rule.q, rule.k))


def _covering(rule: Rule, pattern: Pattern, tables: Sequence[int]) -> Nodes | None:
    """Nodes that hold all of the pattern's pairs, each once; None if it lists no squares for one of the tables."""
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
    """The slots of positions from `first` on, as far as there are any."""
    begin, last = first - pieces.firsts[table, 0], int(pieces.lengths[0])
    start = begin.clamp(0, last)
    return Run(torch.zeros_like(begin), start, (begin + length).clamp(0, last) - start)


def _if_few(found: Iterable[Leaves], rows: int, columns: int) -> Tensor | None:
    """The numbers of their blocks, table by table and row by row; None if they are too many to look at again."""
    key, new, number = torch.zeros(0, dtype=torch.int64), [], 0
    for leaves in found:
        new.append((leaves.table * rows + leaves.row) * columns + leaves.column)
        number += len(leaves.row)
        if number > _MOST_LEAVES:  # parts of blocks that are listed already count no more
            key, new, number = torch.cat([key, *new]).unique(), [], 0
            if len(key) > _MOST_LEAVES:
                return None
    return torch.cat([key, *new]).unique()
