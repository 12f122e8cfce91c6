"""Receptive field: which tokens a token reaches through the layers of a model, exactly or by a sample of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from math import prod, sqrt
from typing import Any

import torch

from ..core import Bound, Ranges, union_of
from ..needs import needed_keys
from ..patterns import Neighborhood
from ._pair_counts import drawn_tokens
from ._relations import Relations, Section, groups_of

TokenPair = tuple[int, int]  # a token, and one that it reaches or not

_ALL_LAYERS = 8  # growth has an entry for each number of layers up to this, then for powers of two and the last
_SAMPLES = 8
_MOST_LAYERS = 64
_MOST_SEARCHES = (
    1 << 9
)  # for the keys of a range of queries in a kind of heads, over all sampled tokens: about a second


@dataclass(frozen=True)
class ReceptiveField:
    """Which tokens each token reaches after some layers of one pattern: exact, for all pairs of tokens.

    A token reaches itself, and after each layer all that the tokens reach to which it attends in any head: heads are
    mixed between layers, and residual connections keep what was reached. Pairs are (token, token that it reaches),
    with (t, t) among them, and indices count from the first token.

    The receptive field saturates after `layers`, and not before: `slowest` is the first pair that needs them all.
    `growth` holds (layers, pairs reached), the last entry for `layers`. All other pairs are unreachable at any depth:
    `never_earlier` of them with an earlier token, `never_later` with a later one, each with its first pair.
    """

    num_tokens: int
    layers: int
    growth: tuple[tuple[int, int], ...]
    slowest: TokenPair | None
    never_earlier: int
    never_later: int
    first_never_earlier: TokenPair | None
    first_never_later: TokenPair | None

    @property
    def pairs(self) -> int:
        """Pairs that are reached at any depth."""
        return self.growth[-1][1]

    @property
    def earlier_pairs(self) -> int:
        """All pairs of a token with an earlier one; as many as of a token with a later one."""
        return self.num_tokens * (self.num_tokens - 1) // 2

    def to_data(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {**asdict(self), "growth": [{"layers": layers, "pairs": pairs} for layers, pairs in self.growth]}


@dataclass(frozen=True)
class FollowedTokens:
    """A sample of receptive fields, where that of all tokens is not counted: exact for `tokens`, drawn evenly.

    `reached` holds for each of the `tokens` how many tokens it reaches after 1, 2, 3, ... layers, itself among them.
    `finished` says of each whether its receptive field has saturated.
    """

    num_tokens: int
    tokens: tuple[int, ...]
    reached: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]

    @property
    def layers_at_least(self) -> int:
        """A lower bound on the layers after which the receptive field of all tokens saturates."""
        return max(map(len, self.reached))

    @property
    def growth(self) -> tuple[tuple[int, float, float], ...]:
        """(layers, mean number of tokens reached, its standard error), estimated without bias from the sample."""
        number = len(self.tokens)
        found = []
        for layers in range(1, self.layers_at_least + 1):
            sizes = torch.tensor([[1, *sizes][: layers + 1][-1] for sizes in self.reached], dtype=torch.float64)
            left_out = max(0.0, 1 - number / self.num_tokens)
            error = float(sizes.std()) * sqrt(left_out / number) if number > 1 else 0.0
            found.append((layers, float(sizes.mean()), error))
        return tuple(found)

    def to_data(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        growth = [
            {"layers": layers, "mean_reached": mean, "standard_error": error} for layers, mean, error in self.growth
        ]
        return {**asdict(self), "layers_at_least": self.layers_at_least, "growth": growth}


def receptive_field_of(relations: Relations) -> ReceptiveField:
    """Raises ValueError if queries and keys are not the same tokens, TooManySquaresError if too little repeats."""
    _require_self_attention(relations.bound)
    tokens = relations.bound.num_queries
    fields = _fields(relations)
    alone = tokens - sum(field.tokens * field.times for field in fields)
    layers = max((field.layers for field in fields), default=0)
    growth = tuple((number, alone + sum(field.pairs_after(number) for field in fields)) for number in _listed(layers))
    earlier = sum(field.earlier for field in fields)
    later = growth[-1][1] - tokens - earlier
    half = tokens * (tokens - 1) // 2
    slowest = (pair for field in fields if field.layers == layers and (pair := field.slowest()) is not None)
    first = next((field for field in fields if field.start == 0), None)
    return ReceptiveField(
        tokens,
        layers,
        growth,
        min(slowest, default=None),
        half - earlier,
        half - later,
        _first_missing(first, tokens, earlier=True),
        _first_missing(first, tokens, earlier=False),
    )


def follow_tokens(bound: Bound) -> FollowedTokens:
    """Some tokens, one drawn from each of as many equal parts, layer by layer while that takes about a second."""
    _require_self_attention(bound)
    tokens = tuple(drawn_tokens(bound.num_queries, _SAMPLES))
    known: list[Ranges] = [(range(bound.q_offset + token, bound.q_offset + token + 1),) for token in tokens]
    reached: list[list[int]] = [[] for _ in tokens]
    growing, searches, rules = set(range(len(tokens))), 0, len(groups_of(bound))
    for _ in range(_MOST_LAYERS):
        searches += rules * sum(len(known[index]) for index in growing)
        if not growing or searches > _MOST_SEARCHES:
            break
        for index in sorted(growing):
            size, known[index] = sum(map(len, known[index])), _one_layer(bound, known[index])
            if sum(map(len, known[index])) == size:
                growing.remove(index)
            else:
                reached[index].append(sum(map(len, known[index])))
    finished = tuple(index not in growing for index in range(len(tokens)))
    return FollowedTokens(bound.num_queries, tokens, tuple(map(tuple, reached)), finished)


def _one_layer(bound: Bound, known: Ranges) -> Ranges:
    """The tokens reached, after one layer more."""
    keys = (range(bound.k_offset, bound.k_offset + bound.num_keys),)
    # One head for each set of rules.
    heads = [group.heads[0] + bound.head_offset for group in groups_of(bound)]
    seen = needed_keys(bound.pattern, queries=known, keys=keys, heads=heads, num_heads_global=bound.num_heads_global)
    return union_of([*known, *seen])


def _require_self_attention(bound: Bound) -> None:
    if not bound.is_self_attention:
        raise ValueError(
            "a receptive field needs queries and keys that are the same tokens; got "
            f"{bound.num_queries} queries from {bound.q_offset} on and {bound.num_keys} keys from {bound.k_offset} on"
        )


def _listed(layers: int) -> list[int]:
    """The numbers of layers of which growth has an entry."""
    if layers <= _ALL_LAYERS:
        return list(range(layers + 1))[min(layers, 1) :]
    return [*(1 << power for power in range((layers - 1).bit_length())), layers]


def _first_missing(first: SectionField | GridField | None, num_tokens: int, *, earlier: bool) -> TokenPair | None:
    """The first unreachable pair of all. `first` is the section that begins with token 0, if there is one."""
    stop = 1 if first is None else first.tokens  # token 0 and the tokens from here on do not reach each other
    across = [] if stop >= num_tokens else [(stop, 0) if earlier else (0, stop)]
    inside = None if first is None else first.first_missing(earlier=earlier)
    return min([*across, *([] if inside is None else [inside])], default=None)


class SectionField:
    """One section: the pairs reached after any number of layers, as squares, by doubling the number of layers."""

    def __init__(self, relations: Relations, section: Section) -> None:
        self.squares, self.side, self.tokens = relations.squares, section.side, len(section.queries)
        self.times, self.start = len(section.copies), min(start for start, _ in section.copies)
        everything = self.squares.rectangle(range(self.tokens), range(self.tokens), self.side)
        self.nothing = self.squares.both(self.squares.diagonal(self.side), everything)
        self._before = self.squares.both(self.squares.below_diagonal(self.side), everything)
        self._after = self.squares.others(self.squares.either(self._before, self.nothing))
        self._after = self.squares.both(self._after, everything)
        # After 1, 2, 4, ... layers, as long as that brings more.
        self._powers = [self.squares.either(self.nothing, relations.of_all(section))]
        while (twice := self.squares.through(self._powers[-1], self._powers[-1])) != self._powers[-1]:
            self._powers.append(twice)
        self.closure = self._powers[-1]
        self.earlier = self.squares.pairs(self.squares.both(self.closure, self._before), self.side) * self.times

    @cached_property
    def layers(self) -> int:
        """After how many layers the section saturates: one more than the most after which it has not."""
        if self.closure == self.nothing:
            return 0
        known, number = self.nothing, 0
        for power in reversed(range(len(self._powers))):
            further = self.squares.through(known, self._powers[power])
            if further != self.closure:
                known, number = further, number + (1 << power)
        return number + 1

    def _reached(self, layers: int) -> int:
        """The pairs after so many layers."""
        if layers >= self.layers:
            return self.closure
        known = self.nothing
        for power in reversed(range(layers.bit_length())):
            if layers >> power & 1:
                known = self.squares.through(known, self._powers[power])
        return known

    def pairs_after(self, layers: int) -> int:
        return self.squares.pairs(self._reached(layers), self.side) * self.times

    def slowest(self) -> TokenPair | None:
        """The first pair that needs all layers."""
        if self.layers == 0:
            return None
        return self._first(self.squares.both(self.closure, self.squares.others(self._reached(self.layers - 1))))

    def first_missing(self, *, earlier: bool) -> TokenPair | None:
        """The first unreachable pair, with an earlier token or with a later one."""
        return self._first(
            self.squares.both(self.squares.others(self.closure), self._before if earlier else self._after)
        )

    def _first(self, square: int) -> TokenPair | None:
        pair = self.squares.first_pair(square, self.side)
        return pair and (pair[0] + self.start, pair[1] + self.start)


class GridField:
    """A neighbourhood on a whole grid in row-major order: a token reaches another where it does along each axis."""

    times, start = 1, 0

    def __init__(self, rule: Neighborhood) -> None:
        self._axes = [_axis(*each) for each in rule.axes]
        self._strides = [prod(rule.grid[axis + 1 :]) for axis in range(len(rule.grid))]
        self.tokens = prod(rule.grid)
        self.layers = max(axis.layers for axis in self._axes)
        self.earlier, inner = 0, 1
        for axis in reversed(self._axes):
            # Of two tokens the earlier one is earlier on the first axis on which they differ.
            self.earlier = axis.earlier * inner + axis.tokens * self.earlier
            inner *= axis.pairs_after(axis.layers)

    def pairs_after(self, layers: int) -> int:
        return prod(axis.pairs_after(layers) for axis in self._axes)

    def slowest(self) -> TokenPair | None:
        """The first pair that needs all layers: it does along one axis, and is at 0 on the others."""
        return self._first(axis.slowest() if axis.layers == self.layers else None for axis in self._axes)

    def first_missing(self, *, earlier: bool) -> TokenPair | None:
        """The first unreachable pair, with an earlier token or with a later one."""
        return self._first(axis.first_missing(earlier=earlier) for axis in self._axes)

    def _first(self, pairs: Iterable[TokenPair | None]) -> TokenPair | None:
        placed = zip(pairs, self._strides, strict=True)
        return min(((pair[0] * stride, pair[1] * stride) for pair, stride in placed if pair), default=None)


def _axis(length: int, radius: int, rate: int) -> SectionField:
    rule = Neighborhood((length,), (radius,), (rate,))
    relations = Relations(rule.bind(num_heads=1, num_queries=length, num_keys=length))
    return SectionField(relations, relations.sections[0])


def _fields(relations: Relations) -> list[SectionField] | list[GridField]:
    """Those of the sections; a neighbourhood that all heads follow over the whole of its grid goes by its axes."""
    groups = chain.from_iterable(section.groups for section in relations.sections)
    rules = {rule for group in groups for rule, _ in group.rules}
    rule = next(iter(rules)) if len(rules) == 1 else None
    if isinstance(rule, Neighborhood) and len(rule.grid) > 1:
        (section,) = relations.sections
        if section.queries == section.keys == range(prod(rule.grid)):
            return [GridField(rule)]
    return [SectionField(relations, section) for section in relations.sections]
