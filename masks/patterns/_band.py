"""Bands: rules of the distance from query to key alone, such as causal order, windows and strides."""

import torch
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    MaskMod,
    Pair,
    Pattern,
    Ranges,
    Reason,
    as_ranges,
    both,
    both_bounds,
    constructor,
    count_below,
    count_multiples,
    pattern_kind,
    require_int,
)


class Band(Pattern):
    """Allowed iff key - query is a multiple of `step`, at least `least` and at most `most`; None sets no limit."""

    @property
    def least(self) -> int | None:
        return None

    @property
    def most(self) -> int | None:
        return None

    @property
    def step(self) -> int:
        return 1

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        least, most = (None if end is None else torch.tensor(end, device=device) for end in (self.least, self.most))
        limits = None if least is None or most is None else _between(least, most)
        steps = None if self.step == 1 else _at_multiples(torch.tensor(self.step, device=device))
        assert limits or steps, "a band without both limits and of step 1 has a mask_mod of its own"
        return both(steps, limits) if steps and limits else steps or limits  # type: ignore[return-value]

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        least, most, step = self.least, self.most, self.step
        if step > 1 and least is None and most is None:
            return count_multiples(box, step)
        if step > 1 and least is not None and most is not None and box.q.step == box.k.step:
            return count_multiples(box, step, reach=(least, most))
        none, every = torch.zeros_like(box.area), box.area
        reached = Bounds(every, every) if most is None else count_below(box, most)
        missed = Bounds(none, none) if least is None else count_below(box, least - 1)
        # The difference is exact where both are; bounds that straddle can only be widened.
        near = Bounds((reached.low - missed.high).clamp(min=0), reached.high - missed.low)
        return near if step == 1 else both_bounds(count_multiples(box, step), near, box.area)

    def period(self) -> int:
        return 1

    def rates(self) -> tuple[int, ...]:
        return (self.step,) if self.step > 1 else ()

    def spacing(self) -> int:
        return self.step

    def row(self, query: int, keys: range) -> Ranges:
        start = keys.start if self.least is None else max(keys.start, query + self.least)
        stop = keys.stop if self.most is None else min(keys.stop, query + self.most + 1)
        return as_ranges(range(start + (query - start) % self.step, stop, self.step))


@pattern_kind("causal")
class Causal(Band):
    """Allowed iff key position <= query position. The corner is top-left: position 0 sees position 0."""

    @property
    def most(self) -> int:
        return 0

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _not_after


@pattern_kind("local_window")
class LocalWindow(Band):
    """Allowed iff query - left <= key <= query + right, both ends included; radii in tokens."""

    left: int
    right: int

    def __post_init__(self) -> None:
        require_int("left", self.left, minimum=0)
        require_int("right", self.right, minimum=0)
        super().__post_init__()

    @property
    def least(self) -> int:
        return -self.left

    @property
    def most(self) -> int:
        return self.right

    def reason(self, pair: Pair) -> Reason:
        allowed = -self.left <= pair.key - pair.query <= self.right
        return Reason(self, allowed, f"{pair.distance}: the window reaches {self.left} before and {self.right} after")


@pattern_kind("strided")
class Strided(Band):
    """Allowed iff (query - key) mod stride == 0. Tokens then fall into `stride` classes that see themselves."""

    stride: int

    def __post_init__(self) -> None:
        require_int("stride", self.stride, minimum=1)
        super().__post_init__()

    @property
    def step(self) -> int:
        return self.stride

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _at_multiples(torch.tensor(self.stride, device=device))

    def reason(self, pair: Pair) -> Reason:
        strides, left_over = divmod(abs(pair.key - pair.query), self.stride)
        more = f" and {left_over}" if left_over else ""
        return Reason(self, not left_over, f"{pair.distance}: {strides} times {self.stride}{more}")


@pattern_kind("dilated_window")
class DilatedWindow(Band):
    """Allowed iff key = query + j * rate for some j with -left <= j <= right; left and right count keys."""

    left: int
    right: int
    rate: int

    def __post_init__(self) -> None:
        require_int("left", self.left, minimum=0)
        require_int("right", self.right, minimum=0)
        require_int("rate", self.rate, minimum=2)  # of rate 1 is LocalWindow
        super().__post_init__()

    @property
    def least(self) -> int:
        return -self.left * self.rate

    @property
    def most(self) -> int:
        return self.right * self.rate

    @property
    def step(self) -> int:
        return self.rate

    def reason(self, pair: Pair) -> Reason:
        steps, left_over = divmod(abs(pair.key - pair.query), self.rate)
        if left_over:
            return Reason(self, False, f"{pair.distance}, {left_over} more than a multiple of {self.rate}")
        allowed = steps <= (self.left if pair.key < pair.query else self.right)
        reach = f"the window reaches {self.left} such steps before and {self.right} after"
        return Reason(self, allowed, f"{pair.distance}, {steps} times {self.rate}: {reach}")


@constructor
def causal() -> Pattern:
    """Each query sees the keys at its own position and before."""
    return Causal()


@constructor
def local_window(*, left: int, right: int) -> Pattern:
    """Each query sees `left` keys before its position, its own, and `right` keys after. Radii in tokens, >= 0."""
    return LocalWindow(left, right)


@constructor
def strided(stride: int) -> Pattern:
    """Each query sees the keys at a distance of 0, `stride`, 2 * `stride`, ... tokens, before it and after.

    With a local window of `stride` keys this is the strided form of the Sparse Transformer (arXiv 1904.10509):
    `(local_window(left=stride, right=0) | strided(stride)) & causal()`. Raises ValueError for a stride below 1.
    """
    return Strided(stride)


@constructor
def dilated_window(*, left: int, right: int, rate: int) -> Pattern:
    """Each query sees `left` keys before its position, its own, and `right` keys after, `rate` tokens apart.

    This is neighbourhood attention in one dimension, with dilation (arXiv 2209.15001), except that at the
    ends of the sequence keys are left out rather than replaced by further ones. Rate 1 gives a `local_window`.
    Raises ValueError for left or right below 0 and for a rate below 1.
    """
    adjacent = require_int("rate", rate, minimum=1) == 1
    return LocalWindow(left, right) if adjacent else DilatedWindow(left, right, rate)


def _not_after(b, h, q, k):
    return k <= q


def _between(least: Tensor, most: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (k - q >= least) & (k - q <= most)

    return mask_mod


def _at_multiples(step: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (q - k) % step == 0

    return mask_mod
