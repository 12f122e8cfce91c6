"""Tiled: a neighbourhood over the slots of a tiled order, as the builder asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import Bounds, Box, MaskMod, Pattern, Progression
from ..patterns import Neighborhood, select
from ._tiling import Rectangles, Tiling

_RUNS_AT_ONCE = 1 << 14  # boxes whose rectangles are held together: bounds the memory


@dataclass(frozen=True)
class Tiled(Pattern):
    """The rule over slots in place of positions. It stands in no expression: terms keep the neighbourhood itself."""

    kind = "tiled"  # of no constructor and no JSON

    rule: Neighborhood
    order: Tiling

    def parameters(self) -> dict[str, Any]:
        return {"rule": self.rule, "tile": self.order.tile}

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _at_slots(self.rule.mask_mod(num_heads=num_heads, device=device), self.order.positions(device))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        """Exact: a run of slots is a few rectangles, and the pairs of two rectangles are counted axis by axis."""
        assert box.q.step == box.k.step == 1, "slots come in runs"
        low, high = torch.zeros_like(box.area), torch.zeros_like(box.area)
        for part in torch.arange(len(box.head)).split(_RUNS_AT_ONCE):
            q, k = (self._rectangles(side.select(part)) for side in (box.q, box.k))
            q_index, k_index = _pairs(q.run, k.run, len(part))
            bounds = self.rule.count_rectangles(select(q.sides, q_index), select(k.sides, k_index))
            run = part[q.run[q_index]]
            low.index_add_(0, run, bounds.low)
            high.index_add_(0, run, bounds.high)
        return Bounds(low, high)

    def _rectangles(self, runs: Progression) -> Rectangles:
        return self.order.rectangles(runs.first, runs.first + runs.count)


def _pairs(q_run: Tensor, k_run: Tensor, num_runs: int) -> tuple[Tensor, Tensor]:
    """Every pair of a query side's rectangle and a key side's of the same run, as indices of both."""
    k_order, k_number = k_run.argsort(), torch.bincount(k_run, minlength=num_runs)
    k_first, partners = (k_number.cumsum(0) - k_number)[q_run], k_number[q_run]
    q_index = torch.repeat_interleave(partners)
    nth = torch.arange(len(q_index)) - (partners.cumsum(0) - partners)[q_index]
    return q_index, k_order[k_first[q_index] + nth]


def _at_slots(inner: MaskMod, positions: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return inner(b, h, positions[q], positions[k])

    return mask_mod
