"""Pools: the mean, minimum and maximum of the keys of a block; and the query that summarises a row of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ..engines import sum_dtype
from ._boxes import Rows

# B batch, H query heads, G key/value heads, N queries, M keys, C blocks of keys, n rows, D head dim


class Pools(NamedTuple):
    """Mean, minimum and maximum of each channel over the keys of each block, in float32 or wider."""

    mean: Float[Tensor, "B G C D"]
    least: Float[Tensor, "B G C D"]
    greatest: Float[Tensor, "B G C D"]


def pools_of(k: Float[Tensor, "B G M D"], block: int) -> Pools:
    """Pools of every block of keys; the last block may have fewer keys."""
    return Pools(mean_of(k, block), *ends_of(k, block))


def mean_of(k: Float[Tensor, "B G M D"], block: int) -> Float[Tensor, "B G C D"]:
    """Mean key of each block."""
    return torch.cat([part.mean(3, dtype=sum_dtype(k)) for part in _blocks(k, block)], 2)


def ends_of(k: Float[Tensor, "B G M D"], block: int) -> tuple[Float[Tensor, "B G C D"], Float[Tensor, "B G C D"]]:
    """(minimum, maximum) of each channel over the keys of each block; equal keys share a gradient equally."""
    parts = _blocks(k, block)
    least, greatest = (torch.cat([end_of(part, 3, reduce) for part in parts], 2) for reduce in (torch.amin, torch.amax))
    return least, greatest


def end_of(x: Tensor, dim: int, reduce: Callable[..., Tensor]) -> Tensor:
    """`torch.amin` or `torch.amax` in float32 or wider; tied elements share the gradient equally.

    torch's own gradient does so, too, but its rule for ties may change between versions.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return reduce(x, dim).to(sum_dtype(x))
    end = reduce(x.detach(), dim, keepdim=True)
    at = x == end
    mean = torch.where(at, x, 0.0).sum(dim, dtype=sum_dtype(x)) / at.sum(dim)  # equals the end up to rounding
    return end.squeeze(dim) + (mean - mean.detach())


def _blocks(k: Tensor, block: int) -> list[Tensor]:
    """[whole blocks (B, G, C, block, D)], and the shorter last block as a second tensor, if any."""
    whole = k.shape[2] // block
    parts = [k[:, :, : whole * block].unflatten(2, (whole, block))] if whole else []
    return parts if whole * block == k.shape[2] else [*parts, k[:, :, whole * block :].unsqueeze(2)]


def summaries(
    q: Float[Tensor, "B H N D"], rows: Rows, part: range, sees: Bool[Tensor, "#B #H n query_block"] | None
) -> Float[Tensor, "B H n D"]:
    """One query for each of some rows: its first, or the mean of its queries that see a key; 0 if none of them does.

    sees: mask of queries that see a key; None if all do.
    """
    if not rows.whole:
        at = (torch.arange(part.start, part.stop, device=q.device) * rows.query_block - rows.lead).clamp(min=0)
        first = q if rows.query_block == 1 and len(part) == q.shape[2] else q[:, :, at]
        first = first.to(sum_dtype(q))
        return first if sees is None else first.masked_fill(~sees[..., :1], 0.0)
    queries = in_rows(q, rows, part)
    if sees is None:
        return queries.sum(3) / rows.queries_of(part)[1].to(queries)[:, None]
    return queries.masked_fill(~sees[..., None], 0.0).sum(3) / sees.sum(-1, keepdim=True).clamp(min=1)


def in_rows(q: Float[Tensor, "B H N D"], rows: Rows, part: range) -> Float[Tensor, "B H n query_block D"]:
    """Queries of some rows, in float32 or wider, padded with 0 where a row extends beyond the call's queries."""
    start, stop = (edge * rows.query_block - rows.lead for edge in (part.start, part.stop))
    shown = q[:, :, max(start, 0) : min(stop, q.shape[2])].to(sum_dtype(q))
    if shown.shape[2] != stop - start:
        shown = pad(shown, (0, 0, max(-start, 0), max(stop - q.shape[2], 0)))
    return shown.unflatten(2, (len(part), rows.query_block))
