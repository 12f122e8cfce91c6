"""KeyQuery: the question which keys any of some queries attends to, under the AND of some rules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..blocks import allowed_pairs
from ..core import And, Pattern, intersect


@dataclass(frozen=True)
class KeyQuery:
    """Which of `keys` does any of `queries` attend to under the AND of `factors`, each of them a rule for one head?

    `head`: a global head that follows the rules.
    """

    factors: tuple[Pattern, ...]
    queries: range
    keys: range
    head: int
    num_heads: int

    @property
    def is_empty(self) -> bool:
        return not (self.queries and self.keys)

    @property
    def rule(self) -> Pattern:
        return And.of(*self.factors)

    def of(self, *factors: Pattern) -> KeyQuery:
        """Replace the rules."""
        return KeyQuery(tuple(dict.fromkeys(factors)), self.queries, self.keys, self.head, self.num_heads)

    def within(self, queries: range, keys: range) -> KeyQuery:
        """Restrict to queries and keys in these ranges."""
        both = intersect(self.queries, queries), intersect(self.keys, keys)
        return KeyQuery(self.factors, *both, self.head, self.num_heads)

    def from_queries(self, queries: range) -> KeyQuery:
        return replace(self, queries=intersect(self.queries, queries))

    def to_keys(self, keys: range) -> KeyQuery:
        return replace(self, keys=intersect(self.keys, keys))

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the rule on broadcast positions; ValueError if a table in it is too short."""
        return allowed_pairs(self.rule, self.num_heads, torch.tensor(self.head), q, k)

    def counted_from(self, start: int) -> KeyQuery:
        """Renumber positions from `start`, which is at or before the first query and the first key."""
        return replace(self, queries=moved(self.queries, -start), keys=moved(self.keys, -start))


def moved(positions: range, distance: int) -> range:
    """Shift positions by `distance`."""
    return range(positions.start + distance, positions.stop + distance, positions.step)
