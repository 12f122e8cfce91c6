"""Rotary position embedding, with channels i and i + E/2 as a pair."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def angles_at(positions: Int64[Tensor, " n"], channels: int, base: float) -> Float[Tensor, "n channels/2"]:
    """Return the angle position * base^(-2 i / channels) of each pair i of channels, in float64."""
    half = channels // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=positions.device) / half)
    return positions[:, None] * rates


def rotate(x: Float[Tensor, "... E"], cos: Float[Tensor, "... E/2"], sin: Float[Tensor, "... E/2"]) -> Tensor:
    """Return x with each pair of channels (i, i + E/2) rotated by the angle of cos and sin, in the dtype of x."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
