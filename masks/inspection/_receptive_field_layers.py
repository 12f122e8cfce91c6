"""Layers: who has heard of whom after so many of them, as squares, by doubling instead of layer by layer."""

from __future__ import annotations

from functools import cached_property

from ._relations import Relations
from ._sections import Section

TokenPair = tuple[int, int]  # a token, and one that it has heard of or not


class SectionField:
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

    def slowest(self) -> TokenPair | None:
        """The first pair that needs all layers."""
        if self.layers == 0:
            return None
        late = self.squares.both(self.closure, self.squares.others(self.after(self.layers - 1)))
        return _moved(self.squares.first_pair(late, self.side), self.start)

    def first_missing(self, *, earlier: bool) -> TokenPair | None:
        """The first pair that never meets, with an earlier token or with a later one."""
        asked = self._before if earlier else self._after
        missing = self.squares.both(self.squares.others(self.closure), asked)
        return _moved(self.squares.first_pair(missing, self.side), self.start)


def _moved(pair: TokenPair | None, start: int) -> TokenPair | None:
    return pair and (pair[0] + start, pair[1] + start)
