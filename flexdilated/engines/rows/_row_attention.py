"""Attention of a few query rows: each group of heads over its visible keys, merged by lse; exact gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from ...masks.core import device_kind
from ...masks.needs import RowSource
from .._merge import WholeRows, shares_of, sum_dtype
from ..kernels._kernel import flash_forward

# B batch, H query heads, G key/value heads, N queries, S slots, D head dim
# in a part: g key/value heads, R rows per key/value head (query heads × queries), n keys

Selection = slice | Int64[Tensor, " n"]


@dataclass(frozen=True)
class HeadGroup:
    """Query heads with one rule: `per_key_head` of them for each of `key_heads`, in order."""

    source: RowSource
    queries: Selection
    key_heads: slice
    per_key_head: int


@dataclass(frozen=True)
class Part:
    """Attention of some rows of a head group over keys in some slots.

    pairs: mask of visible (row, key) pairs; None if all are. blind: rows that see no key of the part; None if there is
    none. level: parts of one level have no head in common, so they share an output buffer.
    """

    group: HeadGroup
    rows: slice
    slots: Selection
    pairs: Bool[Tensor, "rows n"] | None
    blind: Bool[Tensor, " rows"] | None
    level: int
    log_weight: float

    def of_rows(self, x: Shaped[Tensor, "B H N ..."], *, empty: float = 0.0) -> Shaped[Tensor, "B g R ..."]:
        """Rows of each key/value head: its query heads' rows, concatenated.

        Blind rows are filled with `empty`, as their values could be NaN.
        """
        heads = x[:, self.group.queries, self.rows]
        if self.blind is not None:
            heads = heads.masked_fill(self.blind.to(x.device).view(-1, *[1] * (x.dim() - 3)), empty)
        return heads.unflatten(1, (-1, self.group.per_key_head)).flatten(2, 3)

    def to_heads(self, x: Shaped[Tensor, "B g R ..."]) -> Shaped[Tensor, "B h rows ..."]:
        """Inverse of `of_rows`: the rows of each query head."""
        return x.unflatten(2, (self.group.per_key_head, -1)).flatten(1, 2)

    def of_keys(self, x: Float[Tensor, "B G S D"]) -> Float[Tensor, "B g n D"]:
        heads = x[:, self.group.key_heads]
        return (
            heads[:, :, self.slots] if isinstance(self.slots, slice) else heads.index_select(2, self.slots.to(x.device))
        )

    def add_to_keys(self, total: Float[Tensor, "B G S D"], grad: Float[Tensor, "B g n D"]) -> None:
        heads = total[:, self.group.key_heads]
        if isinstance(self.slots, slice):
            heads[:, :, self.slots] += grad
        else:
            heads.index_add_(2, self.slots.to(grad.device), grad)

    def bias(self, like: Tensor) -> Float[Tensor, "R n"] | None:
        """Additive mask, -inf for hidden pairs; None if every pair is visible."""
        if self.pairs is None:
            return None
        shown = torch.zeros(self.pairs.shape, dtype=sum_dtype(like), device=like.device)
        return shown.masked_fill_(~self.pairs.to(like.device), -torch.inf).repeat(self.group.per_key_head, 1)


def row_forward(
    parts: Sequence[Part],
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    scale: float,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """(out, natural lse), in float32 or wider; a row without keys has output 0 and lse -inf."""
    levels = 1 + max((part.level for part in parts), default=0)
    outs = torch.zeros(levels, *q.shape, dtype=sum_dtype(q), device=q.device)
    lses = torch.full(outs.shape[:-1], -torch.inf, dtype=sum_dtype(q), device=q.device)
    for part in parts:
        out, lse = _attend(part, q, k, v, scale)
        outs[part.level][:, part.group.queries, part.rows] = part.to_heads(out).to(outs.dtype)
        lses[part.level][:, part.group.queries, part.rows] = part.to_heads(lse)
    if levels == 1:
        return outs[0], lses[0]
    shares, lse = shares_of(lses, 0)
    return (shares.unsqueeze(-1) * outs).sum(0), lse


def row_backward(
    parts: Sequence[Part],
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    whole: WholeRows,
    scale: float,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G S D"], Float[Tensor, "B G S D"]]:
    """(dq, dk, dv) in float32 or wider."""
    delta, lse = whole.delta(), whole.lse
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row without keys has no weights
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for part in parts:
        queries, grad, share = (part.of_rows(x) for x in (q, whole.grad_out, delta))
        sums = part.of_rows(lse - part.log_weight, empty=torch.inf)
        keys, values = part.of_keys(k), part.of_keys(v)
        grads = matrix_backward(queries, grad, share, sums, keys, values, scale=scale, bias=part.bias(q))
        dq[:, part.group.queries, part.rows] += part.to_heads(grads[0])
        part.add_to_keys(dk, grads[1])
        part.add_to_keys(dv, grads[2])
    return dq, dk, dv


def _attend(part: Part, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, keys, values, bias = part.of_rows(q), part.of_keys(k), part.of_keys(v), part.bias(q)
    if device_kind(q.device).on_host:
        out, lse = flash_forward(rows, keys, values, scale=scale, mask=None if bias is None else bias[None, None])
        if bias is not None:  # the kernel gives 0 as the lse of a row without keys
            lse = lse.masked_fill(bias.amax(1) == -torch.inf, -torch.inf)
    else:
        out, lse = matrix_forward(rows, keys, values, scale=scale, bias=bias)
    return out, lse + part.log_weight if part.log_weight else lse


def matrix_forward(
    q: Float[Tensor, "B g R D"],
    k: Float[Tensor, "B g n D"],
    v: Float[Tensor, "B g n D"],
    *,
    scale: float,
    bias: Float[Tensor, "R n"] | None = None,
) -> tuple[Float[Tensor, "B g R D"], Float[Tensor, "B g R"]]:
    """(out, natural lse) in float32 or wider, by two matrix products: for a few rows on any device."""
    scores = _scores(q, k, scale, bias)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    return weights @ v.to(weights.dtype), lse


def matrix_backward(
    q: Float[Tensor, "B g R D"],
    grad_out: Float[Tensor, "B g R D"],
    delta: Float[Tensor, "B g R"],
    lse: Float[Tensor, "B g R"],
    k: Float[Tensor, "B g n D"],
    v: Float[Tensor, "B g n D"],
    *,
    scale: float,
    bias: Float[Tensor, "R n"] | None = None,
) -> tuple[Float[Tensor, "B g R D"], Float[Tensor, "B g n D"], Float[Tensor, "B g n D"]]:
    """(dq, dk, dv) in the dtype of the lse; a score's gradient is weight * (grad_out · value - delta).

    A row whose lse is +inf has weight 0 everywhere.
    """
    q, grad_out, k, v = (x.to(lse.dtype) for x in (q, grad_out, k, v))
    weights = (_scores(q, k, scale, bias) - lse.unsqueeze(-1)).exp_()
    of_scores = (grad_out @ v.mT - delta.unsqueeze(-1)).mul_(weights).mul_(scale)
    return of_scores @ k, of_scores.mT @ q, weights.mT @ grad_out


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Float[Tensor, "B g R n"]:
    scores = (q.to(sum_dtype(q)) @ k.to(sum_dtype(k)).mT) * scale  # rounded as in the kernel that computed the lse
    return scores if bias is None else scores + bias
