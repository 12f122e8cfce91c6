"""Keys seen by any rule: bounds on ever smaller boxes say which, and what they leave in doubt is looked at by pair."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

import torch
from torch import Tensor

from ..core import Box, Progression, clip, joined_intervals, ranges_of
from ..orders import residue_rate
from ._asked import Asked

_MOST_PIECES = 1 << 16  # pairs of residue classes that a search begins with at most
_FRONTIER = 1 << 17  # boxes counted together: bounds the memory
_SIDE = 16  # a box of at most so many queries and keys is looked at pair by pair
_FEW_PAIRS = 1 << 16  # of all queries and keys: so many are looked at sooner than bounds are computed
_LOOKS = 1 << 13  # boxes looked at together


@dataclass(frozen=True)
class _Boxes:
    """n boxes: the first positions of both sides, and how many there are; their steps are those of the search."""

    q_first: Tensor
    q_count: Tensor
    k_first: Tensor
    k_count: Tensor

    def __len__(self) -> int:
        return len(self.q_first)

    def select(self, index: Tensor) -> _Boxes:
        return _Boxes(self.q_first[index], self.q_count[index], self.k_first[index], self.k_count[index])

    def key_runs(self) -> tuple[int, Tensor]:
        """How many different runs of keys the boxes have, and the number of each box's run."""
        longest = int(self.k_count.max()) + 1 if len(self) else 1
        runs, number = (self.k_first * longest + self.k_count).unique(return_inverse=True)
        return len(runs), number


def found_by_boxes(asked: Asked) -> list[range]:
    """The keys that see some query, as ranges."""
    if len(asked.queries) * len(asked.keys) <= _FEW_PAIRS:
        return _among_few(asked)
    search = _Search.of(asked)
    stack, found = [search.roots], _Found(search.k_step)
    while stack:
        boxes = stack.pop()
        if len(boxes) > _FRONTIER:
            stack += _parted(boxes)
            continue
        seen, boxes = search.decide(boxes)
        found.add(boxes=seen)
        small = (boxes.q_count <= _SIDE) & (boxes.k_count <= _SIDE)
        found.add_positions(search.look(boxes.select(small)))
        if not bool(small.all()):
            stack.append(search.split(boxes.select(~small)))
    return found.ranges()


@dataclass(frozen=True)
class _Search:
    """What is asked, and the boxes to begin with; positions of a box are `q_step` and `k_step` apart."""

    asked: Asked
    q_step: int
    k_step: int
    roots: _Boxes

    @classmethod
    def of(cls, asked: Asked) -> _Search:
        squares = asked.rule.squares(asked.head, asked.num_heads)
        if squares is not None:
            q, k = (
                clip(_progression(side).select(torch.zeros_like(first)), first, first + squares.side)
                for side, first in ((asked.queries, squares.q_first), (asked.keys, squares.k_first))
            )
            held = (q.count > 0) & (k.count > 0)
            roots = _Boxes(q.first[held], q.count[held], k.first[held], k.count[held])
            return cls(asked, q.step, k.step, roots)
        # In residue-major order what a dilated rule allows is dense.
        q, k = _classes(asked, residue_rate(asked.rule, _MOST_PIECES))
        node_q, node_k = torch.cartesian_prod(torch.arange(len(q.first)), torch.arange(len(k.first))).unbind(1)
        return cls(asked, q.step, k.step, _Boxes(q.first[node_q], q.count[node_q], k.first[node_k], k.count[node_k]))

    def decide(self, boxes: _Boxes) -> tuple[_Boxes, _Boxes]:
        """(boxes of which each key sees a query, boxes of whose keys that is not known)."""
        box = Box(
            torch.full_like(boxes.q_first, self.asked.head),
            Progression(boxes.q_first, self.q_step, boxes.q_count),
            Progression(boxes.k_first, self.k_step, boxes.k_count),
        )
        bounds = self.asked.rule.count(box, num_heads=self.asked.num_heads)
        # A key that sees no query misses all of them.
        seen = box.area - bounds.low < boxes.q_count
        runs, number = boxes.key_runs()
        known = torch.zeros(runs, dtype=torch.bool).index_fill(0, number[seen], True)
        return boxes.select(seen), boxes.select((bounds.high > 0) & ~known[number])

    def split(self, boxes: _Boxes) -> _Boxes:
        """Halve each side that is long, so that boxes with the same keys go on having the same keys."""
        q_first, q_count, box = _halved(boxes.q_first, boxes.q_count, self.q_step)
        k_first, k_count, part = _halved(boxes.k_first[box], boxes.k_count[box], self.k_step)
        return _Boxes(q_first[part], q_count[part], k_first, k_count)

    def look(self, boxes: _Boxes) -> Tensor:
        """The keys of small boxes that see a query, pair by pair."""
        runs, number = boxes.key_runs()
        first, count = (torch.zeros(runs, dtype=torch.int64) for _ in range(2))
        first[number], count[number] = boxes.k_first, boxes.k_count
        place = torch.arange(_SIDE)
        open_keys = place < count[:, None]
        seen = torch.zeros(runs, _SIDE, dtype=torch.bool)
        turn = _turns(number, runs)
        # In rounds: a few of the boxes with the same keys often show all of them.
        begin, rounds = 0, 1
        while len(turn):
            now = (turn >= begin) & (turn < begin + rounds)
            for some in now.nonzero().squeeze(1).split(_LOOKS):
                shown = self._pairs(boxes.select(some)).any(1)
                run, key = shown.nonzero().unbind(1)
                seen[number[some][run], key] = True
            later = ((turn >= begin + rounds) & (open_keys & ~seen).any(1)[number]).nonzero().squeeze(1)
            boxes, number, turn = boxes.select(later), number[later], turn[later]
            begin, rounds = begin + rounds, rounds * 2
        run, key = seen.nonzero().unbind(1)
        return first[run] + self.k_step * key

    def _pairs(self, boxes: _Boxes) -> Tensor:
        """(n, _SIDE, _SIDE): which pairs of each box are allowed."""
        place = torch.arange(_SIDE)
        in_q, in_k = (place < count[:, None] for count in (boxes.q_count, boxes.k_count))
        # Places beyond a box stand for its first position.
        q = boxes.q_first[:, None] + self.q_step * place * in_q
        k = boxes.k_first[:, None] + self.k_step * place * in_k
        return self.asked.allows(q[:, :, None], k[:, None, :]) & in_q[:, :, None] & in_k[:, None, :]


class _Found:
    """Keys that see a query, collected as runs within residue classes."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._firsts: list[Tensor] = []
        self._counts: list[Tensor] = []

    def add(self, boxes: _Boxes) -> None:
        self._firsts.append(boxes.k_first)
        self._counts.append(boxes.k_count)

    def add_positions(self, positions: Tensor) -> None:
        self._firsts.append(positions)
        self._counts.append(torch.ones_like(positions))

    def ranges(self) -> list[range]:
        first, count = torch.cat(self._firsts), torch.cat(self._counts)
        if not len(first):
            return []
        # One line for all classes, far enough apart that they do not touch.
        length = int((first // self.step + count).max()) + 1
        place = first % self.step * length + first // self.step
        begin, end = joined_intervals(place, place + count)
        first, last = (side % length * self.step + side // length for side in (begin, end - 1))
        return [range(*run, self.step) for run in zip(first.tolist(), (last + 1).tolist(), strict=True)]


def _among_few(asked: Asked) -> list[range]:
    """By a look at each pair."""
    q, k = (torch.arange(side.start, side.stop, side.step) for side in (asked.queries, asked.keys))
    return list(ranges_of(k[asked.allows(q[:, None], k).any(0)]))


def _classes(asked: Asked, rate: int) -> tuple[Progression, Progression]:
    """Queries and keys by their residue modulo a rate; as they are where that makes too many classes."""
    sides = [_progression(side) for side in (asked.queries, asked.keys)]
    cycles = [min(rate // gcd(rate, side.step), int(side.count)) for side in sides]
    if cycles[0] * cycles[1] > _MOST_PIECES:
        return sides[0], sides[1]
    q, k = (_by_residue(side, cycle, rate) for side, cycle in zip(sides, cycles, strict=True))
    return q, k


def _by_residue(side: Progression, cycle: int, rate: int) -> Progression:
    place = torch.arange(cycle)
    step = lcm(rate, side.step)
    count = (side.count - 1 - place) // (step // side.step) + 1
    return Progression(side.first + side.step * place, step, count)


def _progression(positions: range) -> Progression:
    return Progression(torch.tensor([positions.start]), positions.step, torch.tensor([len(positions)]))


def _halved(first: Tensor, count: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """(first, count, which it comes from) of the halves of long progressions, and of the others as they are."""
    half = torch.where(count > _SIDE, (count + 1) // 2, count)
    cut = (half < count).nonzero().squeeze(1)
    origin = torch.cat([torch.arange(len(first)), cut])
    return torch.cat([first, first[cut] + step * half[cut]]), torch.cat([half, (count - half)[cut]]), origin


def _parted(boxes: _Boxes) -> list[_Boxes]:
    """Two halves, where boxes with the same keys stay together as far as may be."""
    order = boxes.k_first.argsort(stable=True)
    return [boxes.select(half) for half in order.tensor_split(2)]


def _turns(number: Tensor, runs: int) -> Tensor:
    """For each box how many boxes with the same keys come before it."""
    order = number.argsort(stable=True)
    counts = torch.bincount(number, minlength=runs)
    turn = torch.empty_like(number)
    turn[order] = torch.arange(len(number)) - (counts.cumsum(0) - counts)[number[order]]
    return turn
