"""Attention over block lists, by kernel calls on tiles of queries and keys.

A kernel call views or gathers its queries and keys, runs a dense kernel on them, and writes its rows of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ...masks.planning import GATHERED_BYTES
from .._merge import sum_dtype
from .._operands import additive_mask
from ..kernels._kernel import KernelTensors, fill_blind, flash_backward, flash_forward
from ._tile_calls import KernelCall, KernelCalls

# B batch, H query heads, G key/value heads, F folds, Q query slots, K key slots, D head dim
# X heads or folds that run together, n problems

_PAIRS_AT_ONCE = 1 << 20  # pairs that keep a kernel busy: with fewer per head, heads are batched

_Index = tuple[int, int | slice, int | slice]


@dataclass(frozen=True)
class _Portion:
    """Kernel call for some heads or folds of one batch entry.

    at_q, at_k: (batch entry, heads, folds) as indices of q and of k and v.
    mask: additive, one per problem or one for all; None if every pair is allowed.
    blind: True for queries for which `mask` hides all keys; None if there are none or `KernelTensors.visible` is None.
    """

    call: KernelCall
    at_q: _Index
    at_k: _Index
    mask: Float[Tensor, "#n 1 #Q K"] | None
    blind: Bool[Tensor, "n 1 #Q"] | None


def forward(
    x: KernelTensors, calls: KernelCalls, *, scale: float
) -> tuple[Float[Tensor, "B H F Q D"], Float[Tensor, "B H F Q"]]:
    """Return (out, natural lse) of attention under the mask of `calls`: out in q's dtype, lse in float32 or wider.

    A query without a listed block has output 0 and lse -inf. A query whose listed blocks allow it no key must be 0 in
    x.q; its lse may be 0, which the caller must replace by -inf.
    """
    q, k, v = x.q, _pad_slots(x.k, calls.key_slots), _pad_slots(x.v, calls.key_slots)
    out = torch.empty_like(q) if calls.complete else torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=sum_dtype(q))
    for each in _portions(x, calls):
        queries, keys = each.call.queries, each.call.keys
        tile_q = queries.of(q[each.at_q])
        tile_k, tile_v = (_as_problems(keys.of(part[each.at_k])) for part in (k, v))
        few_q = fill_blind(_as_problems(tile_q), each.blind)
        part, part_lse = flash_forward(few_q, tile_k, tile_v, scale=scale, mask=each.mask)
        part_lse = fill_blind(part_lse, each.blind, -torch.inf)
        part, part_lse = part.reshape(tile_q.shape), part_lse.reshape(tile_q.shape[:-1])
        queries.put(out[each.at_q], part)
        queries.put(lse[each.at_q], part_lse)
    return out, lse


def backward(
    x: KernelTensors, calls: KernelCalls, grad_out: Tensor, out: Tensor, lse: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of `forward` in the dtype of lse, float32 or wider.

    out and lse may belong to a softmax over more keys. lse must be +inf, not -inf, for a query without keys.
    """
    q, k, v = x.q, _pad_slots(x.k, calls.key_slots), _pad_slots(x.v, calls.key_slots)
    dq = (torch.empty_like if calls.complete else torch.zeros_like)(q, dtype=lse.dtype)
    dk, dv = (torch.zeros_like(part, dtype=lse.dtype) for part in (k, v))
    for each in _portions(x, calls):
        queries, keys = each.call.queries, each.call.keys
        tile_grad, tile_q, tile_out = (queries.of(part[each.at_q]) for part in (grad_out, q, out))
        tile_k, tile_v = (keys.of(part[each.at_k]) for part in (k, v))
        row_lse = fill_blind(_as_problems(queries.of(lse[each.at_q])), each.blind, torch.inf)
        few_grad, few_q, few_out = (
            fill_blind(_as_problems(part), each.blind) for part in (tile_grad, tile_q, tile_out)
        )
        grad_q, grad_k, grad_v = flash_backward(
            few_grad, few_q, _as_problems(tile_k), _as_problems(tile_v), few_out, row_lse, scale=scale, mask=each.mask
        )
        queries.put(dq[each.at_q], grad_q.reshape(tile_q.shape))
        keys.add(dk[each.at_k], grad_k.reshape(tile_k.shape))
        keys.add(dv[each.at_k], grad_v.reshape(tile_v.shape))
    return dq, dk[:, :, :, : x.k.shape[3]], dv[:, :, :, : x.v.shape[3]]


def _portions(x: KernelTensors, calls: KernelCalls) -> Iterator[_Portion]:
    """Yield the kernel calls of all batch entries and heads, split to bound the bytes that each gathers."""
    hidden = None if x.visible is None else _pad_slots(additive_mask(x.visible, x.q.dtype), calls.key_slots)
    for call in calls.calls:
        own_masks = call.masks is not None and len(call.masks) > 1
        mask = None if own_masks else calls.mask_of(call, x.q.dtype)
        mask_row = call.queries.length if own_masks or (hidden is not None and call.masks is not None) else 0
        bytes_each = (2 * x.q.shape[-1] + mask_row) * call.keys.length * x.q.element_size()
        for part in call.parts(max(1, GATHERED_BYTES // bytes_each)):
            if own_masks:
                mask = calls.mask_of(part, x.q.dtype)
            together = max(1, _PAIRS_AT_ONCE // (len(part.row) * part.num_pairs))
            for at_q, at_k in _head_and_fold_indices(x, calls.heads[call.table], together):
                many = None if mask is None else _repeat_masks(mask, times=x.q[at_q].shape[0])
                if hidden is None:
                    yield _Portion(part, at_q, at_k, many, None)
                    continue
                rows = _as_problems(part.keys.of(hidden[at_k])).unsqueeze(2)
                many = rows if many is None else many + rows
                blind = many.amax(-1) == -torch.inf
                yield _Portion(part, at_q, at_k, many, blind if bool(blind.any()) else None)


def _head_and_fold_indices(x: KernelTensors, heads: tuple[int, ...], together: int) -> Iterator[tuple[_Index, _Index]]:
    """Yield (index of q, index of k and v), each (batch entry, heads, folds), that together cover these query heads.

    An index has up to `together` folds of one head or, if there is one fold and no grouped-query attention, up to
    `together` evenly spaced heads.
    """
    groups, folds = x.q.shape[1] // x.k.shape[1], x.q.shape[2]
    for batch in range(x.q.shape[0]):
        if folds > 1 or groups > 1:
            for head in heads:
                for begin in range(0, folds, together):
                    some = slice(begin, begin + together)
                    yield (batch, head, some), (batch, head // groups, some)
        else:
            for some in _head_slices(heads, together):
                yield (batch, some, 0), (batch, some, 0)


def _head_slices(heads: tuple[int, ...], most: int) -> Iterator[slice]:
    """Yield slices of head indices, each of at most `most` heads, that together are the ascending `heads`.

    E.g. heads (0, 2, 4, 5) with most 8 -> slices of 0, 2, 4 and of 5.
    """
    begin = 0
    while begin < len(heads):
        step = heads[begin + 1] - heads[begin] if begin + 1 < min(len(heads), begin + most) else 1
        end = begin + 1
        while end < min(len(heads), begin + most) and heads[end] - heads[end - 1] == step:
            end += 1
        yield slice(heads[begin], heads[end - 1] + 1, step)
        begin = end


def _repeat_masks(mask: Float[Tensor, "m Q K"], *, times: int) -> Float[Tensor, "n 1 Q K"]:
    """Return m > 1 masks repeated for `times` heads or folds, n = times * m; a single mask once, n = 1."""
    return (mask if len(mask) == 1 or times == 1 else mask.repeat(times, 1, 1)).unsqueeze(1)


def _as_problems(tiles: Tensor) -> Tensor:
    """Return tiles (X, n, slots, ...) as (X * n, 1, slots, ...): with one head the kernel's output is contiguous."""
    return tiles.flatten(0, 1).unsqueeze(1)


def _pad_slots(x: Tensor, slots: int) -> Tensor:
    """Return x (B, G, F, K, ...), padded with zeros along K to size `slots`."""
    return x if x.shape[3] == slots else pad(x, (0, 0) * (x.dim() - 4) + (0, slots - x.shape[3]))
