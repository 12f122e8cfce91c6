"""Where to look for blocks: in the squares that tables list, where a rule has tables, else everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import chain, product
from math import prod

import torch
from torch import Tensor

from ._algebra import And, Or
from ._box import Squares
from ._layout import Pieces
from ._pattern import Pattern
from ._quadtree import Leaves, descend, range_roots, within_rows
from ._rule import Nodes, Rule, Run

_MOST_ALTERNATIVES = 16
_MOST_LEAVES = 1 << 20


def find_leaves(rule: Rule, tables: range, rows: range, q_block: int, k_block: int) -> Iterator[Leaves]:
    """The leaves of some tables and block rows.

    For pairs that lie scattered, a descent from the root looks at many boxes each: where a table lists squares
    that hold them, it begins with those. Of a union, the parts with and without such squares find their blocks
    apart, and the whole is then counted on these blocks only, unless they are many.
    """
    parts = _alternatives(rule.pattern) if _in_order(rule) else []
    covered = {part: squares for part in parts if (squares := _covering(rule, part, tables)) is not None}
    everywhere = range_roots(rule, tables, rows, q_block)
    if not covered:
        yield from descend(rule, everywhere, q_block, k_block)
        return
    starts = [(part, within_rows(squares, rows, q_block)) for part, squares in covered.items()]
    if rest := [part for part in parts if part not in covered]:
        starts.append((Or.of(*rest), everywhere))
    found = [descend(replace(rule, pattern=part), nodes, q_block, k_block) for part, nodes in starts]
    if len(found) == 1:
        yield from found[0]
        return
    leaves = _if_few(chain.from_iterable(found))
    nodes = everywhere if leaves is None else _blocks(rule, leaves, q_block, k_block)
    yield from descend(rule, nodes, q_block, k_block)


def _alternatives(pattern: Pattern) -> list[Pattern]:
    """Patterns whose union this is, intersections inside; itself alone where they would be many."""
    if not isinstance(pattern, And | Or):
        return [pattern]
    inner = [_alternatives(part) for part in pattern.parts]
    number = sum(map(len, inner)) if isinstance(pattern, Or) else prod(map(len, inner))
    if number > _MOST_ALTERNATIVES:
        return [pattern]
    if isinstance(pattern, Or):
        return [part for parts in inner for part in parts]
    return [And.of(*chosen) for chosen in product(*inner)]


def _in_order(rule: Rule) -> bool:
    """Whether slots are positions, counted from where they begin."""
    return all(len(side.starts) == 1 and side.step == 1 for side in (rule.q, rule.k))


def _covering(rule: Rule, pattern: Pattern, tables: range) -> Nodes | None:
    """Nodes that hold all of the pattern's pairs, each once; None if it lists no squares for one of the tables."""
    listed = [pattern.squares(rule.heads[table], rule.num_heads) for table in tables]
    known = [squares for squares in listed if squares is not None]
    if len(known) < len(tables):
        return None
    return _joined([_nodes(rule, table, squares) for table, squares in zip(tables, known, strict=True)])


def _nodes(rule: Rule, table: int, squares: Squares) -> Nodes:
    q = _run(rule.q, table, squares.q_first, squares.side)
    k = _run(rule.k, table, squares.k_first, squares.side)
    nodes = Nodes(torch.full_like(q.piece, table), q, k)
    return nodes.select(((q.start < q.stop) & (k.start < k.stop)).nonzero().squeeze(1))


def _run(pieces: Pieces, table: int, first: Tensor, length: int) -> Run:
    """The slots of positions from `first` on, as far as there are any."""
    begin, last = first - pieces.firsts[table, 0], int(pieces.lengths[0])
    return Run(torch.zeros_like(begin), begin.clamp(0, last), (begin + length).clamp(0, last))


def _joined(nodes: list[Nodes]) -> Nodes:
    def run(runs: list[Run]) -> Run:
        return Run(*(torch.cat([getattr(each, field.name) for each in runs]) for field in fields(Run)))

    return Nodes(
        torch.cat([each.table for each in nodes]), run([each.q for each in nodes]), run([each.k for each in nodes])
    )


def _if_few(found: Iterable[Leaves]) -> list[Leaves] | None:
    """All of them, or None if they are too many to hold beside what comes of them."""
    leaves, number = [], 0
    for some in found:
        leaves.append(some)
        number += len(some.row)
        if number > _MOST_LEAVES:
            return None
    return leaves


def _blocks(rule: Rule, found: list[Leaves], q_block: int, k_block: int) -> Nodes:
    """The blocks of these leaves, each once."""
    last_q, last_k = int(rule.q.lengths[0]), int(rule.k.lengths[0])
    rows, columns = -(-last_q // q_block), -(-last_k // k_block)
    key = torch.cat([(leaves.table * rows + leaves.row) * columns + leaves.column for leaves in found]).unique()
    q, k, piece = key // columns % rows * q_block, key % columns * k_block, torch.zeros_like(key)
    return Nodes(
        key // (rows * columns),
        Run(piece, q, (q + q_block).clamp(max=last_q)),
        Run(piece, k, (k + k_block).clamp(max=last_k)),
    )
