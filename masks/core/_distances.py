"""Pairs whose distance is a multiple of a rate: how many a box holds, in closed form."""

from math import gcd

import torch
from torch import Tensor

from ._box import Bounds, Box, Counts, count_residue


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
