"""refine: in each head the blocks that get least go, and the most promising ones come."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..masks import Pattern, block_list, cache
from ..masks.core import advises, plans, require_int
from ..masks.patterns import BlockList
from ..masks.planning import bound_blocks, shared_terms

# H heads, R rows and C columns of blocks


class Refinement(NamedTuple):
    """A refined pattern, and what moved: (head, row, column) of each block that went and of each that came."""

    pattern: Pattern
    dropped: Int64[Tensor, "n 3"]
    grown: Int64[Tensor, "n 3"]


@plans
@torch.no_grad()
@advises()
def refine(
    pattern: Pattern,
    importance: Float[Tensor, "H R C"],
    *,
    scores: Float[Tensor, "H R C"],
    moves: int,
    within: Pattern | None = None,
    keep: Pattern | None = None,
) -> Refinement:
    """Exchange at most `moves` blocks in each head: those listed that get least for those unlisted that score most.

    Each head lists as many blocks as before. The rule is RigL's (arXiv 1911.11134, section 3): drop by least
    magnitude, grow by largest gradient; here by least attention mass, and by largest score. Where blocks are equal, the
    one of the lower row goes or comes first, then the one of the lower column. The answer depends on the arguments
    alone, so that ranks which hold the same ones go on with the same pattern.

    pattern: from `masks.block_list`, with a table for each head. Intersect it with the rest, such as `causal()`, where
        it is used, and refine it alone.
    importance: what each block gets, such as `ImportanceTracker.importance()`; read for listed blocks.
    scores: how promising each block is, such as `fd.pooled_scores`; read for unlisted ones. -inf: never to come.
    moves: from 0 on; fewer are made where fewer blocks may go or come.
    within: blocks in which this pattern has no pair never come; None allows all.
    keep: blocks in which this pattern has a pair never go. Of each row its most massive block does not go, either: a
        row that sees anything goes on to see something.

    Both patterns are asked for R and C whole blocks of the list's side. What the cache holds for the old pattern, and
    for all in which it is a part, is dropped if anything moved: `masks.cache().forget(pattern)`.

    Raises TypeError for a pattern of another kind, and ValueError for tables that are not one a head, for tensors of
    other shapes or with NaN, and for patterns that do not fit so many heads and tokens.

    >>> listed = masks.block_list([[[0], [0, 1], [0, 1, 2]]], block=64)  # one head
    >>> importance = torch.tensor([[[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.1, 0.2, 0.7]]])
    >>> scores = torch.tensor([[[0.0, 9.0, 9.0], [0.0, 0.0, 9.0], [0.0, 0.0, 0.0]]])
    >>> fd.refine(listed, importance, scores=scores, moves=1, within=masks.causal()).grown  # no block is left to grow
    tensor([], size=(0, 3), dtype=torch.int64)
    >>> fd.refine(listed, importance, scores=scores, moves=1).pattern  # (2, 0) goes, (0, 1) comes
    block_list(rows=(((0, 1), (0, 1), (1, 2)),), block=64)
    """
    require_int("moves", moves, minimum=0)
    listed = _listed(pattern, importance)
    _check_numbers("scores", scores, tuple(importance.shape))
    mass, promise = importance.detach().cpu().double(), scores.detach().cpu().double()
    block = pattern.block  # type: ignore[attr-defined]  # `_listed` checks the kind
    droppable = listed & ~_most_massive(mass, listed)
    if keep is not None:
        droppable &= ~_touched("keep", keep, listed, block)
    growable = ~listed & (promise > -torch.inf)
    if within is not None:
        growable &= _touched("within", within, listed, block)
    exchanged = torch.minimum(droppable.sum((1, 2)), growable.sum((1, 2))).clamp(max=moves)
    dropped, grown = _first(droppable, mass, exchanged), _first(growable, -promise, exchanged)
    if bool((exchanged == 0).all()):
        return Refinement(pattern, dropped.nonzero(), grown.nonzero())
    cache().forget(pattern)
    return Refinement(block_list(listed & ~dropped | grown, block=block), dropped.nonzero(), grown.nonzero())


def _listed(pattern: object, importance: Tensor) -> Bool[Tensor, "H R C"]:
    """Which blocks the pattern lists, after checks on both."""
    if not isinstance(pattern, BlockList):
        raise TypeError(
            "pattern must be what masks.block_list makes; refine it alone and intersect with the rest where it is "
            f"used; got {pattern!r:.80}"
        )
    if not pattern.by_head:
        raise ValueError(
            "refine needs one table a head: masks.block_list([rows] * num_heads, block=...); got one table"
        )
    if not isinstance(importance, Tensor) or importance.dim() != 3:
        came = tuple(importance.shape) if isinstance(importance, Tensor) else type(importance).__name__
        raise ValueError(f"importance must be a tensor of shape (heads, rows, columns of blocks); got {came}")
    heads, rows, columns = importance.shape
    _check_numbers("importance", importance, (len(pattern.rows), rows, columns))
    longest, last = max(map(len, pattern.rows)), max(max(row, default=-1) for table in pattern.rows for row in table)
    if longest > rows or last >= columns:
        raise ValueError(
            f"importance must cover all blocks of the pattern, {longest} rows and {last + 1} columns; "
            f"got {rows} and {columns}"
        )
    listed = torch.zeros(heads, rows, columns, dtype=torch.bool)
    for head, table in enumerate(pattern.rows):
        for row, named in enumerate(table):
            listed[head, row, list(named)] = True
    return listed


def _check_numbers(name: str, x: object, shape: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{name} must have the shape {shape} of (heads, rows, columns of blocks); got {tuple(x.shape)}"
        )
    if not x.is_floating_point() or bool(x.isnan().any()):
        raise ValueError(f"{name} must hold real numbers without NaN; got a tensor of {x.dtype}")


def _most_massive(mass: Tensor, listed: Tensor) -> Bool[Tensor, "H R C"]:
    """The block of each row that gets most, the first of equal ones."""
    best = mass.masked_fill(~listed, -torch.inf).argmax(-1, keepdim=True)
    return torch.zeros_like(listed).scatter_(-1, best, True) & listed


def _touched(name: str, pattern: object, listed: Tensor, block: int) -> Bool[Tensor, "H R C"]:
    """The blocks in which a pattern has a pair."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{name} must be a set pattern or None; got {pattern!r:.80}")
    heads, rows, columns = listed.shape
    bound = pattern.bind(num_heads=heads, num_queries=rows * block, num_keys=columns * block)
    (term,) = shared_terms(bound.union, 1, bound, 1)
    found = torch.zeros(heads, rows, columns, dtype=torch.bool)
    for blocks in bound_blocks(term, bound, (block, block)):
        tables = torch.zeros(blocks.num_tables, rows, columns, dtype=torch.bool)
        tables[blocks.table.long(), blocks.row.long(), blocks.column.long()] = True
        found |= tables[list(blocks.heads)]
    return found


def _first(among: Tensor, key: Tensor, number: Tensor) -> Bool[Tensor, "H R C"]:
    """In each head so many blocks of some, those of the lowest keys; of equal ones those that stand first."""
    order = key.masked_fill(~among, torch.inf).flatten(1).sort(dim=1, stable=True).indices
    chosen = torch.arange(order.shape[1]) < number[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen).view_as(among)
