"""Composite: a pattern made of others, and what it has from all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import lcm
from typing import Any

from ._check import LARGEST
from ._pattern import Pattern, all_leaves


@dataclass(frozen=True)
class Composite(Pattern):
    """A pattern of parts: it repeats where they all do, and heads and tokens must suit each of them."""

    parts: tuple[Pattern, ...]

    def direct_parts(self) -> tuple[Pattern, ...]:
        return self.parts

    def period(self) -> int | None:
        return common_period(self.parts)

    def rates(self) -> tuple[int, ...]:
        return tuple(rate for part in self.parts for rate in part.rates())

    def leaves(self) -> tuple[Pattern, ...]:
        return all_leaves(self.parts)

    def map_leaves(self, change: Callable[[Pattern], Pattern]) -> Any:
        return type(self)(tuple(part.map_leaves(change) for part in self.parts))

    def check_heads(self, num_heads: int) -> None:
        for part in self.parts:
            part.check_heads(num_heads)

    def check_tokens(self, queries: range, keys: range) -> None:
        for part in self.parts:
            part.check_tokens(queries, keys)


def common_period(parts: tuple[Pattern, ...]) -> int | None:
    """The least shift that leaves every part as it is, or None; None too where no sequence is as long."""
    periods = [part.period() for part in parts]
    known = [period for period in periods if period is not None]
    least = reduce(lcm, known, 1)
    return least if len(known) == len(periods) and least <= LARGEST else None
