"""Reason: whether a rule allows a pair and why, in one plain line with numbers, with the reasons of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

if TYPE_CHECKING:
    from ._pattern import Expression, Pattern

_MOST_LISTED = 8
_INDENT = "  "

# Unit of a rule's positions: tokens, blocks of tokens, or places of tokens in their document.
Unit = Literal["token", "block", "place"]


@dataclass(frozen=True)
class Pair:
    """The pair that a reason is about: positions of a query and a key, for one of `num_heads` global heads."""

    query: int
    key: int
    head: int
    num_heads: int
    unit: Unit = "token"

    def counted(self, unit: Unit, query: int, key: int) -> Pair:
        """The pair with the positions of a rule that uses another unit."""
        return replace(self, query=query, key=key, unit=unit)

    def reason_of(self, part: Pattern) -> Reason:
        """Reason of a part of the rule for this pair; a method of the pair, so that the viewer can trace it."""
        return part.reason(self)

    def allowed_by(self, pattern: Pattern) -> bool:
        """Value of the pattern's mask_mod at this pair."""
        cpu = torch.device("cpu")
        mod = pattern.mask_mod(num_heads=self.num_heads, device=cpu)
        return bool(mod(*(torch.tensor(number, device=cpu) for number in (0, self.head, self.query, self.key))))

    def entry(self, table: Shaped[Tensor, " L"], place: int) -> int:
        return int(table[place])

    @property
    def the_query(self) -> str:
        return self._named("query", self.query)

    @property
    def the_key(self) -> str:
        return self._named("key", self.key)

    @property
    def distance(self) -> str:
        """Distance of the key from the query, as a clause."""
        if self.key == self.query:
            return f"{self.the_key} is the query's own"
        side = "before" if self.key < self.query else "after"
        return f"{self.the_key} is {self._measured(abs(self.query - self.key))} {side} {self.the_query}"

    def those(self, holds: Callable[[int], bool], what: str) -> str | None:
        """Clause that the sides whose positions satisfy `holds` are `what`; None if neither side does."""
        sides = ((self.the_query, self.query), (self.the_key, self.key))
        names = [name for name, position in sides if holds(position)]
        return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} {what}" if names else None

    def in_runs(self, kind: str, of_query: int, of_key: int, edges: Callable[[int], tuple[int, int]]) -> str:
        """Clause that names the runs of positions, such as segments, of the query and the key."""
        query, key = (f"{kind} {index} ({span(*edges(index))})" for index in (of_query, of_key))
        if of_query == of_key:
            return f"both are in {query}"
        return f"{self.the_query} is in {query}, {self.the_key} in {key}: different {kind}s"

    def _named(self, side: str, position: int) -> str:
        return f"{side} {position}" if self.unit == "token" else f"{side} {self.unit} {position}"

    def _measured(self, number: int) -> str:
        unit = "block" if self.unit == "block" else "token"
        return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


@dataclass(frozen=True)
class Reason:
    """Verdict of one rule on a pair; `parts`: reasons of the inner rules that decide it."""

    pattern: Expression
    allowed: bool
    text: str
    parts: tuple[Reason, ...] = ()

    def lines(self, depth: int = 0, width: int = 60) -> list[str]:
        """The tree as indented lines, patterns cut to `width` characters."""
        written = repr(self.pattern)
        written = written if len(written) <= width else f"{written[: width - 3]}..."
        line = f"{_INDENT * depth}{'yes' if self.allowed else 'no':<3}  {written}: {self.text}"
        return [line, *(each for part in self.parts for each in part.lines(depth + 1, width))]

    def to_data(self) -> dict[str, Any]:
        data = {"pattern": repr(self.pattern), "allowed": self.allowed, "text": self.text}
        return {**data, "parts": [part.to_data() for part in self.parts]}


def span(start: int, stop: int) -> str:
    """Text of a run of positions: its first and last."""
    return f"{start} to {stop - 1}" if stop - start > 1 else f"{start}"


def listing(numbers: Sequence[int]) -> str:
    """Text of numbers; a long list is cut to its first few and the number of further ones."""
    if not numbers:
        return "none"
    if len(numbers) > _MOST_LISTED:
        return f"{', '.join(map(str, numbers[:_MOST_LISTED]))} and {len(numbers) - _MOST_LISTED} more"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last
