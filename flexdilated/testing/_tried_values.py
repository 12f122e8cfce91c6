"""The kinds of values that a module or a call is tried with."""

from __future__ import annotations

import torch
from torch import Tensor

# B batch, H query heads, G key/value heads, N tokens, D head dim

# What values a case has. Of every length the first is tried, and one of the others in turn.
KINDS = ("ordinary values", "large scores", "equal keys", "zeros and -0.0", "one key far above the others")


def values(
    kind: str, num_heads: int, num_kv_heads: int, num_tokens: int, head_dim: int, *, batch: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64, of a kind of KINDS."""
    generator = torch.Generator("cpu").manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (
        torch.randn((batch, number, num_tokens, head_dim), generator=generator, dtype=torch.float64) for number in heads
    )
    if kind == "large scores":
        q = 30 * q
    elif kind == "equal keys":
        k = k[:, :, :1].expand_as(k).clone()
    elif kind == "zeros and -0.0":
        q, k = torch.zeros_like(q), -torch.zeros_like(k)
    elif kind == "one key far above the others":
        k[:, :, num_tokens // 2] *= 20
    return q, k, v
