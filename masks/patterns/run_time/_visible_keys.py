"""Visible keys: any subset of the keys, known when the rule runs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...core import (
    OF_PATTERNS,
    TILE,
    Bounds,
    Box,
    Extent,
    MaskMod,
    Pair,
    Pattern,
    Reason,
    advises,
    constructor,
    pattern_kind,
    renamed,
)
from ._run_time import RunTime, Table, Windows, of_tensor

# B batch entries, L positions

_MAX_WINDOWS = 32  # runs of keys: more cost more one by one than as one block list
_MOST_EMPTY = 0.25  # share of empty blocks: above, skipping them by block lists saves more than masks cost


@pattern_kind("visible_keys")
class VisibleKeys(RunTime):
    """Allowed iff the key is marked as visible."""

    def table(self, tensor: Tensor, extent: Extent) -> KeySet:
        if not (tensor.dtype == torch.bool or tensor.is_floating_point()):
            raise TypeError(
                "visible keys must be booleans, True where a key may be seen, or floats, 0 there and -inf elsewhere; "
                f"got {tensor.dtype}: mask.bool() makes them of 0 and 1"
            )
        if tensor.dim() not in (1, 2) or tensor.shape[-1] != extent.keys:
            raise ValueError(
                f"visible keys must have shape ({extent.keys},) or (batch, {extent.keys}), one for each position from "
                f"0 to that of the last key, k_offset included; got {tuple(tensor.shape)}"
            )
        marks = torch.atleast_2d(tensor.detach().cpu())
        # A copy: later changes of the caller's tensor must not change the rule.
        return KeySet.of(marks.clone() if marks.dtype == torch.bool else _unhidden(marks))

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """Mask with all keys visible."""
        return torch.ones(shape, dtype=torch.bool)


def _unhidden(added: Tensor) -> Tensor:
    """True where 0 is added to the scores, False for -inf; ValueError for other values."""
    visible = added == 0
    other = added[~(visible | (added == -torch.inf))]
    if len(other):
        came = f"{float(other[0])}{': mask.bool() makes booleans of 0 and 1' if other[0] == 1 else ''}"
        raise ValueError(f"a floating-point mask of keys must hold 0 for visible and -inf for hidden keys; got {came}")
    return visible


class KeySet(Table):
    """Allowed iff row b, entry k is True."""

    kind = "keyset table"

    rows: Bool[Tensor, "B L"]

    def _described(self) -> str:
        if len(self.rows) != 1:
            return f"visible keys of {len(self.rows)} batch entries"
        return f"{int(self.only_row.sum())} of {self.rows.shape[1]} keys"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        held, step = self.on(device), self.batch_step(device)
        return lambda b, h, q, k: held.rows[b * step, k] & (q == q)

    @cached_property
    def _before(self) -> Int64[Tensor, " L+1"]:
        """Number of visible keys before each position."""
        return torch.nn.functional.pad(self.only_row.long().cumsum(0), (1, 0))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        size = self.rows.shape[1]
        first, last = box.k.first.clamp(0, size), (box.k.last + 1).clamp(0, size)
        seen = self._before[last] - self._before[first]
        if box.k.step == 1:
            pairs = box.q.count * seen
            return Bounds(pairs, pairs)
        every = seen == box.k.last + 1 - box.k.first
        high = box.q.count * torch.minimum(seen, box.k.count)
        return Bounds(torch.where(every, box.area, 0), high)

    @property
    def are_scattered(self) -> bool:
        """True if hidden keys are scattered over many runs, so that block lists would skip few blocks."""
        edges = torch.nn.functional.pad(self.rows, (1, 1)).diff(dim=1).sum(1)
        filled = torch.nn.functional.pad(self.rows, (0, -self.rows.shape[1] % TILE)).unflatten(1, (-1, TILE))
        return int(edges.max()) > 2 * _MAX_WINDOWS and float(filled.any(2).float().mean()) > 1 - _MOST_EMPTY

    def reason(self, pair: Pair) -> Reason:
        allowed = bool(pair.entry(self.only_row, pair.key))
        return Reason(self, allowed, f"{pair.the_key} is {'visible' if allowed else 'hidden'}")

    def windows(self, num_positions: int) -> Windows | None:
        edges = torch.nn.functional.pad(self.only_row.int(), (1, 1)).diff()
        starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
        if len(starts) > _MAX_WINDOWS:
            return None
        first = torch.zeros_like(starts)
        return Windows(first, first + num_positions, starts, stops, first)


@constructor
@advises(
    keywords={
        **OF_PATTERNS,
        **renamed(visible="mask attention_mask visible_mask"),
        "key_padding_mask": "write masks.visible_keys(~key_padding_mask)",
    },
    how="write masks.visible_keys(visible), True for each key to be seen",
)
def visible_keys(visible: Any, *, name: str = "visible_keys") -> Pattern:
    """Each query sees the keys that are marked True.

    visible: booleans of shape (positions,) or (batch, positions), one for each position from 0 to the last key, thus
    k_offset + num_keys of them. It is `~key_padding_mask` in torch's convention, the attention_mask in transformers'.
    Or floats, 0 for True and -inf for False. Or a string, the name under which `attend(bindings=)` passes them.

    >>> masks.describe(masks.visible_keys([True, False, True]), 3).useful_pairs
    6
    """
    return of_tensor(VisibleKeys, visible, name)
