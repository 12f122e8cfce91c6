"""Dilated window: a query sees the keys near its own position, some tokens apart."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core._box import Bounds, Box
from ..core._check import LARGEST, require_int
from ..core._distances import count_multiples
from ..core._pattern import MaskMod, Pattern
from ..core._ranges import Ranges, among
from ..core._reason import Pair, Reason
from ._local_window import LocalWindow
from ._strided import Strided


@dataclass(frozen=True)
class DilatedWindow(Pattern):
    """Allowed iff key = query + j * rate for some j with -left <= j <= right; left and right count keys."""

    left: int
    right: int
    rate: int

    def __post_init__(self) -> None:
        require_int("left", self.left, minimum=0)
        require_int("right", self.right, minimum=0)
        require_int("rate", self.rate, minimum=2)  # of rate 1 is LocalWindow
        super().__post_init__()

    def to_data(self) -> dict[str, Any]:
        return {"kind": "dilated_window", "left": self.left, "right": self.right, "rate": self.rate}

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        least, most = (torch.tensor(end, device=device) for end in self._reach())
        return _at_multiples_within(torch.tensor(self.rate, device=device), least, most)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        least, most = self._reach()
        if box.q.step == box.k.step:
            return count_multiples(box, self.rate, reach=(least, most))
        return (Strided(self.rate) & LocalWindow(*(min(end, LARGEST) for end in (-least, most)))).count(
            box, num_heads=num_heads
        )

    def reason(self, pair: Pair) -> Reason:
        steps, left_over = divmod(abs(pair.key - pair.query), self.rate)
        if left_over:
            return Reason(self, False, f"{pair.distance}, {left_over} more than a multiple of {self.rate}")
        allowed = steps <= (self.left if pair.key < pair.query else self.right)
        reach = f"the window reaches {self.left} such steps before and {self.right} after"
        return Reason(self, allowed, f"{pair.distance}, {steps} times {self.rate}: {reach}")

    def period(self) -> int:
        return 1

    def rates(self) -> tuple[int, ...]:
        return (self.rate,)

    def spacing(self) -> int:
        return self.rate

    def row(self, query: int, keys: range) -> Ranges:
        before = min(self.left, query // self.rate)
        return among([range(query - before * self.rate, query + self.right * self.rate + 1, self.rate)], keys)

    def _reach(self) -> tuple[int, int]:
        """The least and the greatest distance from query to key, in tokens."""
        return -self.left * self.rate, self.right * self.rate


def dilated_window(*, left: int, right: int, rate: int) -> Pattern:
    """Each query sees `left` keys before its position, its own, and `right` keys after, `rate` tokens apart.

    This is neighbourhood attention in one dimension, with dilation (arXiv 2209.15001), except that at the
    ends of the sequence keys are left out rather than replaced by further ones. Rate 1 gives a `local_window`.
    Raises ValueError for left or right below 0 and for a rate below 1.
    """
    adjacent = require_int("rate", rate, minimum=1) == 1
    return LocalWindow(left, right) if adjacent else DilatedWindow(left, right, rate)


def _at_multiples_within(rate: Tensor, least: Tensor, most: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        distance = k - q
        return (distance % rate == 0) & (distance >= least) & (distance <= most)

    return mask_mod
