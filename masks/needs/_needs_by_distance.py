"""Keys seen by a rule of distances: they are whatever distances it allows, from any of the queries."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..core import Bounds, Box, Progression, common_period, intersect, joined_intervals
from ._asked import Asked

# Residue classes of keys that are asked about one by one.
_MOST_CLASSES = 1 << 9
# An interval of lags that is left in doubt is cut into so many.
_CUTS = 8


def found_by_distance(asked: Asked) -> list[range] | None:
    """The keys that see some query, as ranges; None for rules that look at more than the distance."""
    step = asked.queries.step if len(asked.queries) > 1 else 1
    classes = step // gcd(step, asked.keys.step)
    if common_period(asked.factors) != 1 or classes > _MOST_CLASSES:
        return None
    keys = asked.keys
    found: list[range] = []
    for index in range(min(classes, len(keys))):
        hull = range(keys.start + index * keys.step, keys[-1] + 1, step)
        found += _in_steps_of_queries(asked, hull)
    return [both for each in found if (both := intersect(each, keys))]


def _in_steps_of_queries(asked: Asked, keys: range) -> list[range]:
    """Key j sees query i by their lag j - i: key j sees some of n queries iff one of the n lags up to j is allowed."""
    begin, end = _Lags(asked, keys).counted()
    runs = zip(begin.tolist(), (end + (len(asked.queries) - 1)).tolist(), strict=True)
    held = (intersect(range(*run), range(len(keys))) for run in runs)
    return [keys[run.start : run.stop] for run in held if run]


class _Lags:
    """The lags between n queries and m keys of the same step, and which of them a rule allows."""

    def __init__(self, asked: Asked, keys: range) -> None:
        self.asked, self.step = asked, keys.step
        self.lags = range(1 - len(asked.queries), len(keys))
        # A query so far on that no lag leads to a position below 0.
        shift = keys.start - asked.queries.start
        self.query = max(0, -(shift + self.step * self.lags.start))
        self.first_key = self.query + shift

    def counted(self) -> tuple[Tensor, Tensor]:
        """Intervals [begin, end) of lags that may count as allowed: by each of them a key sees some query.

        Those are the allowed lags. Where n lags in a row hold two of them, all lags between count as well: a key
        that would see a query by one of those sees another by one of the two.
        """
        n = len(self.asked.queries)
        found: list[tuple[Tensor, Tensor]] = []
        begin, end = torch.tensor([self.lags.start]), torch.tensor([self.lags.stop])
        while len(begin):
            bounds = self._count(begin, end)
            some, full = bounds.low > 0, bounds.low == end - begin
            between = joined_intervals(*_between(begin[some], end[some], n))
            found += [(begin[full], end[full]), between]
            doubtful = (bounds.high > 0) & ~full & ~_inside(begin, end, *between)
            begin, end = _cut(begin[doubtful], end[doubtful])
        return joined_intervals(*(torch.cat(side) for side in zip(*found, strict=True)))

    def _count(self, begin: Tensor, end: Tensor) -> Bounds:
        """Bounds on the allowed lags of each interval; exact for single lags."""
        head, query = torch.full_like(begin, self.asked.head), torch.full_like(begin, self.query)
        first = self.first_key + self.step * begin
        q, k = Progression(query, self.step, torch.ones_like(query)), Progression(first, self.step, end - begin)
        bounds = self.asked.rule.count(Box(head, q, k), num_heads=self.asked.num_heads)
        single = ((end - begin == 1) & (bounds.low < bounds.high)).nonzero().squeeze(1)
        if not len(single):
            return bounds
        allowed = self.asked.allows(query[single], first[single]).long()
        return Bounds(bounds.low.index_copy(0, single, allowed), bounds.high.index_copy(0, single, allowed))


def _between(begin: Tensor, end: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The lags between the allowed ones of intervals that hold one each, if n + 1 lags span both intervals."""
    last = torch.searchsorted(end, begin + (n + 1), right=True) - 1
    first = (last > torch.arange(len(last))).nonzero().squeeze(1)
    return end[first] - 1, begin[last[first]] + 1


def _inside(begin: Tensor, end: Tensor, run_begin: Tensor, run_end: Tensor) -> Tensor:
    """Which intervals lie in one of some runs, which are in ascending order."""
    if not len(run_begin):
        return torch.zeros_like(begin, dtype=torch.bool)
    run = torch.searchsorted(run_begin, begin, right=True) - 1
    return (run >= 0) & (end <= run_end[run.clamp(min=0)])


def _cut(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Each interval in parts of equal length, as far as it goes."""
    edges = begin[:, None] + (end - begin)[:, None] * torch.arange(_CUTS + 1) // _CUTS
    first, last = edges[:, :-1].flatten(), edges[:, 1:].flatten()
    held = first < last
    return first[held], last[held]
