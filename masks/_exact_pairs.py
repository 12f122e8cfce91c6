"""Exact pairs: how many pairs of a box a rule allows, where its bounds alone leave a doubt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

from ._box import Box, Counts, Progression
from ._diagonals import settle_by_diagonals
from ._pattern import Pattern

_CELL_SIDE = 64  # boxes up to this side are looked at pair by pair
_CELLS = 1 << 20  # pairs looked at together
_FRONTIER = 1 << 16  # boxes counted together
_MOST_CLASSES = 1 << 6  # a side, into which a box is cut where each class of queries may see each of keys


def exact_pairs(rule: Pattern, box: Box) -> Counts:
    """Allowed pairs of each box of step 1, of a rule for one head.

    What bounds leave in doubt is cut: into residue classes, in which dilated rules are dense, and then into halves.
    Boxes about as long as wide are settled by their diagonals where the rule repeats along them, small ones pair by
    pair.
    """
    pairs = torch.zeros_like(box.area)
    together, apart = _factors(rule)
    cuts = [*((factor, True) for factor in together), *((factor, False) for factor in apart)]
    stack = [(0, part) for part in _few(_Owned(torch.arange(len(pairs)), box), _FRONTIER)]
    while stack:
        level, part = stack.pop()
        if level < len(cuts):
            rest = _cut(_settle(rule, part, pairs), *cuts[level])
        else:
            rest = _halves(_settle_all(rule, part, pairs))
        stack.extend((level + 1, few) for few in _few(rest, _FRONTIER))
    return pairs


@dataclass(frozen=True)
class _Owned:
    """Parts of boxes, and the number of the box that each is a part of."""

    owner: Tensor
    box: Box

    def __len__(self) -> int:
        return len(self.owner)

    def select(self, index: Tensor) -> _Owned:
        return _Owned(self.owner[index], self.box.select(index))


def _settle(rule: Pattern, owned: _Owned, pairs: Counts, *, by_diagonals: bool = False) -> _Owned:
    """Add up what is certain; returns the others."""
    box = owned.box
    bounds = rule.count(box, num_heads=1)
    if by_diagonals:
        longer, shorter = torch.maximum(box.q.count, box.k.count), torch.minimum(box.q.count, box.k.count)
        bounds = settle_by_diagonals(rule, box, bounds, num_heads=1, where=longer <= 2 * shorter)
    exact = bounds.low == bounds.high
    pairs.index_add_(0, owned.owner[exact], bounds.low[exact])
    return owned.select((~exact).nonzero().squeeze(1))


def _settle_all(rule: Pattern, owned: _Owned, pairs: Counts) -> _Owned:
    """The same, with all diagonals and small boxes besides. Boxes of about one size have as many diagonals."""
    rest = [_settle(rule, part, pairs, by_diagonals=True) for part in _by_size(owned)]
    left = _Owned(torch.cat([each.owner for each in rest]), _join([each.box for each in rest]))
    small = torch.maximum(left.box.q.count, left.box.k.count) <= _CELL_SIDE
    _look(rule, left.select(small.nonzero().squeeze(1)), pairs)
    return left.select((~small).nonzero().squeeze(1))


def _factors(rule: Pattern) -> tuple[list[int], list[int]]:
    """Factors by which positions are cut into residue classes.

    The first are those of the rule's spacing, where a query's class tells that of its keys; the others what its rates
    have beside, unless that makes many classes, or diagonals settle a rule of distances sooner.
    """
    spacing = rule.spacing()
    others = lcm(spacing, *rule.rates()) // spacing
    return _primes(spacing), [] if rule.period() == 1 or others > _MOST_CLASSES else _primes(others)


def _primes(number: int) -> list[int]:
    """Its prime factors, ascending."""
    found, factor = [], 2
    while number > 1:
        if factor * factor > number:
            factor = number
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def _cut(owned: _Owned, factor: int, together: bool) -> _Owned:
    """The boxes of every factor-th term of each side.

    With `together` only those whose queries and keys agree modulo the new step, as they do modulo the old one.
    """
    classes = [torch.arange(len(owned)), torch.arange(factor), *([] if together else [torch.arange(factor)])]
    each, q_class, *others = torch.cartesian_prod(*classes).unbind(1)
    part = owned.select(each)
    q, k = _every(part.box.q, factor, q_class), part.box.k
    k_class = ((q.first - k.first) // k.step).remainder(factor) if together else others[0]
    cut = _Owned(part.owner, Box(part.box.head, q, _every(k, factor, k_class)))
    return cut.select((cut.box.area > 0).nonzero().squeeze(1))


def _every(progression: Progression, factor: int, begin: Tensor) -> Progression:
    """Every factor-th term, from the term of this index on."""
    count = (progression.count - begin + factor - 1).div(factor, rounding_mode="floor").clamp(min=0)
    return Progression(progression.first + progression.step * begin, progression.step * factor, count)


def _few(owned: _Owned, most: int) -> Iterator[_Owned]:
    """The same in portions."""
    for part in torch.arange(len(owned)).split(most) if len(owned) else ():
        yield owned.select(part)


def _by_size(owned: _Owned) -> Iterator[_Owned]:
    """The same in portions of boxes of about one size."""
    size = torch.maximum(owned.box.q.count, owned.box.k.count).double().log2().long()
    for each in size.unique().tolist():
        yield owned.select(size == each)


def _halves(owned: _Owned) -> _Owned:
    """Each box cut in two across its longer side."""
    q, k = owned.box.q, owned.box.k
    cut_q = q.count >= k.count
    q_half, k_half = torch.where(cut_q, q.count // 2, q.count), torch.where(cut_q, k.count, k.count // 2)
    first = Box(owned.box.head, replace(q, count=q_half), replace(k, count=k_half))
    q_from, k_from = torch.where(cut_q, q_half, 0), torch.where(cut_q, 0, k_half)
    return _Owned(owned.owner.repeat(2), _join([first, Box(owned.box.head, _rest(q, q_from), _rest(k, k_from))]))


def _rest(progression: Progression, begin: Tensor) -> Progression:
    """The terms from these indices on."""
    return Progression(progression.first + progression.step * begin, progression.step, progression.count - begin)


def _join(boxes: Sequence[Box]) -> Box:
    """Boxes of one step, one after the other."""
    q, k = (
        Progression(torch.cat([each.first for each in sides]), sides[0].step, torch.cat([each.count for each in sides]))
        for sides in ([box.q for box in boxes], [box.k for box in boxes])
    )
    return Box(torch.cat([box.head for box in boxes]), q, k)


def _look(rule: Pattern, owned: _Owned, pairs: Counts) -> None:
    """Count small boxes pair by pair."""
    mask_mod = rule.mask_mod(num_heads=1, device=torch.device("cpu"))
    for few in _few(owned, _CELLS // _CELL_SIDE**2):
        q, k = few.box.q, few.box.k
        row, column = torch.arange(int(q.count.max()))[:, None], torch.arange(int(k.count.max()))
        inside = (row < q.count[:, None, None]) & (column < k.count[:, None, None])
        query = torch.where(inside, q.first[:, None, None] + q.step * row, q.first[:, None, None])
        key = torch.where(inside, k.first[:, None, None] + k.step * column, k.first[:, None, None])
        head = few.box.head[:, None, None]
        pairs.index_add_(0, few.owner, (mask_mod(torch.zeros_like(head), head, query, key) & inside).sum((1, 2)))
