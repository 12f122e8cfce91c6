"""Bands: patterns that depend only on the distance from query to key, such as causal order, windows and strides."""

from math import gcd

import torch
from torch import Tensor

from ..core import (
    OF_PATTERNS,
    Bounds,
    Box,
    MaskMod,
    Pair,
    Pattern,
    Ranges,
    Reason,
    advises,
    as_ranges,
    at_least,
    both_bounds,
    constructor,
    count_between,
    count_multiples,
    parameters,
    pattern_kind,
    renamed,
    require_int,
)

_SIZE_ADVICE = {
    **OF_PATTERNS,
    **dict.fromkeys(
        ("window", "window_size", "size", "radius"), "write left= and right=, keys before and after the query"
    ),
    **dict.fromkeys(("dilation", "rate"), "write masks.dilated_window(left=63, right=0, rate=2)"),
    **renamed(left="before lookback past left_window", right="after lookahead future right_window"),
}


class Band(Pattern):
    """Base of patterns that allow a pair iff key - query is a multiple of `step` in [`least`, `most`].

    Distances are in tokens; None as `least` or `most` sets no limit. Subclasses define `limits`.
    """

    def limits(self) -> tuple[int | None, int | None, int]:
        """Return (least, most, step) of key - query, in tokens; least and most are None for no limit."""
        raise NotImplementedError  # defined by each kind

    @property
    def least(self) -> int | None:
        return self.limits()[0]

    @property
    def most(self) -> int | None:
        return self.limits()[1]

    @property
    def step(self) -> int:
        return self.limits()[2]

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        least, most, step = self.limits()
        low, high, every = parameters(device, least or 0, most or 0, step)
        if least is None and most is None:
            return lambda b, h, q, k: (q - k) % every == 0
        if least is None or most is None:
            near = _distance_at_most(high) if least is None else _distance_at_least(low)
            return near if step == 1 else lambda b, h, q, k: ((q - k) % every == 0) & near(b, h, q, k)
        if step == 1:
            return lambda b, h, q, k: (k - q >= low) & (k - q <= high)
        return lambda b, h, q, k: ((q - k) % every == 0) & ((k - q >= low) & (k - q <= high))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        least, most, step = self.limits()
        if step > 1 and least is None and most is None:
            return count_multiples(box, step)
        if step > 1 and least is not None and most is not None and box.q.step == box.k.step:
            return count_multiples(box, step, reach=(least, most))
        near = count_between(box, least, most)
        return near if step == 1 else both_bounds(count_multiples(box, step), near, box.area)

    def reason(self, pair: Pair) -> Reason:
        least, most, step = self.limits()
        ahead, text = pair.key - pair.query, pair.distance
        steps, beyond = divmod(abs(ahead), step)
        if step > 1:
            text += f", {beyond} more than a multiple of {step}" if beyond else f", {steps} times {step}"
        if least is not None and most is not None and not beyond:
            of_steps = " such steps" if step > 1 else ""
            text += f": the window reaches {-least // step}{of_steps} before and {most // step} after"
        near = (least is None or least <= ahead) and (most is None or ahead <= most)
        return Reason(self, near and not beyond, text)

    def period(self) -> int:
        return 1

    def rates(self) -> tuple[int, ...]:
        return (self.step,) if self.step > 1 else ()

    def spacing(self) -> int:
        return self.step

    def row(self, query: int, keys: range) -> Ranges:
        least, most, step = self.limits()
        start = keys.start if least is None else max(keys.start, query + least)
        stop = keys.stop if most is None else min(keys.stop, query + most + 1)
        return as_ranges(range(start + (query - start) % step, stop, step))


def _distance_at_most(high: Tensor) -> MaskMod:
    return lambda b, h, q, k: k - q <= high


def _distance_at_least(low: Tensor) -> MaskMod:
    return lambda b, h, q, k: k - q >= low


@pattern_kind("causal")
class Causal(Band):
    """Pattern that allows a pair iff key position <= query position.

    Without offsets, positions of queries and of keys count from 0, so the mask is aligned at its top-left corner:
    query 0 sees only key 0.
    """

    def limits(self) -> tuple[None, int, int]:
        return None, 0, 1

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        return self

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _not_after


@pattern_kind("local_window")
class LocalWindow(Band):
    """Pattern that allows a pair iff query - left <= key <= query + right; `left` and `right` are in tokens."""

    left: int = at_least(0)
    right: int = at_least(0)

    def limits(self) -> tuple[int, int, int]:
        return -self.left, self.right, 1

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        """Return a window that is at least as wide and touches no further blocks (of q_side queries by k_side keys).

        Each of `left` and `right` is kept if it is a multiple of gcd(q_side, k_side), else it becomes the next multiple
        minus 1.
        """
        side = gcd(q_side, k_side)
        left, right = (
            reach if reach % side == 0 else -(-reach // side) * side - 1 for reach in (self.left, self.right)
        )
        return LocalWindow(left, right)


@pattern_kind("strided")
class Strided(Band):
    """Pattern that allows a pair iff (query - key) mod stride == 0."""

    stride: int = at_least(1)

    def limits(self) -> tuple[None, None, int]:
        return None, None, self.stride


@pattern_kind("dilated_window")
class DilatedWindow(Band):
    """Pattern that allows a pair iff key = query + j * rate for an integer j in [-left, right]; `rate` is in tokens."""

    left: int = at_least(0)
    right: int = at_least(0)
    rate: int = at_least(2)  # rate 1 is LocalWindow

    def limits(self) -> tuple[int, int, int]:
        return -self.left * self.rate, self.right * self.rate, self.rate


@constructor
@advises(
    keywords=dict.fromkeys(("window", "window_size", "left", "right"), "write masks.local_window(left=63, right=0)"),
    how="write masks.causal(), which fits any number of tokens",
)
def causal() -> Pattern:
    """Pattern in which each query sees the keys at its own position and at earlier positions.

    >>> masks.describe(masks.causal(), 4).useful_pairs
    10
    """
    return Causal()


@constructor
@advises(
    keywords=_SIZE_ADVICE, how="write masks.local_window(left=63, right=0) for the query's own key and 63 before it"
)
def local_window(*, left: int, right: int) -> Pattern:
    """Pattern in which each query sees its own key, up to `left` keys before its position, and up to `right` after it.

    Raises ValueError for left or right outside [0, 2**31).

    >>> masks.describe(masks.local_window(left=1, right=0), 4).useful_pairs
    7
    """
    return LocalWindow(left, right)


@constructor
def strided(stride: int) -> Pattern:
    """Pattern in which each query sees all keys whose distance from it, before or after, is a multiple of `stride`.

    It sees its own key, too. With a window of the `stride` keys before the query this is the strided form of the Sparse
    Transformer (arXiv 1904.10509): `(local_window(left=stride, right=0) | strided(stride)) & causal()`.
    Raises ValueError for a stride outside [1, 2**31).

    >>> masks.describe(masks.strided(4), 8).useful_pairs
    16
    """
    return Strided(stride)


@constructor
@advises(keywords=_SIZE_ADVICE, how="write masks.dilated_window(left=63, right=0, rate=2)")
def dilated_window(*, left: int, right: int, rate: int) -> Pattern:
    """Pattern in which each query sees its own key, up to `left` keys before its position, and up to `right` after it.

    Neighbouring keys are `rate` tokens apart; rate 1 gives a `local_window`. This is dilated neighbourhood attention in
    one dimension (arXiv 2209.15001), except that a window which crosses an end of the sequence is cut off and not
    shifted inwards.

    Raises ValueError for left or right outside [0, 2**31) and for a rate outside [1, 2**31).

    >>> masks.describe(masks.dilated_window(left=4, right=0, rate=2), 8).useful_pairs  # distances 0, 2 and 4
    20
    """
    adjacent = require_int("rate", rate, minimum=1) == 1
    return LocalWindow(left, right) if adjacent else DilatedWindow(left, right, rate)


def _not_after(b, h, q, k):
    return k <= q
