"""One transformer block of LongNet: dilated attention with rotary positions and a feed-forward, each behind a norm."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from .._attend import attend
from ..decoding import KVCache
from ..masks import Layout, Mixture, Pattern
from ._longnet_config import LongNetConfig
from ._over_ranks import OverRanks

# B batch, N tokens, H heads, D head dim (even)
# B batch, N tokens, E embed dim, H query heads, G key/value heads, D head dim

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


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); tokens in the order of `layout` throughout.

    Queries, keys and values come from one projection. The norm is LayerNorm without bias, one fused kernel on
    CPU too, where RMSNorm is several.
    """

    def __init__(
        self,
        config: LongNetConfig,
        over_ranks: OverRanks | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = config.num_heads, config.kv_heads, config.head_dim
        self.depth, self.engine, self.over_ranks = config.depth, config.engine, over_ranks
        E, hidden = config.embed_dim, config.hidden_dim
        qkv_dim = (config.num_heads + 2 * config.kv_heads) * config.head_dim
        self.attention_norm = nn.LayerNorm(E, bias=False, device=device, dtype=dtype)
        self.qkv = nn.Linear(E, qkv_dim, bias=False, device=device, dtype=dtype)
        self.attention_out = nn.Linear(E, E, bias=False, device=device, dtype=dtype)
        self.ffn_norm = nn.LayerNorm(E, bias=False, device=device, dtype=dtype)
        self.ffn_in = nn.Linear(E, hidden, bias=False, device=device, dtype=dtype)
        self.ffn_out = nn.Linear(hidden, E, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of variance 1 / fan-in; those that write to the residual stream divided by 2 * depth more.

        The stream's variance then grows by a constant over the whole model, at any depth.
        """
        for linear in (self.qkv, self.ffn_in):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        for linear in (self.attention_out, self.ffn_out):
            nn.init.normal_(linear.weight, std=(2 * self.depth * linear.in_features) ** -0.5)

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        rotary: RotaryTable,
        pattern: Pattern | Mixture,
        layout: Layout | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B N E"]:
        """With a cache the tokens follow those it has seen; over ranks they are this rank's."""
        x = x + self._attend(self.attention_norm(x), rotary, pattern, layout, cache)
        return x + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(x)), approximate="tanh"))

    def _attend(
        self,
        x: Float[Tensor, "B N E"],
        rotary: RotaryTable,
        pattern: Pattern | Mixture,
        layout: Layout | None,
        cache: KVCache | None,
    ) -> Float[Tensor, "B N E"]:
        H, G = self.num_heads, self.kv_heads
        heads = self.qkv(x).unflatten(-1, (H + 2 * G, self.head_dim))
        qk, v = heads.split((H + G, G), dim=2)
        q, k = rotate(qk, rotary).split((H, G), dim=2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.over_ranks is not None:
            out = self.over_ranks.attend(q, k, v, pattern, enable_gqa=H != G, engine=self.engine)
        elif cache is None:
            out = attend(q, k, v, pattern, enable_gqa=H != G, layout=layout, engine=self.engine)
        else:
            out = cache.attend(q, k, v)
        return self.attention_out(out.transpose(1, 2).flatten(-2))
