"""Receptive field: after how many layers which tokens can have heard of which."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ._describe_relations import Relations
from ._describe_sections import Section

Pair = tuple[int, int]  # a token, and one that it sees or does not see

_ALL_LAYERS = 8  # so few are told one by one; of more those that are powers of two, and the last


@dataclass(frozen=True)
class ReceptiveField:
    """What a token can have heard of after some layers of one pattern, exactly.

    A token knows of itself, and after each layer of all that the tokens know which it sees in any head: heads are mixed
    between layers, and what a token knew stays with it, as by residual connections. Pairs are (token, token it has
    heard of) with (t, t) among them, and indices count from the first token.

    `layers` are enough: more bring nothing, and `slowest` needs them all. `growth` says how many pairs there are after
    some numbers of layers, of which the last is `layers`. All others never meet, however many layers there are:
    `never_earlier` of them with an earlier token, `never_later` with a later one, each with its first pair.
    """

    num_tokens: int
    layers: int
    growth: tuple[tuple[int, int], ...]
    slowest: Pair | None
    never_earlier: int
    never_later: int
    first_never_earlier: Pair | None
    first_never_later: Pair | None

    @property
    def pairs(self) -> int:
        """All pairs that ever meet."""
        return self.growth[-1][1]

    @property
    def earlier_pairs(self) -> int:
        """All pairs of a token with an earlier one; as many as of a token with a later one."""
        return self.num_tokens * (self.num_tokens - 1) // 2

    def to_data(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {**asdict(self), "growth": [{"layers": layers, "pairs": pairs} for layers, pairs in self.growth]}


def receptive_field_of(relations: Relations) -> ReceptiveField:
    """Raises ValueError if queries and keys are not the same tokens, TooManySquaresError if too little repeats."""
    bound = relations.bound
    if (bound.num_queries, bound.q_offset) != (bound.num_keys, bound.k_offset):
        raise ValueError(
            "a receptive field needs queries and keys that are the same tokens; got "
            f"{bound.num_queries} queries from {bound.q_offset} on and {bound.num_keys} keys from {bound.k_offset} on"
        )
    fields = [_Field(relations, section) for section in relations.sections]
    tokens = bound.num_queries
    alone = tokens - sum(field.tokens * field.times for field in fields)
    layers = max((field.layers for field in fields), default=0)
    growth = tuple((number, alone + sum(field.pairs_after(number) for field in fields)) for number in _told(layers))
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


class _Field:
    """One section: who has heard of whom after some layers, as squares, for any number of layers."""

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
        """The least number after which there is nothing more: one above the most that do not reach everything."""
        if self.closure == self.nothing:
            return 0
        known, number = self.nothing, 0
        for power in reversed(range(len(self._powers))):
            further = self.squares.through(known, self._powers[power])
            if further != self.closure:
                known, number = further, number + (1 << power)
        return number + 1

    def after(self, layers: int) -> int:
        """The pairs after so many layers."""
        if layers >= self.layers:
            return self.closure
        known = self.nothing
        for power in reversed(range(layers.bit_length())):
            if layers >> power & 1:
                known = self.squares.through(known, self._powers[power])
        return known

    def pairs_after(self, layers: int) -> int:
        return self.squares.pairs(self.after(layers), self.side) * self.times

    def slowest(self) -> Pair | None:
        """The first pair that needs all layers."""
        if self.layers == 0:
            return None
        late = self.squares.both(self.closure, self.squares.others(self.after(self.layers - 1)))
        return _moved(self.squares.first_pair(late, self.side), self.start)

    def first_missing(self, *, earlier: bool) -> Pair | None:
        """The first pair that never meets, with an earlier token or with a later one."""
        asked = self._before if earlier else self._after
        missing = self.squares.both(self.squares.others(self.closure), asked)
        return _moved(self.squares.first_pair(missing, self.side), self.start)


def _moved(pair: Pair | None, start: int) -> Pair | None:
    return pair and (pair[0] + start, pair[1] + start)


def _first_missing(first: _Field | None, num_tokens: int, *, earlier: bool) -> Pair | None:
    """The first pair of all that never meets. `first` is the section that begins with token 0, if there is one."""
    stop = 1 if first is None else first.tokens  # token 0 and the tokens from here on never meet
    across = [] if stop >= num_tokens else [(stop, 0) if earlier else (0, stop)]
    inside = None if first is None else first.first_missing(earlier=earlier)
    return min([*across, *([] if inside is None else [inside])], default=None)


def _told(layers: int) -> list[int]:
    """The numbers of layers that growth tells."""
    if layers <= _ALL_LAYERS:
        return list(range(layers + 1))[min(layers, 1) :]
    return [*(1 << power for power in range((layers - 1).bit_length())), layers]
