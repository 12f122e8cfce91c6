"""Pairs of queries: how many keys runs of queries see in all, exactly; what repeats in a rule is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import Box, Pattern, Progression
from ._exact_pairs import exact_pairs

# n runs of queries

_LEAST_ROWS = 1 << 10  # of a stretch, where a rule repeats sooner


def pairs_of_queries(
    rule: Pattern, start: Int64[Tensor, " n"], stop: Int64[Tensor, " n"], num_tokens: int
) -> Int64[Tensor, " n"]:
    """Allowed pairs of the queries [start, stop) of each run with the keys [0, num_tokens), of a rule for one head.

    Where a rule repeats and sees only so far, stretches of rows that look alike are counted once, wherever they lie.
    """
    stretch = _stretch(rule, num_tokens)
    parts = [
        _rows_within(start, stop, 0, stretch.low, range(min(num_tokens, stretch.low + stretch.after))),
        _rows_within(start, stop, stretch.high, num_tokens, range(stretch.high - stretch.before, num_tokens)),
        *_inner_parts(start.clamp(stretch.low, stretch.high), stop.clamp(stretch.low, stretch.high), stretch),
    ]
    run, times, *box = (torch.cat(column) for column in zip(*parts, strict=True))
    one_of_each, kind = _kinds(box)
    q_first, q_count, k_first, k_count = (column[one_of_each] for column in box)
    head = torch.zeros_like(q_first)
    pairs = exact_pairs(rule, Box(head, Progression(q_first, 1, q_count), Progression(k_first, 1, k_count)))
    return torch.zeros_like(start).index_add_(0, run, times * pairs[kind])


def _kinds(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(an index of each distinct row, which of these each row is like). Sorting whole rows takes far longer."""
    kind = torch.zeros_like(columns[0])
    for column in columns:
        values, place = column.unique(return_inverse=True)
        kind = (kind * len(values) + place).unique(return_inverse=True)[1]
    one_of_each = torch.zeros(len(kind.unique()), dtype=torch.int64)
    return one_of_each.scatter_(0, kind, torch.arange(len(kind))), kind


@dataclass(frozen=True)
class _Stretch:
    """Stretches of `rows` queries that all look alike in [low, high); they see `before` keys before, `after` after."""

    rows: int
    before: int
    after: int
    low: int
    high: int


def _stretch(rule: Pattern, num_tokens: int) -> _Stretch:
    """The stretches of a rule; none where it does not repeat, or sees too far."""
    none = _Stretch(num_tokens, 0, 0, num_tokens, num_tokens)
    period = rule.period()
    if period is None or period >= num_tokens:
        return none
    reach = (0, 0) if rule.confined() else _reach(rule, period, num_tokens)
    if reach is None:
        return none
    before, after = reach
    rows = period if rule.confined() else -(-max(before, after, _LEAST_ROWS) // period) * period
    low, high = -(-before // rows) * rows, (num_tokens - after) // rows * rows
    return none if high <= low else _Stretch(rows, before, after, low, high)


def _reach(rule: Pattern, period: int, num_tokens: int) -> tuple[int, int] | None:
    """How far before its first row a stretch of whole periods sees, and after its last, at most; None for any distance.

    Asked of the first and the last rows, of which each sees as far to its side as any row like it.
    """
    distance = torch.tensor([0, *(1 << power for power in range(num_tokens.bit_length()) if 1 << power < num_tokens)])
    last = (num_tokens // period - 1) * period
    before = _nearest_empty(rule, distance, range(last, num_tokens), 0, last - distance)
    after = _nearest_empty(rule, distance, range(period), period + distance, num_tokens)
    # Rows beyond the last whole period were asked together with it.
    return None if before is None or after is None else (before + period, after)


def _nearest_empty(
    rule: Pattern, distance: Tensor, queries: range, k_start: Tensor | int, k_stop: Tensor | int
) -> int | None:
    """The least distance for which the queries see none of the keys [k_start, k_stop), which depend on it."""
    each = torch.ones_like(distance)
    count = (each * k_stop - each * k_start).clamp(min=0)
    some = (count > 0).nonzero().squeeze(1)
    keys = Progression((each * k_start)[some], 1, count[some])
    asked = Box(torch.zeros_like(some), Progression(each[some] * queries.start, 1, each[some] * len(queries)), keys)
    seen = torch.zeros_like(distance)
    if len(some):
        seen[some] = rule.count(asked, num_heads=1).high
    empty = distance[seen == 0]
    return int(empty[0]) if len(empty) else None


def _rows_within(start: Tensor, stop: Tensor, low: int, high: int, keys: range) -> tuple[Tensor, ...]:
    """(run, times, first and number of queries, first and number of keys) of the runs' queries in [low, high)."""
    return _part(start.clamp(low, high), stop.clamp(low, high), 0, keys, torch.ones_like(start))


def _part(start: Tensor, stop: Tensor, shift: Tensor | int, keys: range, times: Tensor) -> tuple[Tensor, ...]:
    run = ((stop > start) & (times > 0)).nonzero().squeeze(1)
    ones = torch.ones_like(run)
    return run, times[run], (start - shift)[run], (stop - start)[run], ones * keys.start, ones * len(keys)


def _inner_parts(start: Tensor, stop: Tensor, stretch: _Stretch) -> list[tuple[Tensor, ...]]:
    """The first stretch of each run, the whole ones after it, and the last, all moved to where stretches begin."""
    rows, low = stretch.rows, stretch.low
    keys = range(low - stretch.before, low + rows + stretch.after)
    first, last = start // rows * rows, (stop - 1).clamp(min=0) // rows * rows
    once, several = torch.ones_like(start), last > first
    whole = torch.full_like(start, low)
    return [
        _part(start, torch.minimum(stop, first + rows), first - low, keys, once),
        _part(whole, whole + rows, 0, keys, ((last - first) // rows - 1).clamp(min=0)),
        _part(torch.where(several, last, stop), stop, last - low, keys, once),
    ]
