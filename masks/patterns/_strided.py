"""Strided: a query sees the keys at multiples of a stride from its own position."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core._box import Bounds, Box
from ..core._check import require_int
from ..core._distances import count_multiples
from ..core._pattern import MaskMod, Pattern
from ..core._ranges import Ranges, among
from ..core._reason import Pair, Reason


@dataclass(frozen=True)
class Strided(Pattern):
    """Allowed iff (query - key) mod stride == 0. Tokens then fall into `stride` classes that see themselves."""

    stride: int

    def __post_init__(self) -> None:
        require_int("stride", self.stride, minimum=1)
        super().__post_init__()

    def to_data(self) -> dict[str, Any]:
        return {"kind": "strided", "stride": self.stride}

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _at_multiples(torch.tensor(self.stride, device=device))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return count_multiples(box, self.stride)

    def reason(self, pair: Pair) -> Reason:
        strides, left_over = divmod(abs(pair.key - pair.query), self.stride)
        more = f" and {left_over}" if left_over else ""
        return Reason(self, not left_over, f"{pair.distance}: {strides} times {self.stride}{more}")

    def period(self) -> int:
        return 1

    def rates(self) -> tuple[int, ...]:
        return (self.stride,)

    def row(self, query: int, keys: range) -> Ranges:
        return among([range(query % self.stride, keys.stop, self.stride)], keys)

    def spacing(self) -> int:
        return self.stride


def strided(stride: int) -> Pattern:
    """Each query sees the keys at a distance of 0, `stride`, 2 * `stride`, ... tokens, before it and after.

    With a local window of `stride` keys this is the strided form of the Sparse Transformer (arXiv 1904.10509):
    `(local_window(left=stride, right=0) | strided(stride)) & causal()`. Raises ValueError for a stride below 1.
    """
    return Strided(stride)


def _at_multiples(stride: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (q - k) % stride == 0

    return mask_mod
