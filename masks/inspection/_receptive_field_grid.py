"""A neighbourhood's receptive field: that of each axis, since a token moves along all axes independently."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import prod

from ..patterns._neighborhood import Neighborhood
from ._receptive_field_layers import SectionField, TokenPair
from ._relations import Relations


def grid_of(relations: Relations) -> Neighborhood | None:
    """The neighbourhood that all heads follow, over the whole of its grid; None for other patterns and for one axis."""
    rules = {rule for section in relations.sections for group in section.groups for rule, _ in group.rules}
    rule = next(iter(rules)) if len(rules) == 1 else None
    if not isinstance(rule, Neighborhood) or len(rule.grid) == 1:
        return None
    (section,) = relations.sections
    return rule if section.queries == section.keys == range(prod(rule.grid)) else None


class GridField:
    """Of a grid in row-major order: a token has heard of another where it has along each axis."""

    times, start = 1, 0

    def __init__(self, rule: Neighborhood) -> None:
        self._axes = [_axis(*each) for each in rule.axes]
        sizes = [axis.tokens for axis in self._axes]
        self._strides = [prod(sizes[index + 1 :]) for index in range(len(sizes))]
        self.tokens = prod(sizes)
        self.layers = max(axis.layers for axis in self._axes)

    @cached_property
    def earlier(self) -> int:
        """Pairs that ever meet, of a token with an earlier one: earlier on the first axis on which they differ."""
        found, inner = 0, 1
        for axis in reversed(self._axes):
            # Where two tokens do not differ along an axis, one has heard of the other.
            found, inner = axis.earlier * inner + axis.tokens * found, inner * axis.pairs_after(axis.layers)
        return found

    def pairs_after(self, layers: int) -> int:
        return prod(axis.pairs_after(layers) for axis in self._axes)

    def slowest(self) -> TokenPair | None:
        """The first pair that needs all layers: it does along one axis, and is at 0 on the others."""
        return self._first(axis.slowest() if axis.layers == self.layers else None for axis in self._axes)

    def first_missing(self, *, earlier: bool) -> TokenPair | None:
        """The first pair that never meets, with an earlier token or with a later one."""
        return self._first(axis.first_missing(earlier=earlier) for axis in self._axes)

    def _first(self, pairs: Iterable[TokenPair | None]) -> TokenPair | None:
        placed = zip(pairs, self._strides, strict=True)
        return min(((pair[0] * stride, pair[1] * stride) for pair, stride in placed if pair), default=None)


def _axis(length: int, radius: int, rate: int) -> SectionField:
    rule = Neighborhood((length,), (radius,), (rate,))
    relations = Relations(rule.bind(num_heads=1, num_queries=length, num_keys=length))
    return SectionField(relations, relations.sections[0])
