"""Segments: the runs of positions to which a rule keeps, equally long ones or documents."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from ..patterns._dilated import Dilated
from ..patterns.run_time._spans import Spans


class Segments(Protocol):
    """Runs of positions in ascending order, in each of which every `rate`-th token from `offset` on is active."""

    rate: int
    offset: int

    def first(self, position: int) -> int:
        """The number of the first run that ends after a position."""
        ...

    def last(self, position: int) -> int:
        """The number of the last run that begins at or before a position."""
        ...

    def edges(self, number: int) -> tuple[int, int]:
        """Where a run begins, and where the next position after it lies."""
        ...


class _Equal:
    """The segments of a dilated rule."""

    def __init__(self, rule: Dilated) -> None:
        assert isinstance(rule.offset, int), "a rule for one head has its offset resolved"
        self.length, self.rate, self.offset = rule.segment, rule.rate, rule.offset

    def first(self, position: int) -> int:
        return position // self.length

    def last(self, position: int) -> int:
        return position // self.length

    def edges(self, number: int) -> tuple[int, int]:
        return number * self.length, (number + 1) * self.length


class _Listed:
    """Documents, between which there may be padding."""

    rate, offset = 1, 0

    def __init__(self, spans: Spans) -> None:
        self.starts, self.stops = spans.starts.tolist(), spans.stops.tolist()

    def first(self, position: int) -> int:
        return bisect_right(self.stops, position)

    def last(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def edges(self, number: int) -> tuple[int, int]:
        return self.starts[number], self.stops[number]


def segments_of(rule: Dilated | Spans) -> Segments:
    return _Equal(rule) if isinstance(rule, Dilated) else _Listed(rule)
