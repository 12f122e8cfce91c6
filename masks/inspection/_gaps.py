"""Gaps: queries without any key, and keys without any query."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..core import Bound, Box, Pattern, Progression, Squares, clip
from ._pair_counts import Group, groups_of

# N tokens of one side, n of them

_MOST_PAIRS = 1 << 27  # evaluations in all; the bounds of a box take as long as _COUNT evaluations
_COUNT = 8
_AT_ONCE = 1 << 20
_MOST_BOXES = 1 << 22  # at once; bounds the memory
_NEAREST = 7  # number of powers of two that are tried as distance between a token and a partner
_TOGETHER = 64  # adjacent tokens that are ruled out together
_SIDE = 16  # boxes up to this side are evaluated pair by pair


@dataclass(frozen=True)
class Gap:
    """Number of tokens of one side without a pair, in every head and in at least one head, and the first of each."""

    in_every_head: int
    in_some_head: int
    first_in_every_head: int | None
    first_in_some_head: int | None


@dataclass(frozen=True)
class Gaps:
    """Queries without any key, whose output is 0, and keys without any query; tokens are given by index."""

    queries: Gap
    keys: Gap


def gaps_of(bound: Bound) -> Gaps | None:
    """Exact gaps; None if that takes over _MOST_PAIRS evaluations, as above some ten million tokens."""
    queries = range(bound.q_offset, bound.q_offset + bound.num_queries)
    keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
    groups, budget = groups_of(bound), _Budget(_MOST_PAIRS)
    try:
        return Gaps(_gap(groups, queries, keys, True, budget), _gap(groups, keys, queries, False, budget))
    except _TooManyPairsError:
        return None


def _gap(groups: tuple[Group, ...], own: range, others: range, by_query: bool, budget: _Budget) -> Gap:
    budget.take(len(own))
    in_every, in_some = torch.ones(len(own), dtype=torch.bool), torch.zeros(len(own), dtype=torch.bool)
    first_rules: dict[Pattern, Bool[Tensor, " N"]] = {}  # heads often share their first rule
    for group in groups:
        (first, _), *others_of_head = group.rules
        if first not in first_rules:
            first_rules[first] = torch.ones(len(own), dtype=torch.bool)
            _Search(first, own, others, by_query, budget, first_rules[first]).run()
        lacking = first_rules[first].clone()
        for rule, _ in others_of_head if bool(lacking.any()) else ():
            _Search(rule, own, others, by_query, budget, lacking).run()
        in_every &= lacking
        in_some |= lacking
    lists = [tokens.nonzero().squeeze(1) for tokens in (in_every, in_some)]
    return Gap(*map(len, lists), *(int(tokens[0]) if len(tokens) else None for tokens in lists))


class _TooManyPairsError(Exception):
    """The budget of evaluations is spent, or there are too many boxes for the memory."""


@dataclass
class _Budget:
    left: int

    def take(self, pairs: int) -> None:
        self.left -= pairs
        if self.left < 0:
            raise _TooManyPairsError


@dataclass
class _Search:
    """Search for tokens of `own` without a pair under a rule for one head; one side is the queries, the other the keys.

    `lacking` marks the tokens of `own` in question, by index; after `run`, only tokens without a pair with `others`.
    """

    rule: Pattern
    own: range
    others: range
    by_query: bool
    budget: _Budget
    lacking: Bool[Tensor, " N"]

    def run(self) -> None:
        """Cheapest tests first: single pairs find most tokens with a pair, bounds most tokens without, then boxes."""
        squares = self.rule.squares(0, 1)
        if squares is not None:
            self._search(self._within(squares))
            return
        self._look_at(0)  # most tokens see themselves
        none = self._without_pairs(self._undecided(self._lines(_TOGETHER)))
        box = self._lines(1)
        for level in count():
            before, box = int(self.lacking.sum()), self._undecided(box)
            none |= self._without_pairs(box)
            if level and 8 * int(self.lacking.sum()) >= 7 * before:
                break
            part, other = _halves(self._sides(box)[1], 1)
            box = self._box(self._sides(box)[0].select(part), other)
        for sign in (-1, 1):
            for power in range(_NEAREST):
                if not self._look_at(sign << power):
                    break
        whole = (Progression(torch.tensor([run.start]), 1, torch.tensor([len(run)])) for run in (self.own, self.others))
        self._search(self._box(*whole))
        self.lacking |= none

    def _within(self, squares: Squares) -> Box:
        """Intersection of the rule's squares with both sides; the rule has no pair outside its squares."""
        firsts = (squares.q_first, squares.k_first) if self.by_query else (squares.k_first, squares.q_first)
        own, other = (
            clip(Progression(first, 1, torch.full_like(first, squares.side)), run.start, run.stop)
            for first, run in zip(firsts, (self.own, self.others), strict=True)
        )
        box = self._box(own, other)
        return box.select(box.area > 0)

    def _look_at(self, distance: int) -> bool:
        """Evaluate pairs at this distance, clamped to `others`; returns True if many lacking tokens have one."""
        index = self.lacking.nonzero().squeeze(1)
        for some in index.split(_AT_ONCE):
            token = self.own.start + some
            self.lacking[some] = ~self._allowed(token, (token + distance).clamp(self.others.start, self.others[-1]))
        return 8 * int(self.lacking[index].sum()) < 7 * len(index)

    def _lines(self, together: int) -> Box:
        """Boxes of all `others` with runs of at most `together` adjacent lacking tokens."""
        index = self.lacking.nonzero().squeeze(1)
        begins = torch.ones(len(index), dtype=torch.bool)
        begins[1:] = (index.diff() > 1) | (index[1:] % together == 0)
        first = self.own.start + index[begins]
        runs = Progression(first, 1, torch.bincount(begins.cumsum(0) - 1, minlength=len(first)))
        start, length = torch.full_like(first, self.others.start), torch.full_like(first, len(self.others))
        return self._box(runs, Progression(start, 1, length))

    def _undecided(self, box: Box) -> Box:
        """Clear tokens that bounds prove to have a pair; returns the boxes with undecided tokens."""
        self.budget.take(_COUNT * len(box.head))
        if len(box.head) > _MOST_BOXES:
            raise _TooManyPairsError
        bounds, (own, other) = self.rule.count(box, num_heads=1), self._sides(box)
        full = box.area - bounds.low < other.count  # fewer hidden pairs than one token has partners
        self.lacking &= ~self._held(own.select(full))
        box = box.select(~full & (bounds.high > 0))
        own, before = self._sides(box)[0], torch.nn.functional.pad(self.lacking.cumsum(0), (1, 0))
        begin = own.first - self.own.start
        return box.select(before[begin + own.count] > before[begin])

    def _without_pairs(self, box: Box) -> Bool[Tensor, " N"]:
        """Lacking tokens in none of the undecided boxes, so without a pair; clears them from `lacking`."""
        none = self.lacking & ~self._held(self._sides(box)[0])
        self.lacking &= ~none
        return none

    def _held(self, runs: Progression) -> Bool[Tensor, " N"]:
        """Mask of the tokens in any of these runs."""
        begin, change = runs.first - self.own.start, torch.zeros(len(self.own) + 1, dtype=torch.int64)
        change.index_add_(0, begin, torch.ones_like(begin))
        change.index_add_(0, begin + runs.count, torch.full_like(begin, -1))
        return change.cumsum(0)[:-1] > 0

    def _search(self, box: Box) -> None:
        """Halve boxes until bounds decide, or until they are small enough to evaluate every pair."""
        while len(box.head):
            box = self._undecided(box)
            small = torch.maximum(box.q.count, box.k.count) <= _SIDE
            for some in small.nonzero().squeeze(1).split(_AT_ONCE // _SIDE**2):
                self._evaluate(*self._sides(box.select(some)))
            box = box.select(~small)
            own, other = self._sides(box)
            part, own = _halves(own, _SIDE)
            rest, other = _halves(other.select(part), _SIDE)
            box = self._box(own.select(rest), other)

    def _evaluate(self, own: Progression, other: Progression) -> None:
        place = torch.arange(_SIDE)
        token, partner = (side.first[:, None] + place.minimum(side.count[:, None] - 1) for side in (own, other))
        self.lacking[token[self._allowed(token[:, :, None], partner[:, None, :]).any(2)] - self.own.start] = False

    def _allowed(self, token: Tensor, partner: Tensor) -> Tensor:
        """Evaluate the rule at broadcast positions; takes the pairs from the budget."""
        mask_mod, zero = self.rule.mask_mod(num_heads=1, device=torch.device("cpu")), torch.tensor(0)
        allowed = mask_mod(zero, zero, *((token, partner) if self.by_query else (partner, token)))
        self.budget.take(allowed.numel())
        return allowed

    def _box(self, own: Progression, other: Progression) -> Box:
        return Box(torch.zeros_like(own.first), *((own, other) if self.by_query else (other, own)))

    def _sides(self, box: Box) -> tuple[Progression, Progression]:
        """Progressions of `own` and of `others`."""
        return (box.q, box.k) if self.by_query else (box.k, box.q)


def _halves(runs: Progression, least: int) -> tuple[Int64[Tensor, " n"], Progression]:
    """(index of the original run, part): runs longer than `least` cut in two, shorter runs unchanged."""
    half = 1 << (runs.count - 1).clamp(min=1).double().log2().long()  # a power of two: blocks stay whole
    half = torch.where(runs.count > least, half, runs.count)
    cut = (half < runs.count).nonzero().squeeze(1)
    first, count = torch.cat([runs.first, (runs.first + half)[cut]]), torch.cat([half, (runs.count - half)[cut]])
    return torch.cat([torch.arange(len(half)), cut]), Progression(first, 1, count)
