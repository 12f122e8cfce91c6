"""Runs: rules by which each token that sees any sees the visible ones of one run around itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..core._algebra import And, Every, Or
from ..core._pattern import Pattern
from ..patterns._band import Causal, LocalWindow
from ..patterns._dilated import Dilated
from ..patterns._per_document import PerDocument
from ..patterns.run_time._spans import Spans
from ..patterns.run_time._visible_keys import KeySet

# N tokens

_MOST_TOKENS = 1 << 24  # their runs, and what is made of them, fill about 2 GB


@dataclass(frozen=True)
class Runs:
    """Token i sees the visible tokens of start[i] to stop[i] - 1, a run in which it lies itself, if it sees any.

    A token that sees nothing has a run of its own.
    """

    start: Int64[Tensor, " N"]
    stop: Int64[Tensor, " N"]
    visible: Bool[Tensor, " N"]
    seeing: Bool[Tensor, " N"]

    def __and__(self, other: Runs) -> Runs:
        start, stop = torch.maximum(self.start, other.start), torch.minimum(self.stop, other.stop)
        return Runs(start, stop, self.visible & other.visible, self.seeing & other.seeing)

    def joined(self, other: Runs) -> Runs | None:
        """What either lets a token see; None where the visible keys of the two differ."""
        if not torch.equal(self.visible, other.visible):
            return None
        start, stop = torch.minimum(self.start, other.start), torch.maximum(self.stop, other.stop)
        return Runs(start, stop, self.visible, self.seeing | other.seeing)

    @cached_property
    def before(self) -> Int64[Tensor, " N+1"]:
        """How many tokens before each position are visible."""
        return torch.nn.functional.pad(self.visible.long().cumsum(0), (1, 0))

    @property
    def pairs(self) -> int:
        """How many pairs are allowed."""
        return int(((self.before[self.stop] - self.before[self.start]) * self.seeing).sum())

    def lines(self) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
        """The tokens that see any, and those that are seen by any."""
        seeing = self.seeing & (self.before[self.stop] > self.before[self.start])
        ends = torch.zeros(len(self.start) + 1, dtype=torch.int64)
        ends.index_add_(0, self.start, seeing.long()).index_add_(0, self.stop, -seeing.long())
        return seeing, self.visible & (ends.cumsum(0)[:-1] > 0)


def joined_runs(found: list[Runs | None]) -> Runs | None:
    """What any of several rules lets a token see; None where one of them is not of runs, or their keys differ."""
    return reduce(lambda mine, theirs: mine and theirs and mine.joined(theirs), found)


def runs_of(rule: Pattern, tokens: range) -> Runs | None:
    """The runs of tokens at these positions, counted from the first; None for other rules, and for too many tokens."""
    if len(tokens) > _MOST_TOKENS:
        return None
    if isinstance(rule, And | Or):
        parts = [runs_of(part, tokens) for part in rule.parts]
        if isinstance(rule, Or):
            return joined_runs(parts)
        return reduce(lambda mine, theirs: mine and theirs and mine & theirs, parts)
    if isinstance(rule, PerDocument):
        # A rule of distances is the same counted from anywhere.
        inner = runs_of(rule.part, tokens) if rule.part.period() == 1 else None
        documents = runs_of(rule.spans, tokens)
        return inner and documents and inner & documents
    position = torch.arange(tokens.start, tokens.stop)
    every = torch.ones_like(position, dtype=torch.bool)
    if isinstance(rule, KeySet):
        return _cut(*_whole(position), rule.only_row[tokens.start : tokens.stop], every, tokens)
    if isinstance(rule, Dilated):
        return _active(rule, position, tokens)
    if isinstance(rule, Spans):
        return _inside(rule, position, tokens)
    ends = _ends(rule, position)
    return None if ends is None else _cut(*ends, every, every, tokens)


def _ends(rule: Pattern, position: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where the run of each token begins, and one past its end."""
    if isinstance(rule, Every):
        return _whole(position)
    if isinstance(rule, Causal):
        return torch.zeros_like(position), position + 1
    if isinstance(rule, LocalWindow):
        return position - rule.left, position + rule.right + 1
    return None


def _whole(position: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(position), torch.full_like(position, int(position[-1]) + 1)


def _active(rule: Dilated, position: Tensor, tokens: range) -> Runs:
    """The active tokens of each segment."""
    assert isinstance(rule.offset, int), "a rule for one head has its offset resolved"
    start = position // rule.segment * rule.segment
    active = (position - start) % rule.rate == rule.offset
    return _cut(start, start + rule.segment, active, active, tokens)


def _inside(spans: Spans, position: Tensor, tokens: range) -> Runs:
    """The tokens of each document. Padding lies in no run but its own, of a token that sees nothing."""
    every = torch.ones_like(position, dtype=torch.bool)
    if not len(spans.starts):
        return _cut(position, position, every, ~every, tokens)
    number = torch.searchsorted(spans.starts, position, right=True) - 1
    start, stop = spans.starts[number.clamp(min=0)], spans.stops[number.clamp(min=0)]
    inside = (number >= 0) & (position < stop)
    return _cut(start, stop, every, inside, tokens)


def _cut(start: Tensor, stop: Tensor, visible: Tensor, seeing: Tensor, tokens: range) -> Runs:
    """Counted from the first of the tokens. Who sees nothing has a run of its own."""
    alone = torch.arange(len(tokens))
    start, stop = ((end - tokens.start).clamp(0, len(tokens)) for end in (start, stop))
    return Runs(torch.where(seeing, start, alone), torch.where(seeing, stop, alone + 1), visible, seeing)
