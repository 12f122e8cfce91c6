"""Causal order: a query sees the keys at its own position and before."""

from dataclasses import dataclass
from typing import Any

import torch

from ..core._box import Bounds, Box, count_below
from ..core._pattern import MaskMod, Pattern
from ..core._ranges import Ranges, as_ranges
from ..core._reason import Pair, Reason


@dataclass(frozen=True)
class Causal(Pattern):
    """Allowed iff key position <= query position. The corner is top-left: position 0 sees position 0."""

    def to_data(self) -> dict[str, Any]:
        return {"kind": "causal"}

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _not_after

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return count_below(box, 0)

    def reason(self, pair: Pair) -> Reason:
        return Reason(self, pair.key <= pair.query, pair.distance)

    def period(self) -> int:
        return 1

    def row(self, query: int, keys: range) -> Ranges:
        return as_ranges(range(keys.start, min(query + 1, keys.stop)))


def causal() -> Pattern:
    """Each query sees the keys at its own position and before."""
    return Causal()


def _not_after(b, h, q, k):
    return k <= q
