"""The receptive field of a rule by which each token sees the visible keys of one run around itself."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ._receptive_field_layers import TokenPair
from ._relations import Relations
from ._runs import Runs, joined_runs, runs_of
from ._sections import Section

# N tokens, V of them visible


class _Heard(NamedTuple):
    """Whom each token has heard of beside itself: of the visible tokens those numbered start to stop - 1, if any."""

    start: Int64[Tensor, " N"]
    stop: Int64[Tensor, " N"]

    def same(self, other: _Heard) -> bool:
        return torch.equal(self.start, other.start) and torch.equal(self.stop, other.stop)


class RunField:
    """One section. What a token has heard of is a run of visible tokens again, whatever the number of layers.

    The runs of two visible tokens in one run overlap, each being in its own; and their ends ascend, so that of a whole
    run the first token hears farthest back and the last one farthest on.
    """

    def __init__(self, section: Section, runs: Runs) -> None:
        self.tokens, self.times = len(section.queries), len(section.copies)
        self.start = min(start for start, _ in section.copies)
        self._token = torch.arange(self.tokens)
        self._place: Int64[Tensor, " V"] = runs.visible.nonzero().squeeze(1)
        self._before = runs.before
        self._nothing = _Heard(self._before[:-1], self._before[1:])
        # After 1, 2, 4, ... layers, as long as that brings more.
        self._powers = [_Heard(self._before[runs.start], self._before[runs.stop])]
        while not (twice := self._through(self._powers[-1], self._powers[-1])).same(self._powers[-1]):
            self._powers.append(twice)
        self._closure = self._powers[-1]

    @classmethod
    def of(cls, relations: Relations, section: Section) -> RunField | None:
        """None for other rules."""
        if section.queries != section.keys:
            return None
        rules = {rule for group in section.groups for rule, _ in group.rules}
        runs = joined_runs([runs_of(rule, section.queries) for rule in rules])
        return cls(section, runs) if runs is not None and _ascend(runs) else None

    def _through(self, heard: _Heard, further: _Heard) -> _Heard:
        """What each token hears from those that it has heard of, of what these have."""
        if not len(self._place):
            return heard
        some = heard.start < heard.stop
        first, last = (self._place[number.clamp(0, len(self._place) - 1)] for number in (heard.start, heard.stop - 1))
        start, stop = further.start[first], further.stop[last]
        return _Heard(torch.where(some, start, heard.start), torch.where(some, stop, heard.stop))

    @cached_property
    def layers(self) -> int:
        """The least number after which there is nothing more: one above the most that do not reach everything."""
        if self._closure.same(self._nothing):
            return 0
        known, number = self._nothing, 0
        for power in reversed(range(len(self._powers))):
            further = self._then(known, power)
            if not further.same(self._closure):
                known, number = further, number + (1 << power)
        return number + 1

    def _then(self, known: _Heard, power: int) -> _Heard:
        """After 1 << power layers more. A hidden token has heard of nobody at first, and of its own run after one."""
        return self._powers[power] if known is self._nothing else self._through(known, self._powers[power])

    def _after(self, layers: int) -> _Heard:
        if layers >= self.layers:
            return self._closure
        known = self._nothing
        for power in reversed(range(layers.bit_length())):
            if layers >> power & 1:
                known = self._then(known, power)
        return known

    def pairs_after(self, layers: int) -> int:
        heard = self._after(layers)
        return (int((heard.stop - heard.start).sum()) + self.tokens - len(self._place)) * self.times

    @property
    def earlier(self) -> int:
        """Pairs that ever meet, of a token with an earlier one."""
        return int(self._earlier.sum()) * self.times

    @property
    def _earlier(self) -> Int64[Tensor, " N"]:
        return (torch.minimum(self._closure.stop, self._before[:-1]) - self._closure.start).clamp(min=0)

    @property
    def _later(self) -> Int64[Tensor, " N"]:
        return (self._closure.stop - torch.maximum(self._closure.start, self._before[1:])).clamp(min=0)

    def slowest(self) -> TokenPair | None:
        """The first pair that needs all layers."""
        if self.layers == 0:
            return None
        late = self._after(self.layers - 1)
        token = int(((late.start != self._closure.start) | (late.stop != self._closure.stop)).nonzero()[0])
        return self._moved(token, self._row(self._closure, token) & ~self._row(late, token))

    def first_missing(self, *, earlier: bool) -> TokenPair | None:
        """The first pair that never meets, with an earlier token or with a later one."""
        others = self._token if earlier else self.tokens - 1 - self._token
        missing = (others > (self._earlier if earlier else self._later)).nonzero()
        if not len(missing):
            return None
        token = int(missing[0])
        asked = self._token < token if earlier else self._token > token
        return self._moved(token, asked & ~self._row(self._closure, token))

    def _row(self, heard: _Heard, token: int) -> Bool[Tensor, " N"]:
        """The tokens that one token has heard of."""
        row = self._token == token
        row[self._place[heard.start[token] : heard.stop[token]]] = True
        return row

    def _moved(self, token: int, others: Tensor) -> TokenPair:
        return token + self.start, int(others.nonzero()[0]) + self.start


def _ascend(runs: Runs) -> bool:
    """Whether the ends of the visible tokens' runs ascend with the tokens."""
    return all(bool((ends[runs.visible].diff() >= 0).all()) for ends in (runs.start, runs.stop))
