"""Rotary positions: each pair of channels turns by an angle in proportion to the token's position."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# B batch, N tokens, H heads, D head dim (even)

RotaryTable = tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]


def rotary_table(positions: Int64[Tensor, " N"], *, head_dim: int, base: float, dtype: torch.dtype) -> RotaryTable:
    """Cosines and signed sines for `rotate`: channels i and i + D/2 turn by position * base^(-2i/D).

    One table serves all layers of a forward pass. It is float32, or float64 for features of that `dtype`.
    Angles are formed in float64: in float32 an angle near position 1,000,000 is off by 0.03 radians.
    Source: RoFormer, arXiv 2104.09864, eq. 34, with the two channels of a pair half a head apart.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions.double()[:, None] * base**-exponents
    cos, sin = (part.to(torch.promote_types(dtype, torch.float32)) for part in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Float[Tensor, "B N H D"], table: RotaryTable) -> Float[Tensor, "B N H D"]:
    """Turn every head's channels by its token's angles; computed in the table's dtype, returned in x's."""
    cos, signed_sin = (part[:, None, :] for part in table)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin).to(x.dtype)
