"""Asked: which of some keys do some queries see, and the same question put more narrowly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core import And, Pattern, intersect


@dataclass(frozen=True)
class Asked:
    """Which of these keys see some query, by the intersection of some rules, each of which is one for one head.

    `head` is a global head that follows the rules.
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

    def of(self, *factors: Pattern) -> Asked:
        """The same of other rules."""
        return Asked(tuple(dict.fromkeys(factors)), self.queries, self.keys, self.head, self.num_heads)

    def within(self, queries: range, keys: range) -> Asked:
        """The same of those queries and keys that are among these."""
        both = intersect(self.queries, queries), intersect(self.keys, keys)
        return Asked(self.factors, *both, self.head, self.num_heads)

    def from_queries(self, queries: range) -> Asked:
        return replace(self, queries=intersect(self.queries, queries))

    def to_keys(self, keys: range) -> Asked:
        return replace(self, keys=intersect(self.keys, keys))

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """The rule pair by pair, over broadcast positions; ValueError where a table in it ends too early."""
        mask_mod = self.rule.mask_mod(num_heads=self.num_heads, device=torch.device("cpu"))
        nothing = torch.zeros((), dtype=torch.int64)
        try:
            return mask_mod(nothing, nothing + self.head, q, k)
        except IndexError as error:
            asked = [f"{name} {int(x.min())} to {int(x.max())}" for name, x in (("queries", q), ("keys", k))]
            raise ValueError(f"{self.rule!r} has no answer for {', '.join(asked)}: {error}") from error

    def counted_from(self, start: int) -> Asked:
        """The same where the rules count positions from `start`, at or before the first query and the first key."""
        return replace(self, queries=moved(self.queries, -start), keys=moved(self.keys, -start))


def moved(positions: range, distance: int) -> range:
    """The positions that lie `distance` further on."""
    return range(positions.start + distance, positions.stop + distance, positions.step)
