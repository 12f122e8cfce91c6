"""Links: how long what ranks send one another is on its way, by the speed of their links."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ..masks.core._check import require_int

# W ranks


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a rank sends, and at the same time receives, a second; and what each message costs besides.

    Ranks of one node, `ranks_per_node` consecutive ones, have links of `bytes_per_s`, and of `between_bytes_per_s` to
    ranks of other nodes. Without `ranks_per_node` all ranks are on one node.
    """

    bytes_per_s: float
    between_bytes_per_s: float | None = None
    ranks_per_node: int | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "between_bytes_per_s"):
            speed = getattr(self, name)
            if speed is not None and not (speed > 0 and isfinite(speed)):
                raise ValueError(f"{name} must be a positive finite number; got {speed!r}")
        if not (self.latency_s >= 0 and isfinite(self.latency_s)):
            raise ValueError(f"latency_s must be a finite number, 0 or more; got {self.latency_s!r}")
        if self.ranks_per_node is not None:
            require_int("ranks_per_node", self.ranks_per_node, minimum=1)
        if (self.ranks_per_node is None) != (self.between_bytes_per_s is None):
            raise ValueError(
                "links between nodes need both their speed and the ranks of a node; got "
                f"between_bytes_per_s={self.between_bytes_per_s} and ranks_per_node={self.ranks_per_node}"
            )

    def seconds(self, received: Int64[Tensor, "W W"]) -> Float64[Tensor, " W"]:
        """For each rank, at least: the busier of its two directions, on the slower of its two kinds of links.

        received[i, j]: bytes that rank i gets from rank j. Each rank that a rank gets something from costs it one
        latency, and so does each that it sends something to, in the busier direction.
        """
        rank = torch.arange(len(received))
        node = rank if self.ranks_per_node is None else rank // self.ranks_per_node
        is_near = (node[:, None] == node) | (self.ranks_per_node is None)
        near, far = torch.where(is_near, received, 0), torch.where(is_near, 0, received)
        far_speed = self.bytes_per_s if self.between_bytes_per_s is None else self.between_bytes_per_s
        busy = torch.maximum(_busier(near) / self.bytes_per_s, _busier(far) / far_speed)
        return busy + self.latency_s * _busier((received > 0).long())


def _busier(received: Int64[Tensor, "W W"]) -> Float64[Tensor, " W"]:
    """What a rank receives, or what it sends, whichever is more."""
    return torch.maximum(received.sum(1), received.sum(0)).double()
