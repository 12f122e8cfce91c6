"""Heads in parts, for tensors with more elements than FlexAttention's kernels can count."""

from __future__ import annotations

import torch
from torch import Tensor

from .._call_key import CallKey

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

# Kernels compiled for accelerators take offsets in 32 bits, up to torch 2.13 at least; beyond, they would wrap.
_MOST_ELEMENTS = (1 << 31) - 1


def kv_head_parts(q: Tensor, k: Tensor) -> list[range]:
    """Key/value heads to compute together, so that no tensor of theirs or of their query heads is too large.

    Raises ValueError where a single one is.
    """
    kv_heads = k.shape[1]
    each = max(q.numel() // kv_heads, k.numel() // kv_heads)
    if q.device.type == "cpu" or each * kv_heads <= _MOST_ELEMENTS:
        return [range(kv_heads)]
    if each > _MOST_ELEMENTS:
        raise ValueError(
            f"flex needs tensors of at most {_MOST_ELEMENTS} elements for one key/value head and its query heads, as "
            f"its kernels count in 32 bits; got {each}, of shapes {tuple(q.shape)} and {tuple(k.shape)}. Call attend "
            "for parts of the batch, or for parts of the query heads with head_offset and num_heads_global"
        )
    at_once = _MOST_ELEMENTS // each
    return [range(begin, min(begin + at_once, kv_heads)) for begin in range(0, kv_heads, at_once)]


def key_of_part(key: CallKey, part: range) -> CallKey:
    """The call's key for these key/value heads and their query heads."""
    groups = key.num_heads // key.num_kv_heads
    sizes = {"num_heads": len(part) * groups, "num_kv_heads": len(part)}
    return key._replace(**sizes, head_offset=key.head_offset + part.start * groups)


def heads_of_part(x: Tensor, part: range, kv_heads: int) -> Tensor:
    """These heads of (B, X, N, D), or of one number a head: a view, if a kernel can count from its first element on."""
    each = x.shape[-3 if x.dim() == 4 else 0] // kv_heads
    some = slice(part.start * each, part.stop * each)
    if x.dim() == 1:
        return x[some]
    heads = x[:, some]
    last = sum((size - 1) * stride for size, stride in zip(heads.shape, heads.stride(), strict=True))
    return heads if last < _MOST_ELEMENTS else heads.contiguous()


def joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of all heads."""
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), None if lses[0] is None else torch.cat(lses, dim=1)
