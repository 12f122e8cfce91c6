"""Runs: rules by which each token sees the visible keys of one run around itself, its ends ascending with the token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from .._algebra import And, Every, Or
from .._causal import Causal
from .._dilated import Dilated
from .._local_window import LocalWindow
from .._pattern import Pattern
from .._per_document import PerDocument
from .._spans import Spans
from .._visible_keys import KeySet

# N tokens


@dataclass(frozen=True)
class Runs:
    """Token i sees the visible tokens of start[i] to stop[i] - 1, among which it is itself.

    A token that a rule lets see nothing has a run of its own: it knows itself in any case.
    """

    start: Int64[Tensor, " N"]
    stop: Int64[Tensor, " N"]
    visible: Bool[Tensor, " N"] | None = None  # None: all are

    def __and__(self, other: Runs) -> Runs:
        start, stop = torch.maximum(self.start, other.start), torch.minimum(self.stop, other.stop)
        if self.visible is None or other.visible is None:
            return Runs(start, stop, other.visible if self.visible is None else self.visible)
        return Runs(start, stop, self.visible & other.visible)

    def joined(self, other: Runs) -> Runs | None:
        """What either lets a token see; None where the visible keys of the two differ."""
        mine, theirs = self.visible, other.visible
        if (mine is None) != (theirs is None) or (mine is not None and not torch.equal(mine, theirs)):
            return None
        return Runs(torch.minimum(self.start, other.start), torch.maximum(self.stop, other.stop), mine)


def joined_runs(found: list[Runs | None]) -> Runs | None:
    """What any of several rules lets a token see; None where one of them is not of runs, or their keys differ."""
    return reduce(lambda mine, theirs: mine and theirs and mine.joined(theirs), found)


def runs_of(rule: Pattern, tokens: range) -> Runs | None:
    """The runs of tokens at these positions, counted from the first of them; None for other rules."""
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
    if isinstance(rule, KeySet):
        every = _cut(torch.full((len(tokens),), tokens.start), torch.full((len(tokens),), tokens.stop), tokens)
        return Runs(every.start, every.stop, rule.only_row[tokens.start : tokens.stop])
    ends = _ends(rule, torch.arange(tokens.start, tokens.stop))
    return None if ends is None else _cut(*ends, tokens)


def _ends(rule: Pattern, position: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where the run of each token begins, and one past its end."""
    if isinstance(rule, Every):
        return torch.zeros_like(position), position[-1:].expand(len(position)) + 1
    if isinstance(rule, Causal):
        return torch.zeros_like(position), position + 1
    if isinstance(rule, LocalWindow):
        return position - rule.left, position + rule.right + 1
    if isinstance(rule, Dilated) and rule.rate == 1:
        start = position // rule.segment * rule.segment
        return start, start + rule.segment
    if isinstance(rule, Spans):
        return _span_ends(rule, position)
    return None


def _span_ends(spans: Spans, position: Tensor) -> tuple[Tensor, Tensor]:
    """Those of documents; padding is alone."""
    number = torch.searchsorted(spans.starts, position, right=True) - 1
    if not len(spans.starts):
        return position, position + 1
    start, stop = spans.starts[number.clamp(min=0)], spans.stops[number.clamp(min=0)]
    inside = (number >= 0) & (position < stop)
    return torch.where(inside, start, position), torch.where(inside, stop, position + 1)


def _cut(start: Tensor, stop: Tensor, tokens: range) -> Runs:
    return Runs(*((end - tokens.start).clamp(0, len(tokens)) for end in (start, stop)))
