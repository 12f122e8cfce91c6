"""Base of patterns in which a query on a token grid sees the keys in a window, or in a union of windows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Owned,
    Pair,
    Pattern,
    Progression,
    Ranges,
    Reason,
    among,
    evaluate_pairs,
    listing,
    span,
    within,
)
from ._grid import Rectangle, Rectangles, fits, hull, pairs_of, rectangles_of, select

_FEW_PAIRS = 1 << 16  # up to this many are evaluated, which is faster than counting
_BOXES_AT_ONCE = 1 << 14  # boxes whose rectangles are held at once: bounds the memory
_MOST_RUNS = 1 << 10  # a window over more rows of the grid than this has no closed form in `row`


class AxisWindows(Protocol):
    """The windows of keys that queries see along one axis of a grid."""

    def seen(self, first: int, last: int) -> Ranges:
        """Return the places that queries at places `first` to `last` (included) see, as ascending ranges.

        If the rule has a dilation rate, first and last are in one residue class, and only queries of this class count.
        """
        ...

    def count(self, q: Progression, k: Progression) -> Bounds:
        """Return bounds on the number of pairs, in each of n boxes of places, whose key is in the query's window.

        A box is all places of a progression of q with all places of one of k; it may be empty, or go beyond the axis.
        """
        ...

    def likeness(self, q: Progression, k: Progression) -> tuple[Tensor, Tensor]:
        """Return two integer tensors, with an entry for each of the n boxes of `count`.

        Boxes with equal entries in both tensors, and with equal counts and steps of q and of k, have equal masks.
        """
        ...


class OnGrid(Pattern):
    """Base of patterns that allow a pair iff the key is in the query's window, or union of windows, on a token grid.

    Tokens are in row-major order. A subclass has the field `grid`, the lengths of the axes, the outermost first, and
    `axes`, the windows along them; of a union, those of one window. A key is in a window if it is so along each axis.
    """

    grid: tuple[int, ...]

    @property
    def axes(self) -> Sequence[AxisWindows]:
        raise NotImplementedError

    def row(self, query: int, keys: range) -> Ranges | None:
        if query >= prod(self.grid) or not keys:
            return ()
        places = zip(self._coordinates(query), self.axes, strict=True)
        *outer, inner = (axis.seen(place, place) for place, axis in places)
        starts = [0]
        for places, pitch in zip(outer, self._pitches, strict=False):  # starts of the rows that hold any of the keys
            starts = [
                start + place * pitch
                for start in starts
                for part in places
                for place in within(part, (keys.start - start) // pitch, (keys.stop - 1 - start) // pitch + 1)
            ]
            if len(starts) > _MOST_RUNS:
                return None
        runs = ((start, part) for start in starts for part in inner)
        return among((range(start + part.start, start + part.stop, part.step) for start, part in runs), keys)

    def reason(self, pair: Pair) -> Reason:
        if beyond := self._beyond(pair):
            return beyond
        query, key = self._coordinates(pair.query), self._coordinates(pair.key)
        windows = [axis.seen(place, place) for place, axis in zip(query, self.axes, strict=True)]
        missed = [
            axis
            for axis, (place, window) in enumerate(zip(key, windows, strict=True))
            if not any(place in part for part in window)
        ]
        text = f"{pair.the_query} is at {point_text(query)} and sees {' x '.join(map(_window_text, windows))}"
        outside = f": outside along axis {listing(missed)}" if missed else ""
        return Reason(self, not missed, f"{text}; {pair.the_key} is at {point_text(key)}{outside}")

    def _beyond(self, pair: Pair) -> Reason | None:
        """Return the reason why a pair with a token beyond the grid is forbidden; None for other pairs."""
        tokens = prod(self.grid)
        text = pair.those(lambda position: position >= tokens, f"beyond the grid's {tokens} tokens")
        return Reason(self, False, text) if text else None

    def _coordinates(self, position: int) -> list[int]:
        return [position // pitch % length for pitch, length in zip(self._pitches, self.grid, strict=True)]

    @property
    def _pitches(self) -> list[int]:
        """Return the distance in tokens of neighbouring places along each axis."""
        return [prod(self.grid[axis + 1 :]) for axis in range(len(self.grid))]

    def check_tokens(self, queries: range, keys: range) -> None:
        tokens = prod(self.grid)
        if max(queries.stop, keys.stop) > tokens:
            shape = "x".join(map(str, self.grid))
            raise ValueError(
                f"queries and keys must be within the {tokens} tokens of a {shape} grid; got queries up to position "
                f"{queries.stop - 1} and keys up to position {keys.stop - 1}: for other tokens before the grid write "
                f"pattern.after(number), for others behind it pattern.before({tokens})"
            )

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        if len(box.head) and len(box.head) * int(box.q.count.max()) * int(box.k.count.max()) <= _FEW_PAIRS:
            pairs = torch.zeros_like(box.area)
            evaluate_pairs(self, Owned(torch.arange(len(pairs)), box), pairs)
            return Bounds(pairs, pairs)
        counted = [self._count_at_once(box.select(part)) for part in torch.arange(len(box.head)).split(_BOXES_AT_ONCE)]
        return Bounds(*(torch.cat([getattr(each, side) for each in counted]) for side in ("low", "high")))

    def _count_at_once(self, box: Box) -> Bounds:
        even = fits(box.q.step, self.grid) and fits(box.k.step, self.grid)
        sides = [side if even else hull(side) for side in (box.q, box.k)]
        q, k = (rectangles_of(side, self.grid) for side in sides)
        bounds = self.count_pairs(q, k, len(box.head))
        # The hull of a progression contains other tokens, too.
        return bounds if even else Bounds(torch.zeros_like(bounds.low), bounds.high.minimum(box.area))

    def count_pairs(self, q: Rectangles, k: Rectangles, number: int) -> Bounds:
        """Return bounds on the allowed pairs of each of `number` boxes.

        q, k: the queries and the keys of the boxes, split into rectangles of the grid; `run` is the index of the box.
        """
        q_index, k_index = pairs_of(q.run, k.run, number)
        bounds = self.count_rectangles(select(q.sides, q_index), select(k.sides, k_index))
        none = torch.zeros(number, dtype=torch.int64)
        return Bounds(*(none.index_add(0, q.run[q_index], each) for each in (bounds.low, bounds.high)))

    def likeness(self, box: Box, *, num_heads: int) -> tuple[Tensor, ...]:
        if not (fits(box.q.step, self.grid) and fits(box.k.step, self.grid)):
            return super().likeness(box, num_heads=num_heads)
        q, k = (rectangles_of(side, self.grid) for side in (box.q, box.k))
        return self.likeness_of(q, k, box)

    def likeness_of(self, q: Rectangles, k: Rectangles, box: Box) -> tuple[Tensor, ...]:
        """Return integer tensors, each with an entry for each of the n boxes.

        Boxes with equal entries in all tensors, and with equal counts and steps of queries and of keys, have equal
        masks. A box with more than one rectangle of queries or of keys has its first positions or slots as entries, so
        that only an equal box matches it.

        q, k: rectangles of the boxes' queries and keys.
        """
        (q_of, q_one), (k_of, k_one) = q.first_and_is_only(len(box.head)), k.first_and_is_only(len(box.head))
        one = q_one & k_one
        columns = [torch.where(one, -1, place) for place in (box.q.first, box.k.first)]
        for queries, keys, axis in zip(select(q.sides, q_of), select(k.sides, k_of), self.axes, strict=True):
            columns += [
                torch.where(one, number, 0) for number in (*axis.likeness(queries, keys), queries.count, keys.count)
            ]
        return tuple(columns)

    def count_rectangles(self, queries: Rectangle, keys: Rectangle) -> Bounds:
        """Return bounds on the allowed pairs between n query rectangles and n key rectangles, paired by index.

        They are the products of the bounds along each axis.
        """
        low, high = (torch.ones_like(queries[0].first) for _ in range(2))
        for q, k, axis in zip(queries, keys, self.axes, strict=True):
            near = (high > 0).nonzero().squeeze(1)
            bounds = axis.count(q.select(near), k.select(near))
            low[near] *= bounds.low
            high[near] *= bounds.high
        return Bounds(low, high)


def point_text(places: Sequence[int]) -> str:
    return f"({', '.join(map(str, places))})"


def _window_text(window: Ranges) -> str:
    text = " and ".join(span(part.start, part[-1] + 1) for part in window)
    text = f"({text})" if len(window) > 1 else text
    step = max((part.step for part in window if len(part) > 1), default=1)
    return text if step == 1 else f"{text} in steps of {step}"
