"""Reason: the verdict of a rule on one pair, explained in one line with numbers, with the reasons of its parts."""

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

# Unit of a rule's positions: tokens, blocks of tokens, or places, which are tokens counted from a later start, such as
# that of their document.
Unit = Literal["token", "block", "place"]


@dataclass(frozen=True)
class Pair:
    """A query and a key, for global head `head` of `num_heads`; a `Reason` says if they are an allowed pair.

    query, key: positions, counted in `unit`: tokens, blocks of tokens, or places, which count from the start of a
        document or another later start.

    >>> masks.extend.Pair(query=5, key=3, head=0, num_heads=1).distance
    'key 3 is 2 tokens before query 5'
    """

    query: int
    key: int
    head: int
    num_heads: int
    unit: Unit = "token"

    def counted(self, unit: Unit, query: int, key: int) -> Pair:
        """Return a pair of this head with these positions, for a rule that counts blocks, or places from a start."""
        return replace(self, query=query, key=key, unit=unit)

    def reason_of(self, part: Pattern) -> Reason:
        """Return part.reason(self), with `part` a part of a rule; the viewer overrides this method to trace parts."""
        return part.reason(self)

    def allowed_by(self, pattern: Pattern) -> bool:
        """True if the pattern's mask_mod allows this pair in batch entry 0."""
        cpu = torch.device("cpu")
        mod = pattern.mask_mod(num_heads=self.num_heads, device=cpu)
        return bool(mod(*(torch.tensor(number, device=cpu) for number in (0, self.head, self.query, self.key))))

    def entry(self, table: Shaped[Tensor, " L"], place: int) -> int:
        return int(table[place])

    @property
    def the_query(self) -> str:
        return self._position_text("query", self.query)

    @property
    def the_key(self) -> str:
        return self._position_text("key", self.key)

    @property
    def distance(self) -> str:
        """Distance of the key from the query as a clause, such as: key 3 is 2 tokens before query 5."""
        if self.key == self.query:
            return f"{self.the_key} is the query's own"
        side = "before" if self.key < self.query else "after"
        return f"{self.the_key} is {self._distance_text(abs(self.query - self.key))} {side} {self.the_query}"

    def those(self, holds: Callable[[int], bool], what: str) -> str | None:
        """Return a clause on the positions of this pair that satisfy `holds`, such as: query 3 and key 5 are <what>.

        None if neither the query nor the key satisfies it.

        holds: predicate of a position.
        what: the end of the clause.
        """
        sides = ((self.the_query, self.query), (self.the_key, self.key))
        names = [name for name, position in sides if holds(position)]
        return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} {what}" if names else None

    def in_runs(self, kind: str, of_query: int, of_key: int, edges: Callable[[int], tuple[int, int]]) -> str:
        """Return a clause on the runs of positions that hold query and key, such as: both are in segment 1 (4 to 7).

        kind: noun for a run.
        of_query, of_key: indices of their runs.
        edges: function (i) -> (start, stop) of run i, without the position stop.
        """
        query, key = (f"{kind} {index} ({span(*edges(index))})" for index in (of_query, of_key))
        if of_query == of_key:
            return f"both are in {query}"
        return f"{self.the_query} is in {query}, {self.the_key} in {key}: different {kind}s"

    def _position_text(self, side: str, position: int) -> str:
        return f"{side} {position}" if self.unit == "token" else f"{side} {self.unit} {position}"

    def _distance_text(self, number: int) -> str:
        unit = "block" if self.unit == "block" else "token"
        return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


@dataclass(frozen=True)
class Reason:
    """Verdict of one pattern on a pair, with its explanation in `text`.

    parts: reasons of the inner patterns that were evaluated for the verdict; () for a leaf.

    >>> pair = masks.extend.Pair(query=3, key=5, head=0, num_heads=1)
    >>> pair.reason_of(masks.causal()).text
    'key 5 is 2 tokens after query 3'
    """

    pattern: Expression
    allowed: bool
    text: str
    parts: tuple[Reason, ...] = ()

    def lines(self, depth: int = 0, width: int = 60) -> list[str]:
        """Return the tree of reasons as lines, with patterns cut to `width` characters.

        The first line is indented by `depth` levels; lines for `parts` follow, each indented by one level more.
        """
        written = repr(self.pattern)
        written = written if len(written) <= width else f"{written[: width - 3]}..."
        line = f"{_INDENT * depth}{'yes' if self.allowed else 'no':<3}  {written}: {self.text}"
        return [line, *(each for part in self.parts for each in part.lines(depth + 1, width))]

    def to_data(self) -> dict[str, Any]:
        data = {"pattern": repr(self.pattern), "allowed": self.allowed, "text": self.text}
        return {**data, "parts": [part.to_data() for part in self.parts]}


def span(start: int, stop: int) -> str:
    """Return the text of the run of positions start to stop - 1, such as: 4 to 7, or 4 for a single position."""
    return f"{start} to {stop - 1}" if stop - start > 1 else f"{start}"


def listing(numbers: Sequence[int]) -> str:
    """Return numbers as text, such as "1, 2 and 5"; "none" for no numbers.

    Of more than 8 numbers, the text has the first 8 and says how many more there are.
    """
    if not numbers:
        return "none"
    if len(numbers) > _MOST_LISTED:
        return f"{', '.join(map(str, numbers[:_MOST_LISTED]))} and {len(numbers) - _MOST_LISTED} more"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last
