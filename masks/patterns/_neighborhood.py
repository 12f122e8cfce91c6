"""Neighbourhood attention: a query sees a window of tokens around its own place in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import reduce
from math import gcd, prod
from typing import Any

import torch

from ..core import (
    LARGEST,
    OF_PATTERNS,
    MaskMod,
    Pattern,
    advises,
    both,
    constructor,
    device_kind,
    parameters,
    pattern_kind,
    require_bool,
    require_int,
)
from ._grid import Axis, fits
from ._on_grid import OnGrid

_SEQUENCES = (list, tuple)
_OPTIONAL = {"optional": True}
# Fields, with the least value of each.
_LEAST_VALUES = {"grid": 1, "radius": 0, "kernel_size": 1, "rate": 1, "stride": 1, "causal": 0, "wrap": 0}
_BOOLEAN = ("causal", "wrap")


@pattern_kind("neighborhood")
class Neighborhood(OnGrid):
    """Pattern that allows a pair iff along each axis of a token grid the key is in the query's window (see `Axis`).

    Tokens are in row-major order. Each field is a tuple with one entry for each axis, the outermost first, or None.
    Fields are normalized: `radius` is set if all windows have 2 * radius + 1 tokens and no axis is causal, else
    `kernel_size` is; the other one is None. `stride` is None if it is 1 along all axes, `causal` is None if no axis is
    causal, `wrap` is None if no axis wraps. `wrap` is False for an axis whose windows hold their whole residue classes.
    """

    grid: tuple[int, ...]
    radius: tuple[int, ...] | None = field(default=None, metadata=_OPTIONAL)
    kernel_size: tuple[int, ...] | None = field(default=None, metadata=_OPTIONAL)
    rate: tuple[int, ...] = field(kw_only=True)
    stride: tuple[int, ...] | None = field(default=None, metadata=_OPTIONAL)
    causal: tuple[bool, ...] | None = field(default=None, metadata=_OPTIONAL)
    wrap: tuple[bool, ...] | None = field(default=None, metadata=_OPTIONAL)

    def check(self) -> None:
        given = {name: getattr(self, name) for name in _LEAST_VALUES}
        needed = ("grid", "rate")
        values = {
            name: _require_per_axis(name, each) for name, each in given.items() if each is not None or name in needed
        }
        grid, radius, size = values["grid"], values.get("radius"), values.get("kernel_size")
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"a grid has 1, 2 or 3 axes; got {grid=}")
        if (radius is None) == (size is None):
            raise ValueError(
                "exactly one of radius and kernel_size, which is 2 * radius + 1, must be given; "
                f"got {radius=}, kernel_size={size}"
            )
        for name, along in values.items():
            if len(along) != len(grid):
                raise ValueError(f"{name} must be one value, or one for each axis of {grid=}; got {name}={along}")
        # Normalized, so that equal rules are equal.
        if any(values.get("wrap", ())):
            _normalize_wrapping_axes(values)
            size = values.get("kernel_size")
        if not any(values.get("wrap", ())):
            values.pop("wrap", None)
        if max(values.get("stride", (1,))) == 1:
            values.pop("stride", None)
        if not any(values.get("causal", ())):
            values.pop("causal", None)
        elif radius is not None:
            raise ValueError(
                "a causal window has no radius, as it ends at the query: write kernel_size, its number of tokens; "
                f"got {radius=}, causal={values['causal']}"
            )
        if size is not None and "causal" not in values and all(each % 2 for each in size):
            values["radius"] = tuple(each // 2 for each in values.pop("kernel_size"))
        for name in _LEAST_VALUES:
            object.__setattr__(self, name, values.get(name))
        for axis, along in enumerate(self.axes):
            if along.size * along.rate > along.length:
                raise ValueError(
                    "kernel_size * rate must be at most the length of the axis, where kernel_size is 2 * radius + 1; "
                    f"got kernel_size={along.size} and rate={along.rate} on axis {axis} of length {along.length}"
                )
            if along.stride > along.size:
                raise ValueError(
                    "stride must be at most kernel_size, as otherwise some queries do not see their own key; "
                    f"got stride={along.stride} and kernel_size={along.size} on axis {axis}"
                )
        if prod(grid) > LARGEST:
            raise ValueError(f"a grid must hold at most {LARGEST} tokens; got {grid=}")

    @property
    def axes(self) -> list[Axis]:
        none = (None,) * len(self.grid)
        sizes = self.kernel_size or [2 * radius + 1 for radius in self.radius or ()]
        choices = [each or none for each in (self.stride, self.causal, self.wrap)]
        return [
            Axis(length, size, rate, stride or 1, bool(causal), bool(wrap))
            for length, size, rate, stride, causal, wrap in zip(self.grid, sizes, self.rate, *choices, strict=True)
        ]

    def rates(self) -> tuple[int, ...]:
        # Residue classes of positions are classes of the innermost axis if the rate fits its rows.
        return (self.rate[-1],) if fits(self.rate[-1], self.grid) else ()

    def spacing(self) -> int:
        return gcd(*(rate * pitch for rate, pitch in zip(self.rate, self._pitches, strict=True)))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        packed = self.packed_mask_mod(device) if device_kind(device).flex_trains else None
        if packed is not None:
            return packed
        axes = zip(self._pitches, self.axes, strict=True)
        return reduce(both, (_window_mask_mod(device, prod(self.grid), pitch, axis) for pitch, axis in axes))

    def packed_mask_mod(self, device: torch.device) -> MaskMod | None:
        """Return the rule as a closure (b, h, q, k) -> bool for GPU kernels; None if a number in it exceeds 31 bits.

        A token's places on all axes are bit fields of one integer, with a guard bit above each field. Two differences
        test a pair: the key's place minus the first place of the window, and the last place of the window minus the
        key's place. The key is in the window on every axis iff no field borrows from its guard bit.

        Along an axis, places are numbered from 1, residue class by residue class. Keys beyond the grid have place 0,
        and the windows of queries beyond the grid begin after all keys.
        """
        # Comparisons for each axis would take more registers; only axes that wrap need some.
        axes, shift, guards, ones, window = [], 0, 0, 0, 0
        for pitch, axis in zip(self._pitches, self.axes, strict=True):
            # Distance of the places of two classes. If the axis wraps, keys before the window get one length added.
            spacing = -(-axis.length // axis.rate) * (1 + axis.wraps)
            bits = (axis.rate * spacing + axis.size + 1).bit_length()
            numbers = (pitch, axis.length, axis.lead, axis.rate, spacing, 1 << shift, axis.size, axis.stride)
            # A centred window needs `lead` but not `size`: one number less to hold.
            is_centred = axis == Axis(axis.length, 2 * axis.lead + 1, axis.rate)
            kinds = axis.rate > 1, axis.stride > 1, is_centred, axis.is_causal, axis.wraps
            axes.append((*parameters(device, *numbers), *kinds))
            ones, window = ones + (1 << shift), window + (axis.size - 1 << shift)
            guards += 1 << (shift + bits)
            shift += bits + 1
        is_causal = self.causal is not None  # then windows differ in length
        numbers = prod(self.grid), guards, ones, guards - ones, (ones if is_causal else window) + 2 * guards
        if max(numbers) >= 1 << 31:
            return None
        tokens, guard, one, nowhere, reach = parameters(device, *numbers)

        def near(b, h, q, k):
            first, last, place, queries, keys = one, reach, one, q, k
            for pitch, length, lead, rate, spacing, unit, size, stride, *kinds in axes:
                is_dilated, is_grouped, is_centred, ends_at_query, wraps = kinds
                query, key = queries // pitch, keys // pitch
                queries, keys = queries - query * pitch, keys - key * pitch
                own, held = query, length
                if is_dilated:
                    held = (length - query % rate - 1) // rate + 1  # tokens of the query's class
                    own = query // rate
                group = own // stride * stride if is_grouped else own
                number = key // rate if is_dilated else key
                if wraps:
                    begin = group - lead
                    begin = torch.where(begin < 0, begin + held, begin)
                    number = torch.where(number < begin, number + held, number)
                else:
                    beyond = held - lead - lead - 1 if is_centred else held - size
                    begin = torch.minimum((group - lead).clamp(min=0), beyond)
                if is_causal:
                    end = own if ends_at_query else begin + size - 1
                    last = last + (query % rate * spacing + end if is_dilated else end) * unit
                if is_dilated:
                    begin, number = query % rate * spacing + begin, key % rate * spacing + number
                first, place = first + begin * unit, place + number * unit
            first, place = torch.where(q < tokens, first, nowhere), torch.where(k < tokens, place, 0) + guard
            return ((place - first) & ((last if is_causal else first + reach) - place) & guard) == guard

        return near


@constructor
@advises(keywords=OF_PATTERNS, how="write masks.neighborhood((height, width), radius)")
def neighborhood(
    grid: Sequence[int],
    radius: int | Sequence[int] | None = None,
    *,
    kernel_size: int | Sequence[int] | None = None,
    rate: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    wrap: bool | Sequence[bool] = False,
) -> Pattern:
    """Neighbourhood attention: pattern in which each query of a token grid sees a window of keys around its own place.

    A pair is allowed iff the key is in the query's window along every axis.

    grid: 1, 2 or 3 axis lengths (a sequence, an image or slide, a video); tokens are in row-major order. Other
        arguments are one value for all axes, or a sequence with one value for each axis.
    kernel_size: tokens in a window along the axis; or radius, for 2 * radius + 1 tokens. Give one of the two.
    rate: distance of neighbouring tokens of a window (NATTEN's dilation).
    stride: number of consecutive queries that share a window.
    causal: True hides keys after the query along this axis.
    wrap: True for a periodic axis, such as longitude: distances are modulo its length.

    Along an axis of length n, for the query at x:

    * The window is [x - kernel_size // 2, x + (kernel_size - 1) // 2]: an even size has one more key before than after.
      At an end of the axis it is shifted inwards, so every query sees equally many keys.
    * stride: the queries form groups of `stride`, from 0 on. All queries of a group have the window of its leader
      x // stride * stride + stride // 2 (the later one of two in the middle), or n - 1 if the group ends before it.
    * causal: the window is [x - kernel_size + 1, x] without keys before 0, and is not shifted. With a stride the
      leader is the last query of the group, and each query sees the keys of the leader's window up to its own place.
    * rate: these rules apply within each residue class modulo rate, with places numbered from 0 in the class.
    * wrap: a window that crosses an end of the axis is not shifted, but continues at the other end. A window longer
      than its residue class contains each key of the class once. rate * stride must divide n.

    Source: NATTEN, arXiv 2204.07143; with rates, arXiv 2209.15001; with strides, Generalized Neighborhood Attention,
    arXiv 2504.16922; the rule follows NATTEN's csrc/include/natten/cuda/reference/mask.hpp (version 0.21).

    In row-major order a block of tokens covers one row or a few rows, so small windows leave most of a block
    unused. `attend` therefore sorts the tokens of a whole grid into tiles of at most one block each, where it predicts
    that tiles are faster; `describe` reports the overcompute. With `& causal()`, or fewer tokens, the order stays
    row-major.

    Raises ValueError for a window of kernel_size * rate tokens that exceeds an axis that does not wrap, a stride above
    its kernel size, both or neither of radius and kernel_size, a radius with a causal axis, an axis that is causal and
    wraps, an axis that wraps with a length that rate * stride does not divide, negative radii, other numbers below 1, a
    grid of more than 3 axes or 2**31 - 1 tokens, and a sequence of another length; TypeError for values of other types.
    `bind` raises ValueError for tokens beyond the grid; fewer tokens are allowed.

    >>> masks.describe(masks.neighborhood((4, 4), 1), 16).useful_pairs  # 9 keys a token
    144
    >>> masks.explain(masks.neighborhood((10, 36), 2, wrap=(False, True)), query=0, key=34).allowed
    True
    >>> video = masks.neighborhood((4, 8, 8), kernel_size=(2, 4, 4), stride=(1, 4, 4), causal=(True, False, False))
    >>> masks.describe(video, 256).useful_pairs  # 16 keys a token of the first frame, 32 of each other
    7168
    """
    if not isinstance(grid, _SEQUENCES):
        raise TypeError(f"grid must be a sequence of axis lengths; got grid={grid!r}")
    windows = {name: given for name, given in (("radius", radius), ("kernel_size", kernel_size)) if given is not None}
    named = {**windows, "rate": rate, "stride": stride, "causal": causal, "wrap": wrap}
    along = {name: tuple(each) if isinstance(each, Sequence) else (each,) * len(grid) for name, each in named.items()}
    return Neighborhood(tuple(grid), **along)


def _require_per_axis(name: str, values: Any) -> tuple:
    if not isinstance(values, _SEQUENCES):
        raise TypeError(f"{name} must have one entry for each axis; got {name}={values!r}")
    if name in _BOOLEAN:
        return tuple(require_bool(f"{name}[{axis}]", value) for axis, value in enumerate(values))
    return tuple(
        require_int(f"{name}[{axis}]", value, minimum=_LEAST_VALUES[name]) for axis, value in enumerate(values)
    )


def _normalize_wrapping_axes(values: dict[str, tuple]) -> None:
    """Limit the windows of axes that wrap to the size of a residue class, in place; wrap becomes False at that size.

    values: fields of a `Neighborhood` by name, with wrap, and with radius or kernel_size; kernel_size replaces radius.

    Raises ValueError for an axis that cannot wrap, because it is causal or rate * stride does not divide its length.
    """
    sizes = list(values.pop("kernel_size", ()) or (2 * radius + 1 for radius in values.pop("radius")))
    none, wrap = (1,) * len(sizes), list(values["wrap"])
    groups = zip(values["grid"], values["rate"], values.get("stride", none), values.get("causal", none), strict=True)
    for axis, (length, rate, stride, causal) in enumerate(groups):
        if not wrap[axis]:
            continue
        if causal is True:
            raise ValueError(f"an axis that wraps has no first token, so it cannot be causal; got both for axis {axis}")
        if length % (rate * stride):
            raise ValueError(
                "rate * stride must divide the length of an axis that wraps; "
                f"got rate={rate} and stride={stride} on axis {axis} of length {length}"
            )
        sizes[axis] = min(sizes[axis], length // rate)
        wrap[axis] = sizes[axis] < length // rate
    values.update(kernel_size=tuple(sizes), wrap=tuple(wrap))


def _window_mask_mod(device: torch.device, num_tokens: int, pitch_of_axis: int, axis: Axis) -> MaskMod:
    """Return a function (b, h, q, k) -> bool: True if the key is in the query's window along this axis.

    It returns False for queries and keys beyond the grid.

    num_tokens: number of tokens of the grid.
    pitch_of_axis: distance in tokens of neighbouring places along the axis.
    """
    apart = -(-axis.length // axis.rate)  # distance of the places of two classes
    numbers = num_tokens, pitch_of_axis, axis.length, axis.size, axis.rate, axis.stride, axis.lead
    tokens, pitch, length, size, rate, stride, lead = parameters(device, *numbers)
    spacing, beyond = parameters(device, apart, axis.rate * apart)
    is_grouped, is_causal = axis.stride > 1, axis.is_causal

    def near(b, h, q, k):
        query, key = q // pitch % length, k // pitch % length
        held = (length - query % rate - 1) // rate + 1  # tokens of the query's class
        group = query // rate // stride * stride if is_grouped else query // rate
        first = torch.minimum((group - lead).clamp(min=0), held - size)
        first = torch.where(q < tokens, query % rate * spacing + first, beyond)
        place = torch.where(k < tokens, key % rate * spacing + key // rate, -1)
        seen = (first <= place) & (place < first + size)
        return seen & (key <= query) if is_causal else seen

    def around(b, h, q, k):
        query, key = q // pitch % length, k // pitch % length
        first = query - (query // rate % stride + lead) * rate
        ahead = (key - first + length) % length
        return (ahead % rate == 0) & (ahead < size * rate) & (q < tokens) & (k < tokens)

    return around if axis.wraps else near
