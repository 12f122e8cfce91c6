"""Windows on a token grid that end at the grid's borders, without the shift of neighbourhood attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import prod
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from ..core import (
    LARGEST,
    OF_PATTERNS,
    Bounds,
    MaskMod,
    Pair,
    Pattern,
    Progression,
    Ranges,
    Reason,
    advises,
    clip,
    constructor,
    count_multiples,
    parameters,
    pattern_kind,
    require_int,
)
from ._grid import Rectangle, box_of
from ._on_grid import OnGrid, point_text

_SEQUENCES = (list, tuple)

_Radii = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _AxisOfDistances:
    """One axis of a grid, of `length` places, along which a query sees the keys at most `radius` places away."""

    length: int
    radius: int

    def seen(self, first: int, last: int) -> Ranges:
        return (range(max(0, first - self.radius), min(self.length, last + self.radius + 1)),)

    def count(self, q: Progression, k: Progression) -> Bounds:
        box = box_of(*(clip(side, 0, self.length) for side in (q, k)))
        if q.step == k.step:
            return count_multiples(box, 1, reach=(-self.radius, self.radius))
        furthest = torch.maximum(box.k.last - box.q.first, box.q.last - box.k.first)
        nearest = torch.maximum(box.k.first - box.q.last, box.q.first - box.k.last)
        low, high = (
            torch.where(apart <= self.radius, box.area, torch.zeros_like(box.area)) for apart in (furthest, nearest)
        )
        return Bounds(low, high)

    def likeness(self, q: Progression, k: Progression) -> tuple[Tensor, Tensor]:
        inside = (q.last < self.length) & (k.last < self.length)
        return torch.where(inside, -1, q.first), k.first - q.first


@pattern_kind("grid_window", positional=2)
class GridWindow(OnGrid):
    """Pattern that allows a pair iff along each axis of a token grid query and key are at most `radius` places apart.

    Tokens are in row-major order; `grid` and `radius` have one entry for each axis, the outermost first. For a union of
    windows `radius` is a tuple of such tuples; from one to the next the first entry grows, and no other entry grows.
    Radii are limited to the length of their axis minus 1, and windows that another window contains are left out.
    """

    grid: tuple[int, ...]
    radius: tuple[int, ...] | _Radii

    def check(self) -> None:
        grid = _integers("grid", self.grid, 1)
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"a grid has 1, 2 or 3 axes; got {grid=}")
        if prod(grid) > LARGEST:
            raise ValueError(f"a grid must hold at most {LARGEST} tokens; got {grid=}")
        given: Any = self.radius
        several = isinstance(given, _SEQUENCES) and any(isinstance(each, _SEQUENCES) for each in given)
        windows = []
        for index, each in enumerate(given if several else [given]):
            name = f"radius[{index}]" if several else "radius"
            radii = _integers(name, each, 0)
            if len(radii) != len(grid):
                raise ValueError(f"{name} must be one value, or one for each axis of {grid=}; got {name}={radii}")
            windows.append(radii)
        for (first, *rest), (further, *narrower) in pairwise(windows):
            if first >= further or any(a < b for a, b in zip(rest, narrower, strict=True)):
                raise ValueError(
                    "of several windows each must be longer than the one before along the first axis, and not longer "
                    f"along the others; got radius={tuple(windows)}"
                )
        limited = [tuple(min(r, length - 1) for r, length in zip(radii, grid, strict=True)) for radii in windows]
        distinct = list(dict.fromkeys(limited))
        needed = [each for each in distinct if not any(_is_wider(other, each) for other in distinct)]
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "radius", tuple(needed) if len(needed) > 1 else needed[0])

    @property
    def windows(self) -> _Radii:
        """Return the windows of the union, each as a tuple of its radius along each axis."""
        several: Any = self.radius
        return several if isinstance(several[0], tuple) else (several,)

    @property
    def axes(self) -> list[_AxisOfDistances]:
        return self._axes_of(self.windows[0])

    def _axes_of(self, radii: Sequence[int]) -> list[_AxisOfDistances]:
        return [_AxisOfDistances(*each) for each in zip(self.grid, radii, strict=True)]

    def row(self, query: int, keys: range) -> Ranges | None:
        if len(self.windows) == 1:
            return super().row(query, keys)
        keys = range(keys.start, min(keys.stop, prod(self.grid)))
        if query >= prod(self.grid) or not keys:
            return ()
        pitch, reach = self._pitches[0], self.windows[-1][0]
        own, place = divmod(query, pitch)
        inner = [(first, GridWindow(self.grid[1:], tuple(rest))) for first, *rest in self.windows]
        found: list[range] = []
        # Places along the first axis that the query sees, and that hold any of the keys.
        for outer in range(max(keys.start // pitch, own - reach), min(-(-keys.stop // pitch), own + reach + 1)):
            window = next(window for first, window in inner if abs(outer - own) <= first)
            runs = window.row(place, range(max(0, keys.start - outer * pitch), min(pitch, keys.stop - outer * pitch)))
            if runs is None:
                return None
            found += [range(run.start + outer * pitch, run.stop + outer * pitch, run.step) for run in runs]
        return tuple(found)

    def reason(self, pair: Pair) -> Reason:
        if beyond := self._beyond(pair):
            return beyond
        query, key = self._coordinates(pair.query), self._coordinates(pair.key)
        apart = tuple(abs(a - b) for a, b in zip(query, key, strict=True))
        seen = any(all(a <= r for a, r in zip(apart, radii, strict=True)) for radii in self.windows)
        limits = " or ".join(map(point_text, self.windows))
        places = f"{pair.the_query} is at {point_text(query)}, {pair.the_key} at {point_text(key)}"
        return Reason(self, seen, f"{places}: {point_text(apart)} places apart, of at most {limits}")

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        (tokens,) = parameters(device, prod(self.grid))
        sizes = [parameters(device, *each) for each in zip(self._pitches, self.grid, strict=True)]
        # Along an axis that no window limits, distances need no comparison.
        limits = [
            [(axis, *parameters(device, r)) for axis, r in enumerate(radii) if r < self.grid[axis] - 1]
            for radii in self.windows
        ]
        limited = {axis for each in limits for axis, _ in each}

        def near(b, h, q, k):
            apart = {
                axis: (q // pitch % length - k // pitch % length).abs()
                for axis, (pitch, length) in enumerate(sizes)
                if axis in limited
            }
            inside = (q < tokens) & (k < tokens)
            seen = [reduce(and_, (apart[axis] <= radius for axis, radius in each), inside) for each in limits]
            return reduce(or_, seen)

        return near

    def count_rectangles(self, queries: Rectangle, keys: Rectangle) -> Bounds:
        """Return bounds on the allowed pairs between n query rectangles and n key rectangles, paired by index.

        Bounds are exact if queries and keys have equal steps along every axis.
        """
        area = prod((q.count * k.count for q, k in zip(queries, keys, strict=True)), start=torch.tensor(1))
        exact = all(q.step == k.step for q, k in zip(queries, keys, strict=True))
        low, high, before = torch.zeros_like(area), torch.zeros_like(area), torch.zeros_like(area)
        for radii in self.windows:
            first, *rest = (axis.count(q, k) for q, k, axis in zip(queries, keys, self._axes_of(radii), strict=True))
            if exact:
                # Each distance along the first axis is counted with the first window that contains it, as that one is
                # the longest along the other axes.
                pairs = prod((each.low for each in rest), start=first.low - before)
                low, high, before = low + pairs, high + pairs, first.low
            else:
                low = torch.maximum(low, prod((each.low for each in rest), start=first.low))
                high = high + prod((each.high for each in rest), start=first.high)
        return Bounds(low, high.minimum(area))


def _is_wider(window: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return window != other and all(a >= b for a, b in zip(window, other, strict=True))


def _integers(name: str, values: object, least: int) -> tuple[int, ...]:
    if not isinstance(values, _SEQUENCES):
        raise TypeError(f"{name} must have one entry for each axis; got {name}={values!r}")
    return tuple(require_int(f"{name}[{axis}]", each, minimum=least) for axis, each in enumerate(values))


@constructor
@advises(keywords=OF_PATTERNS, how="write masks.grid_window((height, width), radius)")
def grid_window(grid: Sequence[int], radius: int | Sequence[int] | Sequence[Sequence[int]]) -> Pattern:
    """Pattern in which each query of a token grid sees the keys up to `radius` places from its own along every axis.

    At the borders of the grid windows are cut off, where `neighborhood` shifts them inwards.

    grid: 1, 2 or 3 axis lengths (a sequence, an image, a video); tokens are in row-major order.
    radius: number of places on each side of the query, one value for all axes, or a sequence of one for each axis. A
        radius of at least the length of an axis minus 1 does not limit that axis. A sequence of such sequences gives
        the union of their windows: each must be longer than the one before along the first axis, and not longer along
        the others.

    Raises ValueError for a negative radius, an axis of length 0, a sequence of another length, windows in another
    order, and a grid of more than 3 axes or 2**31 - 1 tokens; TypeError for values of other types. `bind` raises
    ValueError for tokens beyond the grid; fewer tokens are allowed.

    >>> masks.describe(masks.grid_window((4, 4), 1), 16).useful_pairs  # 4, 6 or 9 keys a token
    100
    >>> frames = masks.grid_window((8, 64), [(1, 63), (7, 3)])  # adjacent frames whole, near places of all frames
    """
    if not isinstance(grid, _SEQUENCES):
        raise TypeError(f"grid must be a sequence of axis lengths; got grid={grid!r}")
    along: Any = radius if isinstance(radius, _SEQUENCES) else (radius,) * len(grid)
    return GridWindow(tuple(grid), tuple(along))
