"""Parts of boxes: cut into residue classes and halves, each with the number of the box that it is a part of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

from ._box import Box, Counts, Progression
from ._pattern import Pattern

_CELLS = 1 << 20  # pairs looked at together
_MOST_CLASSES = 1 << 6  # a side, into which a box is cut where each class of queries may see each of keys
_SMALL = 1 << 6  # factors below are split off one by one, what is left is one factor
_BEYOND = 1 << 33  # no two positions are as far apart


@dataclass(frozen=True)
class Owned:
    """Parts of boxes, and the number of the box that each is a part of."""

    owner: Tensor
    box: Box

    def __len__(self) -> int:
        return len(self.owner)

    def select(self, index: Tensor) -> Owned:
        return Owned(self.owner[index], self.box.select(index))


def residue_factors(rule: Pattern) -> tuple[list[int], list[int]]:
    """Factors by which positions are cut into residue classes.

    The first are those of the rule's spacing, where a query's class tells that of its keys; the others what its rates
    have beside, unless that makes many classes, or diagonals settle a rule of distances sooner.
    """
    spacing = min(rule.spacing(), _BEYOND)
    others = lcm(spacing, *rule.rates()) // spacing
    return _factors(spacing), [] if rule.period() == 1 or others > _MOST_CLASSES else _factors(others)


def _factors(number: int) -> list[int]:
    """Its small prime factors, ascending, and what is left of it."""
    found = []
    for factor in range(2, _SMALL):
        while number % factor == 0:
            found.append(factor)
            number //= factor
    return [*found, number] if number > 1 else found


def num_classes(owned: Owned, factor: int, together: bool) -> int:
    """Parts into which `cut_classes` cuts each box: a class for each remainder, but no more than there are terms."""
    queries, keys = (min(factor, int(side.count.max())) if len(owned) else 1 for side in (owned.box.q, owned.box.k))
    return queries if together else queries * keys


def cut_classes(owned: Owned, factor: int, together: bool) -> Owned:
    """The boxes of every factor-th term of each side.

    With `together` only those whose queries and keys agree modulo the new step, as they do modulo the old one.
    """
    if not len(owned):
        return owned
    queries, keys = (torch.arange(min(factor, int(side.count.max()))) for side in (owned.box.q, owned.box.k))
    classes = [torch.arange(len(owned)), queries, *([] if together else [keys])]
    each, q_class, *others = torch.cartesian_prod(*classes).unbind(1)
    part = owned.select(each)
    q, k = _every(part.box.q, factor, q_class), part.box.k
    k_class = ((q.first - k.first) // k.step).remainder(factor) if together else others[0]
    cut = Owned(part.owner, Box(part.box.head, q, _every(k, factor, k_class)))
    return cut.select((cut.box.area > 0).nonzero().squeeze(1))


def _every(progression: Progression, factor: int, begin: Tensor) -> Progression:
    """Every factor-th term, from the term of this index on."""
    count = (progression.count - begin + factor - 1).div(factor, rounding_mode="floor").clamp(min=0)
    return Progression(progression.first + progression.step * begin, progression.step * factor, count)


def few_at_once(owned: Owned, most: int) -> Iterator[Owned]:
    """The same in portions."""
    for part in torch.arange(len(owned)).split(most) if len(owned) else ():
        yield owned.select(part)


def by_size(owned: Owned) -> Iterator[Owned]:
    """The same in portions of boxes of about one size."""
    size = torch.maximum(owned.box.q.count, owned.box.k.count).double().log2().long()
    for each in size.unique().tolist():
        yield owned.select(size == each)


def halves(owned: Owned, period: int = 1) -> Owned:
    """Each box cut in two across its longer side, at a multiple of the period near the middle if there is one."""
    q, k = owned.box.q, owned.box.k
    cut_q = q.count >= k.count
    q_half, k_half = torch.where(cut_q, _middle(q, period), q.count), torch.where(cut_q, k.count, _middle(k, period))
    first = Box(owned.box.head, replace(q, count=q_half), replace(k, count=k_half))
    rests = _every(q, 1, torch.where(cut_q, q_half, 0)), _every(k, 1, torch.where(cut_q, 0, k_half))
    return Owned(owned.owner.repeat(2), join_boxes([first, Box(owned.box.head, *rests)]))


def _middle(progression: Progression, period: int) -> Tensor:
    """How many terms lie below a multiple of the period near the middle; half of them if that is none or all."""
    first, step, half = progression.first, progression.step, progression.count // 2
    border = (first + step * half + period - 1) // period * period
    for place in ((border - first + step - 1) // step, (border - period - first + step - 1) // step):
        half = torch.where((place > 0) & (place < progression.count) & (half == progression.count // 2), place, half)
    return half


def distinct_boxes(box: Box, period: int) -> tuple[Tensor, Box]:
    """Boxes of head 0 of which no two are shifts of each other by a period, and for each box the one it is like."""
    place = box.q.first.remainder(period)
    columns = (place, box.k.first - box.q.first, box.q.count, box.k.count)
    alike, which = numbered(*columns)
    place, ahead, q_count, k_count = (column[which] for column in columns)
    # As far to the left as positions allow.
    start = place + ((-place - ahead).clamp(min=0) + period - 1) // period * period
    q = Progression(start, box.q.step, q_count)
    return alike, Box(torch.zeros_like(place), q, Progression(start + ahead, box.k.step, k_count))


def numbered(*columns: Tensor) -> tuple[Tensor, Tensor]:
    """(the number of each row of these columns, equal for equal rows and ascending; the index of a row of each number).

    Sorting single numbers takes a fraction of the time of `unique(dim=0)`.
    """
    number = torch.zeros_like(columns[0])
    if not len(number):
        return number, number
    below = 1  # what all numbers are below
    for column in columns:
        column = column - column.min()
        if below * (int(column.max()) + 1) >= 1 << 62:
            number, column = (each.unique(return_inverse=True)[1] for each in (number, column))
            below = int(number.max()) + 1
        span = int(column.max()) + 1
        number, below = number * span + column, below * span
    kinds, number = number.unique(return_inverse=True)
    return number, torch.empty_like(kinds).scatter_(0, number, torch.arange(len(number)))


def join(parts: Sequence[Owned]) -> Owned:
    """Parts of one step, one after the other; at least one."""
    return Owned(torch.cat([each.owner for each in parts]), join_boxes([each.box for each in parts]))


def join_boxes(boxes: Sequence[Box]) -> Box:
    """Boxes of one step, one after the other."""
    q, k = (
        Progression(torch.cat([each.first for each in sides]), sides[0].step, torch.cat([each.count for each in sides]))
        for sides in ([box.q for box in boxes], [box.k for box in boxes])
    )
    return Box(torch.cat([box.head for box in boxes]), q, k)


def look_at_pairs(rule: Pattern, owned: Owned, pairs: Counts) -> None:
    """Add to each box's pairs those of its parts, counted one by one; parts of about one size take the least time."""
    if not len(owned):
        return
    mask_mod = rule.mask_mod(num_heads=1, device=torch.device("cpu"))
    largest = int(owned.box.q.count.max()) * int(owned.box.k.count.max())
    for few in few_at_once(owned, max(1, _CELLS // largest)):
        q, k = few.box.q, few.box.k
        row, column = torch.arange(int(q.count.max()))[:, None], torch.arange(int(k.count.max()))
        inside = (row < q.count[:, None, None]) & (column < k.count[:, None, None])
        query = torch.where(inside, q.first[:, None, None] + q.step * row, q.first[:, None, None])
        key = torch.where(inside, k.first[:, None, None] + k.step * column, k.first[:, None, None])
        head = few.box.head[:, None, None]
        pairs.index_add_(0, few.owner, (mask_mod(torch.zeros_like(head), head, query, key) & inside).sum((1, 2)))
