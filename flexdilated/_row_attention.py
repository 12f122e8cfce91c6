"""Attention of one query row a head: each group of heads over its own keys, joined by lse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ._kernel import flash_forward
from .masks._row import RowSource

# B batch, H query heads, G key/value heads, S slots, n keys, D head dim

Selection = slice | Int64[Tensor, " n"]


@dataclass(frozen=True)
class HeadGroup:
    """Query heads that see the same keys: `per_key_head` of them for each of some key/value heads, in order.

    `whole`: these are all heads.
    """

    source: RowSource
    queries: Selection
    key_heads: slice
    per_key_head: int
    whole: bool


@dataclass(frozen=True)
class Part:
    """A group's attention over keys in some slots; parts of one `level` share no head."""

    group: HeadGroup
    slots: Selection
    level: int
    log_weight: float


def row_attention(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    parts: Sequence[Part],
    *,
    scale: float,
) -> tuple[Float[Tensor, "B H 1 D"], Float[Tensor, "B H 1"]]:
    """(out, natural lse), in float32 or wider; a head without keys has output 0 and lse -inf."""
    if len(parts) == 1 and parts[0].group.whole:
        out, lse = _attend(q, k, v, parts[0], scale)
        return out, lse
    wide = torch.promote_types(q.dtype, torch.float32)
    levels = 1 + max((part.level for part in parts), default=0)
    outs = torch.zeros(levels, *q.shape, dtype=wide, device=q.device)
    lses = torch.full(outs.shape[:-1], -torch.inf, dtype=wide, device=q.device)
    for part in parts:
        out, lse = _attend(q, k, v, part, scale)
        outs[part.level][:, part.group.queries] = out
        lses[part.level][:, part.group.queries] = lse
    # Clamped, rows without keys have weights 0 over a sum of 0, and no difference of infinities.
    top = lses.amax(0).clamp(min=torch.finfo(wide).min)
    weights = (lses - top).exp_()
    total = weights.sum(0)
    out = (weights.unsqueeze(-1) * outs).sum(0) / total.clamp(min=torch.finfo(wide).tiny).unsqueeze(-1)
    return out, total.log() + top


def _attend(q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    group = part.group
    rows = q[:, group.queries].unflatten(1, (-1, group.per_key_head)).squeeze(3)
    keys, values = (_take(x[:, group.key_heads], part.slots) for x in (k, v))
    kernel = flash_forward if q.device.type == "cpu" else matrix_forward
    out, lse = kernel(rows, keys, values, scale=scale)
    lse = lse + part.log_weight if part.log_weight else lse
    return out.flatten(1, 2).unsqueeze(2).to(lse.dtype), lse.flatten(1, 2).unsqueeze(2)


def _take(x: Tensor, slots: Selection) -> Tensor:
    return x[:, :, slots] if isinstance(slots, slice) else x.index_select(2, slots)


def matrix_forward(
    q: Float[Tensor, "B G R D"], k: Float[Tensor, "B G n D"], v: Float[Tensor, "B G n D"], *, scale: float
) -> tuple[Float[Tensor, "B G R D"], Float[Tensor, "B G R"]]:
    """(out, natural lse) by two matrix products, in float32 or wider: for a few rows on any device."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * scale) @ k.to(wide).mT
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp_() @ v.to(wide), lse
