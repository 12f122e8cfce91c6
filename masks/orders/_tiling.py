"""Tilings: orders of a grid's tokens tile by tile, and a neighbourhood over their slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import Bounds, Box, MaskMod, Pattern, Progression
from ..patterns import Neighborhood, Rectangle, Rectangles, joined, select
from ._layout import Layout, Permutation, Pieces

# N tokens, S slots, n runs of slots, R rectangles

_RUNS_AT_ONCE = 1 << 14  # boxes whose rectangles are held together: bounds the memory


@dataclass(frozen=True)
class Tiling(Permutation):
    """Order of a grid's tokens: tiles in row-major order, and within each tile its tokens in row-major order.

    There is no padding: where a tile's side does not divide an axis, the last tiles along that axis are smaller.
    Positions number the grid in row-major order.
    """

    grid: tuple[int, ...]
    tile: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return prod(self.grid)

    @property
    def is_natural(self) -> bool:
        """True if each tile is a run of consecutive tokens in row-major order: slot s then holds token s."""
        pairs = list(zip(self.tile, self.grid, strict=True))
        # Along some axis tiles may have any length: along earlier ones they have one place, along later ones all.
        before = [all(min(pair) == 1 for pair in pairs[:axis]) for axis in range(len(pairs))]
        after = [all(side >= length for side, length in pairs[axis + 1 :]) for axis in range(len(pairs))]
        return any(cut_before and whole_after for cut_before, whole_after in zip(before, after, strict=True))

    def positions(self, device: torch.device | str | None = None) -> Int64[Tensor, " S"]:
        slot = torch.arange(self.num_slots, device=device)
        box = self._whole_grid(slot)
        for axis, unit in self._cuts():
            size = unit * _tokens_per_place(box, axis)
            number = slot // size
            slot, box = slot - number * size, _children(box, axis, unit, number, number + 1)
        return sum((side.first * stride for side, stride in self._sides_and_strides(box)), torch.zeros_like(slot))

    def slots(self, device: torch.device | str | None = None) -> Int64[Tensor, " N"]:
        token = torch.arange(self.num_slots, device=device)
        slot, box = torch.zeros_like(token), self._whole_grid(token)
        places = [
            token // stride % length
            for length, (_, stride) in zip(self.grid, self._sides_and_strides(box), strict=True)
        ]
        for axis, unit in self._cuts():
            number = (places[axis] - box[axis].first) // unit
            slot, box = (
                slot + number * unit * _tokens_per_place(box, axis),
                _children(box, axis, unit, number, number + 1),
            )
        return slot

    def in_pieces(self, rule: Pattern, origin: int) -> tuple[Pattern, Pieces]:
        """Return (an equivalent rule over slot numbers, all slots as one slot run).

        `rule` must be a neighbourhood on this grid, and `origin` 0.
        """
        # Over positions, slot runs would be only as long as a tile is wide.
        assert isinstance(rule, Neighborhood)
        assert origin == 0, "a tiling orders the whole grid"
        return Tiled(rule, self), Layout(self.num_slots).pieces(0)

    def rectangles(self, start: Int64[Tensor, " n"], stop: Int64[Tensor, " n"]) -> Rectangles:
        """Return the non-empty rectangles of the grid into which n slot runs are cut.

        Slot run i has slots start[i] to stop[i] - 1; i is the `run` of its rectangles.
        """
        rest = _RunParts(torch.arange(len(start)), start, stop, self._whole_grid(start)).select(start < stop)
        found = []
        for axis, unit in self._cuts():
            whole, rest = _cut_at_children(rest, axis, unit)
            found.append(whole)
        runs, boxes = zip(*((part.run, part.sides) for part in found), strict=True)
        return Rectangles(torch.cat(runs), joined(*boxes))

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Yield (axis, length) of the successive cuts of the grid that define the order of slots.

        Each cut divides all rectangles along `axis` into children of this length, which follow one another in the
        order. The first cuts, one for each axis, give the tiles; as many further cuts give single tokens.
        """
        yield from enumerate(self.tile)
        yield from ((axis, 1) for axis in range(len(self.tile)))

    def _whole_grid(self, like: Tensor) -> Rectangle:
        return tuple(Progression(torch.zeros_like(like), 1, torch.full_like(like, length)) for length in self.grid)

    def _sides_and_strides(self, box: Rectangle) -> list[tuple[Progression, int]]:
        """Return (progression of coordinates, row-major stride of the grid) for each axis of a rectangle."""
        return [(side, prod(self.grid[axis + 1 :])) for axis, side in enumerate(box)]


@dataclass(frozen=True)
class _RunParts:
    """Parts of slot runs, each within one rectangle of the grid; empty if start >= stop.

    run: index of the slot run.
    start, stop: the part has slots start to stop - 1, counted from the rectangle's first slot.
    box: the rectangle of each part.
    """

    run: Tensor
    start: Tensor
    stop: Tensor
    box: Rectangle

    def select(self, index: Tensor) -> _RunParts:
        return _RunParts(self.run[index], self.start[index], self.stop[index], select(self.box, index))


def _cut_at_children(runs: _RunParts, axis: int, unit: int) -> tuple[Rectangles, _RunParts]:
    """Return (rectangles, rest): the whole children that each run contains, as one rectangle, and its other parts.

    A child is a part of the run's `box` with `unit` places along `axis`; a last child that is smaller than the others
    never counts as whole. A run without a whole child has no rectangle. Each part in `rest` is inside one child, and
    not empty.
    """
    size = unit * _tokens_per_place(runs.box, axis)
    begin, end = -(-runs.start // size), runs.stop // size
    whole, before = begin < end, runs.start < begin * size
    after = (begin <= end) & (end * size < runs.stop)
    boxes = _children(runs.box, axis, unit, begin, end)
    ends = _part_in_child(runs, begin - 1, size, axis, unit).select(before)
    beginnings = _part_in_child(runs, end, size, axis, unit).select(after)
    rest = _RunParts(
        torch.cat([ends.run, beginnings.run]),
        torch.cat([ends.start, beginnings.start]),
        torch.cat([ends.stop, beginnings.stop]),
        joined(ends.box, beginnings.box),
    )
    return Rectangles(runs.run[whole], select(boxes, whole)), rest


def _part_in_child(runs: _RunParts, child: Tensor, size: Tensor, axis: int, unit: int) -> _RunParts:
    """Return the part of each slot run i in child number child[i] of the run's rectangle; its `box` is the child.

    Children have `unit` places along `axis` and are numbered from 0. A run without a slot in the child, such as in
    number -1, gets an empty part, whose `box` has no meaning.

    size: number of slots of each child but the last, which may have fewer.
    """
    start, stop = (runs.start - child * size).clamp(min=0), torch.minimum(runs.stop - child * size, size)
    return _RunParts(runs.run, start, stop, _children(runs.box, axis, unit, child, child + 1))


def _tokens_per_place(box: Rectangle, axis: int) -> Tensor:
    """Return the number of tokens of a rectangle at one place along `axis`: the product of its other sides."""
    return prod((side.count for side in (*box[:axis], *box[axis + 1 :])), start=torch.ones_like(box[axis].count))


def _children(box: Rectangle, axis: int, unit: int, begin: Tensor, end: Tensor) -> Rectangle:
    """Return the part of each rectangle i that consists of its children begin[i] to end[i] - 1.

    A child has `unit` places along `axis`, and the whole length along other axes; the last may be smaller.
    """
    side = box[axis]
    part = Progression(side.first + unit * begin, 1, torch.minimum(unit * end, side.count) - unit * begin)
    return (*box[:axis], part, *box[axis + 1 :])


@dataclass(frozen=True)
class Tiled(Pattern):
    """Neighbourhood over slots of a tiling instead of positions, for block lists; users' patterns do not contain it."""

    kind = "tiled"  # without constructor and JSON

    rule: Neighborhood
    order: Tiling

    def parameters(self) -> dict[str, Any]:
        return {"rule": self.rule, "tile": self.order.tile}

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner, positions = self.rule.mask_mod(num_heads=num_heads, device=device), self.order.positions(device)
        return lambda b, h, q, k: inner(b, h, positions[q], positions[k])

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        """Return bounds on the allowed pairs of each box; they are exact if all rates and strides are at most 64."""
        # The slots of a box are a few rectangles of the grid, whose pairs are counted axis by axis.
        assert box.q.step == box.k.step == 1, "slots come in runs"
        low, high = torch.zeros_like(box.area), torch.zeros_like(box.area)
        for part in torch.arange(len(box.head)).split(_RUNS_AT_ONCE):
            q, k = (self._rectangles(side.select(part)) for side in (box.q, box.k))
            bounds = self.rule.count_pairs(q, k, len(part))
            low[part], high[part] = bounds.low, bounds.high
        return Bounds(low, high)

    def likeness(self, box: Box, *, num_heads: int) -> tuple[Tensor, ...]:
        return self.rule.likeness_of(self._rectangles(box.q), self._rectangles(box.k), box)

    def _rectangles(self, runs: Progression) -> Rectangles:
        return self.order.rectangles(runs.first, runs.first + runs.count)
