"""Composite: a pattern made of others, and what it has from all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._pattern import Pattern, all_leaves, common_period


@dataclass(frozen=True)
class Composite(Pattern):
    """A pattern of parts: it repeats where they all do, and heads and tokens must suit each of them."""

    parts: tuple[Pattern, ...]

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
