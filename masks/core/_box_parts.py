"""Parts of boxes: residue classes and halves, each with the index of the box that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

from ._box import Box, Counts, Progression
from ._pattern import Pattern

_PAIRS_AT_ONCE = 1 << 20  # pairs evaluated together
_MOST_CLASSES = 1 << 6  # most residue classes if any class of queries may see any class of keys
_SMALL_FACTOR = 1 << 6  # prime factors below this are split off one by one; the cofactor stays whole
_LARGEST_SPACING = 1 << 33  # above the distance of any two positions


@dataclass(frozen=True)
class Owned:
    """Boxes with the indices of their owners: box i of `box` is part of the box or grid cell with index owner[i]."""

    owner: Tensor
    box: Box

    def __len__(self) -> int:
        return len(self.owner)

    def select(self, index: Tensor) -> Owned:
        return Owned(self.owner[index], self.box.select(index))


def residue_factors(rule: Pattern) -> tuple[list[int], list[int]]:
    """Return (together, apart), two lists of factors by which `cut_classes` cuts boxes into residue classes.

    together: factors of s, the rule's spacing or 2**33 if that is less. Query and key of an allowed pair are congruent
        modulo s.
    apart: factors of lcm(s, the rule's dilation rates) / s. The list is empty if this number exceeds 64, and if the
        rule depends on the distance alone, for which counting by diagonals is faster.
    """
    spacing = min(rule.spacing(), _LARGEST_SPACING)
    others = lcm(spacing, *rule.rates()) // spacing
    return _factors(spacing), [] if rule.period() == 1 or others > _MOST_CLASSES else _factors(others)


def _factors(number: int) -> list[int]:
    """Return the prime factors below 64 of a number, ascending and with multiplicity, then the cofactor if above 1."""
    found = []
    for factor in range(2, _SMALL_FACTOR):
        while number % factor == 0:
            found.append(factor)
            number //= factor
    return [*found, number] if number > 1 else found


def num_classes(owned: Owned, factor: int, together: bool) -> int:
    """Return the number of parts that `cut_classes` makes of each box with these arguments, empty parts included.

    There are min(factor, n) classes of queries, where n is the largest number of queries in a box; likewise of keys.
    The number of parts is that of query classes if `together` is True, else query classes times key classes.
    """
    queries, keys = (min(factor, int(side.count.max())) if len(owned) else 1 for side in (owned.box.q, owned.box.k))
    return queries if together else queries * keys


def cut_classes(owned: Owned, factor: int, together: bool) -> Owned:
    """Return the non-empty parts of boxes cut by residue class: a part has every `factor`-th query and key of a box.

    The owner of a part is the owner of its box. If `together` is True, a part's queries and keys are congruent modulo
    step * factor, and other pairs are dropped; a box must have equal steps, and queries and keys congruent modulo the
    step. If it is False, there is a part for each combination of a class of queries and a class of keys.
    """
    if not len(owned):
        return owned
    queries, keys = (torch.arange(min(factor, int(side.count.max()))) for side in (owned.box.q, owned.box.k))
    classes = [torch.arange(len(owned)), queries, *([] if together else [keys])]
    each, q_class, *others = torch.cartesian_prod(*classes).unbind(1)
    part = owned.select(each)
    q, k = _every_nth(part.box.q, factor, q_class), part.box.k
    k_class = ((q.first - k.first) // k.step).remainder(factor) if together else others[0]
    cut = Owned(part.owner, Box(part.box.head, q, _every_nth(k, factor, k_class)))
    return cut.select((cut.box.area > 0).nonzero().squeeze(1))


def _every_nth(progression: Progression, factor: int, begin: Tensor) -> Progression:
    """Return every `factor`-th term of each progression, from the term with index `begin` on."""
    count = (progression.count - begin + factor - 1).div(factor, rounding_mode="floor").clamp(min=0)
    return Progression(progression.first + progression.step * begin, progression.step * factor, count)


def in_chunks(owned: Owned, most: int) -> Iterator[Owned]:
    for part in torch.arange(len(owned)).split(most) if len(owned) else ():
        yield owned.select(part)


def by_size(owned: Owned) -> Iterator[Owned]:
    """Yield groups of boxes of similar size: within a group, their longer sides differ by less than a factor of 2."""
    size = torch.maximum(owned.box.q.count, owned.box.k.count).double().log2().long()
    for each in size.unique().tolist():
        yield owned.select(size == each)


def halves(owned: Owned, period: int = 1) -> Owned:
    """Return n boxes cut in two: n first halves, then n second halves; the owner of a half is the owner of its box.

    The side with more terms is cut, the queries if both have equally many: near the middle, at a multiple of `period`
    if possible (see `_half_size`). The first half of a box of one pair is empty.
    """
    q, k = owned.box.q, owned.box.k
    cut_q = q.count >= k.count
    q_half = torch.where(cut_q, _half_size(q, period), q.count)
    k_half = torch.where(cut_q, k.count, _half_size(k, period))
    first = Box(owned.box.head, replace(q, count=q_half), replace(k, count=k_half))
    rests = _every_nth(q, 1, torch.where(cut_q, q_half, 0)), _every_nth(k, 1, torch.where(cut_q, 0, k_half))
    return Owned(owned.owner.repeat(2), join_boxes([first, Box(owned.box.head, *rests)]))


def _half_size(progression: Progression, period: int) -> Tensor:
    """Return the number of terms of each progression before its cut.

    The cut is at the first multiple of `period` at or after the middle term. If this leaves no terms on one side, it is
    at the multiple before. If that leaves no terms on one side either, it is after half of the terms,
    rounded down.
    """
    first, step, half = progression.first, progression.step, progression.count // 2
    border = (first + step * half + period - 1) // period * period
    places = ((multiple - first + step - 1) // step for multiple in (border - period, border))
    for place in places:  # the later one counts
        half = torch.where((place > 0) & (place < progression.count), place, half)
    return half


def distinct_boxes(box: Box, period: int) -> tuple[Tensor, Box]:
    """Return (index of the group of each box, one box for each group): boxes equal up to a shift share a group.

    A shift moves queries and keys together by a multiple of `period`. Heads are ignored. The returned boxes have head 0
    and no negative positions.
    """
    place = box.q.first.remainder(period)
    columns = (place, box.k.first - box.q.first, box.q.count, box.k.count)
    alike, which = numbered(*columns)
    place, ahead, q_count, k_count = (column[which] for column in columns)
    # The smallest shift without negative positions.
    start = place + ((-place - ahead).clamp(min=0) + period - 1) // period * period
    q = Progression(start, box.q.step, q_count)
    return alike, Box(torch.zeros_like(place), q, Progression(start + ahead, box.k.step, k_count))


def numbered(*columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of each row of a table, index of one row for each number); equal rows have equal numbers.

    columns: the table's columns, integer tensors of shape (n,).

    Numbers count from 0, in the lexicographic order of the distinct rows.
    """
    # Rows become single numbers, which are sorted much faster than rows are by `unique(dim=0)`.
    number = torch.zeros_like(columns[0])
    if not len(number):
        return number, number
    below = 1  # exclusive bound of all numbers
    for column in columns:
        column = column - column.min()
        if below * (int(column.max()) + 1) >= 1 << 62:  # the product could exceed int64: renumber both, without gaps
            number, column = (each.unique(return_inverse=True)[1] for each in (number, column))
            below = int(number.max()) + 1
        span = int(column.max()) + 1
        number, below = number * span + column, below * span
    kinds, number = number.unique(return_inverse=True)
    return number, torch.empty_like(kinds).scatter_(0, number, torch.arange(len(number)))


def join(parts: Sequence[Owned]) -> Owned:
    return Owned(torch.cat([each.owner for each in parts]), join_boxes([each.box for each in parts]))


def join_boxes(boxes: Sequence[Box]) -> Box:
    q, k = (
        Progression(torch.cat([each.first for each in sides]), sides[0].step, torch.cat([each.count for each in sides]))
        for sides in ([box.q for box in boxes], [box.k for box in boxes])
    )
    return Box(torch.cat([box.head for box in boxes]), q, k)


def evaluate_pairs(rule: Pattern, owned: Owned, pairs: Counts) -> None:
    """Evaluate the rule for every pair of each part i, and add the number of allowed pairs to pairs[owner[i]] in place.

    It is fastest for parts of equal size, as all are padded to the largest. rule: the rule of one head.
    """
    # Parts without pairs may begin where the rule is not defined.
    owned = owned.select((owned.box.area > 0).nonzero().squeeze(1))
    if not len(owned):
        return
    mask_mod = rule.mask_mod(num_heads=1, device=torch.device("cpu"))
    largest = int(owned.box.q.count.max()) * int(owned.box.k.count.max())
    for few in in_chunks(owned, max(1, _PAIRS_AT_ONCE // largest)):
        q, k = few.box.q, few.box.k
        row, column = torch.arange(int(q.count.max()))[:, None], torch.arange(int(k.count.max()))
        inside = (row < q.count[:, None, None]) & (column < k.count[:, None, None])
        query = torch.where(inside, q.first[:, None, None] + q.step * row, q.first[:, None, None])
        key = torch.where(inside, k.first[:, None, None] + k.step * column, k.first[:, None, None])
        head = few.box.head[:, None, None]
        pairs.index_add_(0, few.owner, (mask_mod(torch.zeros_like(head), head, query, key) & inside).sum((1, 2)))
