"""Local window: a query sees the keys near its own position."""

from dataclasses import dataclass
from typing import Any

import torch

from ..core._box import Bounds, Box, count_below
from ..core._check import require_int
from ..core._pattern import MaskMod, Pattern
from ..core._ranges import Ranges, as_ranges
from ..core._reason import Pair, Reason


@dataclass(frozen=True)
class LocalWindow(Pattern):
    """Allowed iff query - left <= key <= query + right, both ends included; radii in tokens."""

    left: int
    right: int

    def __post_init__(self) -> None:
        require_int("left", self.left, minimum=0)
        require_int("right", self.right, minimum=0)
        super().__post_init__()

    def to_data(self) -> dict[str, Any]:
        return {"kind": "local_window", "left": self.left, "right": self.right}

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _within(torch.tensor(self.left, device=device), torch.tensor(self.right, device=device))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        reach, missed = count_below(box, self.right), count_below(box, -self.left - 1)
        # The difference is exact where both are; bounds that straddle can only be widened.
        return Bounds((reach.low - missed.high).clamp(min=0), reach.high - missed.low)

    def reason(self, pair: Pair) -> Reason:
        allowed = -self.left <= pair.key - pair.query <= self.right
        return Reason(self, allowed, f"{pair.distance}: the window reaches {self.left} before and {self.right} after")

    def period(self) -> int:
        return 1

    def row(self, query: int, keys: range) -> Ranges:
        return as_ranges(range(max(keys.start, query - self.left), min(query + self.right + 1, keys.stop)))


def local_window(*, left: int, right: int) -> Pattern:
    """Each query sees `left` keys before its position, its own, and `right` keys after. Radii in tokens, >= 0."""
    return LocalWindow(left, right)


def _within(left: torch.Tensor, right: torch.Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (q - k <= left) & (k - q <= right)

    return mask_mod
