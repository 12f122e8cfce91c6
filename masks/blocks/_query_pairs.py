"""Exact numbers of allowed pairs of runs of queries; repeating parts of a rule are counted once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import (
    Box,
    Counts,
    Owned,
    Pattern,
    Progression,
    by_size,
    cut_classes,
    few_at_once,
    halves,
    join,
    look_at_pairs,
    num_classes,
    residue_factors,
)
from ._diagonals import settle_by_diagonals

# n runs of queries

_CELL_SIDE = 64  # boxes up to this side are evaluated pair by pair
_FRONTIER = 1 << 16  # boxes counted together
_MOST_CLASSES = 1 << 20  # residue classes into which boxes are cut at once
_LONGEST = 1 << 20  # longest side of a box that is settled by its diagonals


def pairs_of_queries(
    rule: Pattern, start: Int64[Tensor, " n"], stop: Int64[Tensor, " n"], num_tokens: int
) -> Int64[Tensor, " n"]:
    """Allowed pairs of the queries [start, stop) of each run with the keys [0, num_tokens), for the rule of one head.

    Where no pair leaves its period, whole periods are counted once.
    """
    period = rule.period() if rule.confined() else None
    rows = num_tokens if period is None else min(period, num_tokens)
    first, last = start // rows, (stop - 1).clamp(min=0) // rows
    parts = [
        (first, start - first * rows, torch.minimum(stop - first * rows, torch.full_like(stop, rows)), 1),
        (first + 1, torch.zeros_like(start), torch.full_like(start, rows), last - first - 1),
        (last, torch.zeros_like(start), stop - last * rows, last > first),
    ]
    index, begin, end, times = (
        torch.cat([torch.as_tensor(each).expand_as(start) for each in column]) for column in zip(*parts, strict=True)
    )
    run = torch.arange(len(start)).repeat(len(parts))
    held = ((end > begin) & (times > 0)).nonzero().squeeze(1)
    # Each period equals the first, cut at num_tokens.
    keys = (num_tokens - index * rows).clamp(max=rows)
    begin, count, keys = begin[held], (end - begin)[held], keys[held]
    one_of_each, kind = _kinds((begin, count, keys))
    q_first, q_count, k_count = (each[one_of_each] for each in (begin, count, keys))
    none = torch.zeros_like(q_first)
    pairs = exact_pairs(rule, Box(none, Progression(q_first, 1, q_count), Progression(none, 1, k_count)))
    return torch.zeros_like(start).index_add_(0, run[held], times[held].long() * pairs[kind])


def _kinds(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(index of one row of each kind, kind of each row); equal rows are a kind. Faster than sorting whole rows."""
    kind = torch.zeros_like(columns[0])
    for column in columns:
        values, place = column.unique(return_inverse=True)
        kind = (kind * len(values) + place).unique(return_inverse=True)[1]
    one_of_each = torch.zeros(len(kind.unique()), dtype=torch.int64)
    return one_of_each.scatter_(0, kind, torch.arange(len(kind))), kind


def exact_pairs(rule: Pattern, box: Box) -> Counts:
    """Number of allowed pairs of each box of step 1, for the rule of one head.

    Boxes that bounds leave undecided are cut into residue classes, in which dilated rules are dense, then into halves.
    Boxes with sides within a factor of 2 are settled by their diagonals where the rule repeats along them, small ones
    pair by pair.
    """
    pairs = torch.zeros_like(box.area)
    together, apart = residue_factors(rule)
    cuts = [*((factor, True) for factor in together), *((factor, False) for factor in apart)]
    held = Owned(torch.arange(len(pairs)), box).select((box.area > 0).nonzero().squeeze(1))
    stack = [(0, part) for part in few_at_once(held, _FRONTIER)]
    while stack:
        level, part = stack.pop()
        classes = num_classes(part, *cuts[level]) if level < len(cuts) else 0
        if 0 < classes <= _MOST_CLASSES:
            left = few_at_once(_settle(rule, part, pairs), max(1, _MOST_CLASSES // classes))
            parts = [cut_classes(some, *cuts[level]) for some in left]
        else:
            level, parts = len(cuts), [halves(_settle_all(rule, part, pairs))]
        stack.extend((level + 1, few) for rest in parts for few in few_at_once(rest, _FRONTIER))
    return pairs


def _settle(rule: Pattern, owned: Owned, pairs: Counts, *, by_diagonals: bool = False) -> Owned:
    """Add exact counts to `pairs`; return the undecided boxes."""
    box = owned.box
    bounds = rule.count(box, num_heads=1)
    if by_diagonals:
        longer, shorter = torch.maximum(box.q.count, box.k.count), torch.minimum(box.q.count, box.k.count)
        where = (longer <= 2 * shorter) & (longer <= _LONGEST)
        bounds = settle_by_diagonals(rule, box, bounds, num_heads=1, where=where)
    exact = bounds.low == bounds.high
    pairs.index_add_(0, owned.owner[exact], bounds.low[exact])
    return owned.select((~exact).nonzero().squeeze(1))


def _settle_all(rule: Pattern, owned: Owned, pairs: Counts) -> Owned:
    """Settle by bounds, diagonals and, if small, by pairs; grouped by size, as boxes of one size share diagonals."""
    left = join([_settle(rule, part, pairs, by_diagonals=True) for part in by_size(owned)])
    small = torch.maximum(left.box.q.count, left.box.k.count) <= _CELL_SIDE
    look_at_pairs(rule, left.select(small.nonzero().squeeze(1)), pairs)
    return left.select((~small).nonzero().squeeze(1))
