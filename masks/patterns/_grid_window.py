"""Windows along one axis of a token grid, shifted inwards at its ends: how many pairs two progressions have."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..core import Bounds, Box, Progression, clip, count_below, count_multiples

_MOST_CLASSES = 64


def count_window(head: Tensor, q: Progression, k: Progression, *, length: int, radius: int, rate: int) -> Bounds:
    """Pairs of coordinates, each n progressions, whose key lies in the query's window.

    Coordinates of one residue modulo `rate` are neighbours of each other; a window holds 2 * radius + 1 of
    them. Exact for equal steps and up to 64 classes; with more, exact where no window is shifted. Progressions may
    be empty.
    """
    if rate > _MOST_CLASSES:
        return _count_by_distance(head, q, k, length, radius * rate, rate)
    low = high = torch.zeros_like(q.first)
    for residue in range(rate):
        box = Box(head, _of_class(q, rate, residue), _of_class(k, rate, residue))
        bounds = _count_in_class(box, (length - 1 - residue) // rate + 1, radius)
        low, high = low + bounds.low, high + bounds.high
    return Bounds(low, high)


def _count_by_distance(head: Tensor, q: Progression, k: Progression, length: int, reach: int, rate: int) -> Bounds:
    """All keys of the class within `reach` tokens are in the window; a shifted one holds some up to twice as far."""
    begin = torch.zeros_like(q.first)
    box = Box(head, *(clip(side, begin, begin + length) for side in (q, k)))
    if q.step != k.step:
        return Bounds(begin, count_multiples(box, rate).high)
    near, far = (count_multiples(box, rate, reach=(-most, most)) for most in (reach, 2 * reach))
    return Bounds(near.low, far.high)


def _of_class(progression: Progression, rate: int, residue: int) -> Progression:
    """The terms of one residue class, by their number in that class."""
    if rate == 1:
        return progression
    divisor = gcd(progression.step, rate)
    every = rate // divisor
    distance = (residue - progression.first).remainder(rate)
    index = distance.div(divisor, rounding_mode="floor") * pow(progression.step // divisor, -1, every)
    index = index.remainder(every)
    count = (progression.count - 1 - index).div(every, rounding_mode="floor") + 1
    count = torch.where(distance.remainder(divisor) == 0, count.clamp(min=0), 0)
    first = (progression.first + progression.step * index).div(rate, rounding_mode="floor")
    return Progression(first, progression.step // divisor, count)


def _count_in_class(box: Box, length: int, radius: int) -> Bounds:
    """Queries near the start share the first window, those near the end the last; the others have their own."""

    def between(progression: Progression, start: int, stop: int) -> Progression:
        begin = torch.zeros_like(progression.first)
        return clip(progression, begin + start, begin + stop)

    window = 2 * radius + 1
    edges = between(box.q, 0, radius).count * between(box.k, 0, window).count
    edges += between(box.q, length - radius, length).count * between(box.k, length - window, length).count
    inner = Box(box.head, between(box.q, radius, length - radius), between(box.k, 0, length))
    reach, missed, area = count_below(inner, radius), count_below(inner, -radius - 1), inner.area
    low = (reach.low - missed.high).clamp(min=0).minimum(area)
    high = (reach.high - missed.low).clamp(min=0).minimum(area)
    return Bounds(edges + low, edges + high)
