"""Counting along diagonals: pairs of rules that repeat, without looking at each pair of a box."""

from math import gcd

import torch
from torch import Tensor

from ._box import Bounds, Box, Counts, count_residue
from ._pattern import MaskMod

_LOOKS = 1 << 21  # lags looked at together: bounds the memory


def count_multiples(box: Box, rate: int, *, reach: tuple[int, int] | None = None) -> Bounds:
    """Pairs with key position - query position a multiple of `rate`: exact for equal steps, else bounds.

    `reach` limits the distance to [least, most], and is for equal steps only.
    """
    if box.q.step == box.k.step:
        pairs = _count_exactly(box, rate, reach)
        return Bounds(pairs, pairs)
    assert reach is None
    by_query, by_key = _partners(box, rate), _partners(Box(box.head, box.k, box.q), rate)
    return Bounds(torch.maximum(by_query.low, by_key.low), torch.minimum(by_query.high, by_key.high))


def _count_exactly(box: Box, rate: int, reach: tuple[int, int] | None) -> Counts:
    """A pair's distance is shift + step * lag, where lag is key index - query index: count the lags that fit."""
    step, shift, columns = box.k.step, box.k.first - box.q.first, box.k.count
    divisor = gcd(step, rate)
    period = rate // divisor
    residue = -shift.div(divisor, rounding_mode="floor") * pow(step // divisor, -1, period)
    if reach is None:
        pairs = _lags_up_to(columns - 1, residue, period, box)
    else:
        least, most = reach
        last = (most - shift).div(step, rounding_mode="floor").minimum(columns - 1)
        skipped = (least - 1 - shift).div(step, rounding_mode="floor").minimum(columns - 1)
        pairs = _lags_up_to(last, residue, period, box) - _lags_up_to(skipped, residue, period, box)
    return torch.where(shift.remainder(divisor) == 0, pairs, 0)


def _lags_up_to(most: Tensor, residue: Tensor, period: int, box: Box) -> Counts:
    """Pairs of indices whose lag is at most `most` and congruent to `residue` modulo `period`.

    Over the lags of a box, its pairs make a trapezoid, a sum of ramps: lag + rows, less lag, less lag + rows - columns,
    each where it is positive. The trapezoid ends at columns - 1, which `most` must not exceed.
    """
    rows, columns = box.q.count, box.k.count
    top = most - (most - residue).remainder(period)

    def total(height: Tensor) -> Tensor:  # height + (height - period) + ..., as long as that is positive
        height = height.clamp(min=0)
        further = height // period
        return (further + 1) * height - period * (further * (further + 1) // 2)

    return total(top + rows) - total(top) - total(top + rows - columns)


def _partners(box: Box, rate: int) -> Bounds:
    """Bounds from the queries' side: each query that fits some key fits every so many-th of them."""
    divisor = gcd(box.k.step, rate)
    every = rate // divisor
    fitting = count_residue(box.q, divisor, box.k.first)
    return Bounds(fitting * (box.k.count // every), fitting * -(-box.k.count // every))


def count_by_lag(mask_mod: MaskMod, box: Box) -> Counts:
    """Allowed pairs of each box of equal steps, for a rule with a period that divides the step.

    Such a rule allows all of a diagonal of the box, or nothing of it: one pair of each is looked at.
    """
    assert box.q.step == box.k.step
    lag = torch.arange(1 - int(box.q.count.max()), int(box.k.count.max()))
    parts = torch.arange(len(box.head)).split(max(1, _LOOKS // len(lag)))
    return torch.cat([_look_at_diagonals(mask_mod, box.select(part), lag) for part in parts])


def _look_at_diagonals(mask_mod: MaskMod, box: Box, lag: Tensor) -> Counts:
    rows, columns, head = box.q.count[:, None], box.k.count[:, None], box.head[:, None]
    row = (-lag).clamp(min=0)  # where the diagonal begins
    query, key = box.q.first[:, None] + box.q.step * row, box.k.first[:, None] + box.k.step * (row + lag)
    allowed = mask_mod(torch.zeros_like(head), head, query, key)
    length = (torch.minimum(rows, columns - lag) - row).clamp(min=0)
    return (length * allowed).sum(1)
