"""Where tokens stand, as queries and keys are told: rotary angles, and xPos's decay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ._longnet_config import LongNetConfig

# B batch, N tokens, H query heads, G key/value heads, D head dim (even)

RotaryTable = tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]

_GAMMA = 0.4  # of xPos
_SPAN = 126  # scales of xPos: its least factor to the power of half of them is near float32's smallest number


class Turns(NamedTuple):
    """What turns queries and keys, made once for all layers of a forward pass."""

    table: RotaryTable
    decay: Float[Tensor, "N 1 D"] | None = None

    def apply(
        self, qk: Float[Tensor, "B N HG D"], num_heads: int, kv_heads: int
    ) -> tuple[Float[Tensor, "B N H D"], Float[Tensor, "B N G D"]]:
        """Queries and keys, side by side, at their positions."""
        q, k = rotate(qk, self.table).split((num_heads, kv_heads), dim=2)
        if self.decay is None:
            return q, k
        if q.dtype == torch.float16:
            raise ValueError("position='xpos' needs the range of float32 or bfloat16; got float16")
        return (q * self.decay).to(q.dtype), (k / self.decay).to(k.dtype)


def turns(config: LongNetConfig, positions: Int64[Tensor, " N"], end: int, dtype: torch.dtype) -> Turns | None:
    """Those of tokens at these positions, all below `end`; None for a model that does not turn queries and keys.

    xPos multiplies queries by ζ^(n/s) and divides keys by it, ζ a factor for each pair of channels and s its scale; the
    exponents are counted from the middle of the span that float32 allows. Raises ValueError beyond it.
    Source: xPos, arXiv 2212.10554, section 2.
    """
    if config.position not in ("rotary", "xpos"):
        return None
    table = rotary_table(positions, head_dim=config.head_dim, base=config.rotary_base, dtype=dtype)
    if config.position == "rotary":
        return Turns(table)
    if end > _SPAN * config.xpos_scale:
        raise ValueError(
            f"xPos reaches {_SPAN * config.xpos_scale} tokens with xpos_scale={config.xpos_scale}: raise it, or take "
            f"position='rotary'; got {end} tokens"
        )
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float64) / config.head_dim
    exponents = positions.double() / config.xpos_scale - _SPAN / 2
    decay = ((pairs + _GAMMA) / (1 + _GAMMA)) ** exponents[:, None, None]
    return Turns(table, torch.cat((decay, decay), dim=-1).to(table[0].dtype))


def rotary_table(positions: Int64[Tensor, " N"], *, head_dim: int, base: float, dtype: torch.dtype) -> RotaryTable:
    """Cosines and signed sines for `rotate`: channels i and i + D/2 turn by position * base^(-2i/D).

    The table is float32, or float64 for features of that `dtype`.
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
