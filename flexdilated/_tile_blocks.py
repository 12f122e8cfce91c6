"""Running block lists: gather the tiles of each call, run the kernel, put the rows back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ._kernel import Operands, flash_backward, flash_forward
from ._tile_calls import Call, Calls

# B batch, H query heads, G key/value heads, F folds, Q query slots, K key slots, D head dim, n problems

_GATHERED_BYTES = 32 << 20  # keys and values gathered at once


@dataclass(frozen=True)
class _Tiles:
    """Where the problems of a call lie in rows of (heads * slots)."""

    queries: Int64[Tensor, "n q"]
    keys: Int64[Tensor, "n k"]
    mask: Float[Tensor, "1 n q k"] | None
    hidden: Tensor | None  # (1, n, q): rows without any key


def forward(x: Operands, calls: Calls, *, scale: float) -> tuple[Float[Tensor, "B H F Q D"], Float[Tensor, "B H F Q"]]:
    """(out, lse); rows in no list give output 0 and lse -inf."""
    q, k, v = (_rows(part) for part in (x.q, x.k, x.v))
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=_lse_dtype(q))
    for tiles in _tiles(x, calls):
        part, part_lse = flash_forward(
            _pick(q, tiles.queries), _pick(k, tiles.keys), _pick(v, tiles.keys), scale=scale, mask=tiles.mask
        )
        if tiles.hidden is not None:
            part_lse = part_lse.masked_fill(tiles.hidden, -torch.inf)
        index = tiles.queries.flatten()
        out.index_copy_(1, index, part.flatten(1, 2))
        lse.index_copy_(1, index, part_lse.flatten(1, 2))
    return _unrows(out, x.q), _unrows(lse, x.q)


def backward(
    x: Operands, calls: Calls, grad_out: Tensor, out: Tensor, lse: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float32 or wider; `lse` is +inf where a row has no key."""
    q, k, v, grad_out, out, lse = (_rows(part) for part in (x.q, x.k, x.v, grad_out, out, lse))
    dq, dk, dv = (torch.zeros_like(part, dtype=lse.dtype) for part in (q, k, v))
    for tiles in _tiles(x, calls):
        row_lse = _pick(lse, tiles.queries)
        if tiles.hidden is not None:
            row_lse = row_lse.masked_fill(tiles.hidden, torch.inf)
        tile_grad, tile_q, tile_out = (_pick(part, tiles.queries) for part in (grad_out, q, out))
        tile_k, tile_v = (_pick(part, tiles.keys) for part in (k, v))
        grads = flash_backward(
            tile_grad, tile_q, tile_k, tile_v, tile_out, row_lse.contiguous(), scale=scale, mask=tiles.mask
        )
        for total, grad, index in zip((dq, dk, dv), grads, (tiles.queries, tiles.keys, tiles.keys), strict=True):
            total.index_add_(1, index.flatten(), grad.flatten(1, 2).to(total.dtype))
    return _unrows(dq, x.q), _unrows(dk, x.k), _unrows(dv, x.v)


def _tiles(x: Operands, calls: Calls) -> Iterator[_Tiles]:
    num_q, num_k, q_block, k_block = calls.shape
    groups = x.q.shape[1] // x.k.shape[1]
    for call in calls.calls:
        bytes_each = 2 * x.q.shape[0] * x.q.shape[2] * call.num_keys * x.q.shape[-1] * x.q.element_size()
        at_once = max(1, _GATHERED_BYTES // bytes_each)
        for begin in range(0, len(call.row), at_once):
            part = call.select(slice(begin, begin + at_once))
            queries = (part.head * num_q + part.row * q_block)[:, None] + torch.arange(call.num_queries)
            first = (part.head // groups * num_k)[:, None] + part.columns.long() * k_block
            keys = (first[:, :, None] + torch.arange(k_block)).flatten(1)[:, : call.num_keys]
            yield _Tiles(queries, keys, *_masks(calls, part, x.q.dtype))


def _masks(calls: Calls, call: Call, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """(the mask to add to the scores, rows it hides wholly), or None for both."""
    allowed = calls.mask_of(call)
    if allowed is None:
        return None, None
    added = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)
    return added[None], ~allowed.any(-1)[None]


def _rows(x: Tensor) -> Tensor:
    """(batch * folds, heads * slots, ...)."""
    return x.transpose(1, 2).flatten(0, 1).flatten(1, 2)


def _unrows(x: Tensor, like: Tensor) -> Tensor:
    batch, heads, folds, slots = like.shape[:4]
    return x.unflatten(1, (heads, slots)).unflatten(0, (batch, folds)).transpose(1, 2)


def _pick(rows: Tensor, index: Int64[Tensor, "n m"]) -> Tensor:
    return rows.index_select(1, index.flatten()).unflatten(1, index.shape)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
