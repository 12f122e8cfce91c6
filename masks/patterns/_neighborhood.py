"""Neighbourhood attention: a query sees a window of tokens around its own place in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from ..core import (
    LARGEST,
    Bounds,
    Box,
    MaskMod,
    Owned,
    Pair,
    Pattern,
    Ranges,
    Reason,
    among,
    both,
    constructor,
    listing,
    look_at_pairs,
    parameters,
    pattern_kind,
    require_int,
    span,
    within,
)
from ._grid import Rectangle, count_window, fits, hull, rectangles, select

_SEQUENCES = (list, tuple)
_FEW_PAIRS = 1 << 16  # so many are looked at one by one sooner than counted
_MOST_RUNS = 1 << 10  # of a window that is listed run by run


@pattern_kind("neighborhood")
class Neighborhood(Pattern):
    """Allowed iff along each axis of the grid the key lies in the query's window of 2 * radius + 1 tokens.

    Neighbours along an axis are `rate` apart. A window that would reach over an end of the axis is shifted
    inwards. Tokens are in row-major order; one entry of grid, radius and rate for each axis.
    """

    grid: tuple[int, ...]
    radius: tuple[int, ...]
    rate: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, minimum in (("grid", 1), ("radius", 0), ("rate", 1)):
            object.__setattr__(self, name, _per_axis(name, getattr(self, name), minimum))
        axes = len(self.grid)
        if not 1 <= axes <= 3:
            raise ValueError(f"a grid has 1, 2 or 3 axes; got grid={self.grid}")
        for name in ("radius", "rate"):
            if len(getattr(self, name)) != axes:
                raise ValueError(
                    f"{name} must be one number, or one an axis of {self.grid}; got {name}={getattr(self, name)}"
                )
        for axis, (length, radius, rate) in enumerate(self.axes):
            if (2 * radius + 1) * rate > length:
                raise ValueError(
                    f"a window must fit its axis: (2 * radius + 1) * rate tokens; got radius={radius} and rate={rate} "
                    f"on axis {axis} of {length}"
                )
        if prod(self.grid) > LARGEST:
            raise ValueError(f"a grid must hold at most {LARGEST} tokens; got grid={self.grid}")
        super().__post_init__()

    @property
    def axes(self) -> list[tuple[int, int, int]]:
        """(length, radius, rate) of each axis, the outermost first."""
        return list(zip(self.grid, self.radius, self.rate, strict=True))

    def rates(self) -> tuple[int, ...]:
        # Residue classes of positions are those of the innermost axis where they fit its rows.
        return (self.rate[-1],) if fits(self.rate[-1], self.grid) else ()

    def spacing(self) -> int:
        return gcd(*(rate * stride for rate, stride in zip(self.rate, self._strides, strict=True)))

    def row(self, query: int, keys: range) -> Ranges | None:
        if query >= prod(self.grid) or not keys:
            return ()
        places = zip(self._coordinates(query), self.axes, strict=True)
        *outer, inner = (window_along(place, *axis) for place, axis in places)
        starts = [0]
        for places, stride in zip(outer, self._strides, strict=False):  # of the rows that hold any of the keys
            starts = [
                start + place * stride
                for start in starts
                for place in within(places, (keys.start - start) // stride, (keys.stop - 1 - start) // stride + 1)
            ]
            if len(starts) > _MOST_RUNS:
                return None
        return among((range(start + inner.start, start + inner.stop, inner.step) for start in starts), keys)

    def reason(self, pair: Pair) -> Reason:
        tokens = prod(self.grid)
        if beyond := pair.those(lambda position: position >= tokens, f"beyond the grid's {tokens} tokens"):
            return Reason(self, False, beyond)
        query, key = self._coordinates(pair.query), self._coordinates(pair.key)
        windows = [window_along(place, *axis) for place, axis in zip(query, self.axes, strict=True)]
        missed = [axis for axis, (place, window) in enumerate(zip(key, windows, strict=True)) if place not in window]
        text = f"{pair.the_query} is at {_point(query)} and sees {' x '.join(map(_steps, windows))}"
        outside = f": outside along axis {listing(missed)}" if missed else ""
        return Reason(self, not missed, f"{text}; {pair.the_key} is at {_point(key)}{outside}")

    def _coordinates(self, position: int) -> list[int]:
        return [position // stride % length for stride, length in zip(self._strides, self.grid, strict=True)]

    @property
    def _strides(self) -> list[int]:
        return [prod(self.grid[axis + 1 :]) for axis in range(len(self.grid))]

    def check_tokens(self, queries: range, keys: range) -> None:
        """Raise ValueError for positions beyond the grid."""
        tokens = prod(self.grid)
        if max(queries.stop, keys.stop) > tokens:
            shape = "x".join(map(str, self.grid))
            raise ValueError(
                f"a grid of {shape} holds {tokens} tokens; got queries up to {queries.stop} and keys up to {keys.stop}"
            )

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        packed = self.packed(device) if device.type != "cpu" else None
        if packed is not None:
            return packed
        axes = zip(self._strides, self.axes, strict=True)
        return reduce(both, (_in_window(*parameters(device, prod(self.grid), at, *axis)) for at, axis in axes))

    def packed(self, device: torch.device) -> MaskMod | None:
        """The rule for kernels; None where its numbers exceed 32 bits.

        A token's places on all axes are the fields of one number, each below a bit that subtraction borrows from. So
        one comparison a pair answers for the ends of the window on every axis. Each more would cost a kernel
        registers, which it has not. An axis is counted residue class by residue class, from 1; 0 is beyond the grid.
        """
        axes, shift, guards, ones, window = [], 0, 0, 0, 0
        for stride, (length, radius, rate) in zip(self._strides, self.axes, strict=True):
            spacing = -(-length // rate)  # of the places of two classes
            bits = (rate * spacing + 2 * radius + 2).bit_length()
            numbers = parameters(device, stride, length, radius, rate, spacing, 1 << shift)
            axes.append((*numbers, rate > 1))
            ones, window = ones + (1 << shift), window + (2 * radius << shift)
            guards += 1 << (shift + bits)
            shift += bits + 1
        numbers = prod(self.grid), guards, ones, guards - ones, window + 2 * guards
        if max(numbers) >= 1 << 31:
            return None
        tokens, guard, one, nowhere, reach = parameters(device, *numbers)

        def near(b, h, q, k):
            first, place, queries, keys = one, one, q, k
            for stride, length, radius, rate, spacing, unit, is_dilated in axes:
                query, key = queries // stride, keys // stride
                queries, keys = queries - query * stride, keys - key * stride
                if is_dilated:
                    held = (length - 1 - query % rate) // rate + 1  # tokens of the query's class
                    begin = torch.minimum((query // rate - radius).clamp(min=0), held - (2 * radius + 1))
                    begin, key = query % rate * spacing + begin, key % rate * spacing + key // rate
                else:
                    begin = torch.minimum((query - radius).clamp(min=0), length - (2 * radius + 1))
                first, place = first + begin * unit, place + key * unit
            first, place = torch.where(q < tokens, first, nowhere), torch.where(k < tokens, place, 0) + guard
            return ((place - first) & (first + reach - place) & guard) == guard

        return near

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        if len(box.head) and len(box.head) * int(box.q.count.max()) * int(box.k.count.max()) <= _FEW_PAIRS:
            pairs = torch.zeros_like(box.area)
            look_at_pairs(self, Owned(torch.arange(len(pairs)), box), pairs)
            return Bounds(pairs, pairs)
        even = fits(box.q.step, self.grid) and fits(box.k.step, self.grid)
        q, k = (box.q, box.k) if even else (hull(box.q), hull(box.k))
        low, high = torch.zeros_like(box.area), torch.zeros_like(box.area)
        sides = [[(part, _holds(part)) for part in rectangles(side, self.grid)] for side in (q, k)]
        for (queries, q_holds), (keys, k_holds) in product(*sides):
            where = (q_holds & k_holds).nonzero().squeeze(1)
            bounds = self.count_rectangles(select(queries, where), select(keys, where))
            low[where] += bounds.low
            high[where] += bounds.high
        # The hull of a progression holds other tokens too.
        return Bounds(low, high) if even else Bounds(torch.zeros_like(low), high.minimum(box.area))

    def count_rectangles(self, queries: Rectangle, keys: Rectangle) -> Bounds:
        """Pairs of two rectangles of the grid, axis by axis: the counts multiply."""
        low, high = (torch.ones_like(queries[0].first) for _ in range(2))
        for q, k, (length, radius, rate) in zip(queries, keys, self.axes, strict=True):
            near = (high > 0).nonzero().squeeze(1)
            bounds = count_window(near, q.select(near), k.select(near), length=length, radius=radius, rate=rate)
            low[near] *= bounds.low
            high[near] *= bounds.high
        return Bounds(low, high)


@constructor
def neighborhood(grid: Sequence[int], radius: int | Sequence[int], *, rate: int | Sequence[int] = 1) -> Pattern:
    """Each query of a token grid sees the (2 * radius + 1) tokens an axis around its own place, `rate` apart.

    The grid has 1, 2 or 3 axes (a sequence, an image or slide, a video), its tokens in row-major order;
    radius and rate are one number or one an axis. Near an end of an axis the window is shifted inwards, so
    every query sees equally many keys. With a rate, tokens of the same residue along the axis are each
    other's neighbours. Source: NATTEN, arXiv 2204.07143; with rates, arXiv 2209.15001.

    In row-major order a block of tokens covers one row or few, so small windows leave most of a block
    unused. `attend` therefore sorts the tokens of a whole grid into tiles of a block each, where that pays;
    `describe` says how much is left. With causal() or other patterns, or with fewer tokens, it does not.

    Raises ValueError for a window of (2 * radius + 1) * rate tokens that exceeds its axis, for negative radii
    and for rates or lengths below 1. Binding raises ValueError for tokens beyond the grid; fewer are fine.

    >>> masks.describe(masks.neighborhood((4, 4), 1), 16).useful_pairs  # 9 keys a token
    144
    """
    if not isinstance(grid, _SEQUENCES):
        raise TypeError(f"grid must be a sequence of axis lengths; got grid={grid!r}")
    return Neighborhood(tuple(grid), *(_on_each_axis(value, len(grid)) for value in (radius, rate)))


def _on_each_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * axes


def _per_axis(name: str, values: Any, minimum: int) -> tuple[int, ...]:
    if not isinstance(values, _SEQUENCES):
        raise TypeError(f"{name} must have one number an axis; got {name}={values!r}")
    return tuple(require_int(f"{name}[{axis}]", value, minimum=minimum) for axis, value in enumerate(values))


def window_along(place: int, length: int, radius: int, rate: int) -> range:
    """The places along one axis that a query at this place sees."""
    number, residue = divmod(place, rate)
    held = (length - 1 - residue) // rate + 1
    first = min(max(number - radius, 0), held - (2 * radius + 1))
    return range(residue + rate * first, residue + rate * (first + 2 * radius) + 1, rate)


def _point(places: Sequence[int]) -> str:
    return f"({', '.join(map(str, places))})"


def _steps(window: range) -> str:
    ends = span(window.start, window[-1] + 1)
    return ends if window.step == 1 or len(window) == 1 else f"{ends} in steps of {window.step}"


def _holds(rectangle: Rectangle) -> Tensor:
    """Which rectangles hold any token."""
    return reduce(torch.logical_and, (side.count > 0 for side in rectangle))


def _in_window(tokens: Tensor, stride: Tensor, length: Tensor, radius: Tensor, rate: Tensor) -> MaskMod:
    """Along one axis. Keys beyond the grid stand before all windows; windows of queries beyond it behind all keys."""

    def near(b, h, q, k):
        query, key = q // stride % length, k // stride % length
        spacing = (length - 1) // rate + 1  # of the places of two classes
        held = (length - 1 - query % rate) // rate + 1  # tokens of the query's class
        first = torch.minimum((query // rate - radius).clamp(min=0), held - (2 * radius + 1))
        first = torch.where(q < tokens, query % rate * spacing + first, rate * spacing)
        place = torch.where(k < tokens, key % rate * spacing + key // rate, -1)
        return (first <= place) & (place < first + (2 * radius + 1))

    return near
