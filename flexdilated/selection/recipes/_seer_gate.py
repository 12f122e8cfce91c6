"""The gate of SeerAttention; `SelectedAttention.distill_loss` trains it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ...masks.core import require_choice, require_finite, require_int
from .._pools import Pools

# B batch, H query heads, G key/value heads, N queries, M keys, R rows, C blocks of keys, T tables, D head dim,
# E gate dim


_SHARES = ("head", "group")


class SeerGate(nn.Module):
    """Scores blocks of keys for rows of queries: RoPE(W_q query) · RoPE(W_k [greatest, least, mean] keys) / sqrt(dim).

    A scorer for `BlockSelector`, as `seer_attention` and `seer_attention_r` build them. Each head has its own weights.
    The rotary embedding counts tokens: a row stands where it begins, a block at its first key. So queries and keys come
    before the model's own rotary embedding.

    head_dim, num_heads, num_kv_heads: of the attention; num_kv_heads divides num_heads, and is as many if not given.
    block: tokens of a block of keys, as in the selector. dim: of the gate, even; 128 in the paper.
    share: "head", a score for each query head; "group", one for those of a key/value head, whose projected queries are
    added up, as in SeerAttention-R. base: of the rotary embedding.

    Raises TypeError or ValueError for other values.
    Source: SeerAttention, arXiv 2410.13276, section 3.1, and SeerAttention-R, arXiv 2506.08889.

    >>> gate = fd.selection.recipes.SeerGate(64, 4, block=32)
    >>> gate.query.shape, gate.key.shape
    (torch.Size([4, 64, 128]), torch.Size([4, 192, 128]))
    """

    takes_positions = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        block: int,
        dim: int = 128,
        share: str = "head",
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        require_int("head_dim", head_dim, minimum=1)
        require_int("num_heads", num_heads, minimum=1)
        groups = require_int("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, minimum=1)
        if num_heads % groups:
            raise ValueError(f"num_kv_heads must divide num_heads; got num_kv_heads={groups} and {num_heads=}")
        if require_int("dim", dim, minimum=2) % 2:
            raise ValueError(f"dim must be even, as the rotary embedding turns pairs; got {dim=}")
        if require_finite("base", base) <= 1:
            raise ValueError(f"base must be above 1; got {base=}")
        self.block, self.share = require_int("block", block, minimum=1), require_choice("share", share, _SHARES)
        self.base = float(base)
        self.query = nn.Parameter(torch.randn(num_heads, head_dim, dim) * head_dim**-0.5)
        self.key = nn.Parameter(torch.randn(groups, 3 * head_dim, dim) * (3 * head_dim) ** -0.5)

    def forward(
        self, queries: Float[Tensor, "B H R D"], pools: Pools, positions: Int64[Tensor, " R"]
    ) -> Float[Tensor, "B T R C"]:
        """Scores of all blocks, T = H or, with share="group", T = G; `positions` are those at which rows begin."""
        expected, came = (len(self.query), len(self.key)), (queries.shape[1], pools.mean.shape[1])
        if came != expected:
            raise ValueError(f"the gate serves {expected[0]} heads and {expected[1]} key/value heads; got {came}")
        q = queries @ self.query.to(queries.dtype)
        k = torch.cat([pools.greatest, pools.least, pools.mean], -1) @ self.key.to(queries.dtype)
        q = q.unflatten(1, (k.shape[1], -1))
        q = q.sum(2, keepdim=True) if self.share == "group" else q
        begins = torch.arange(k.shape[2], device=k.device) * self.block
        q, k = _turned(q, positions, self.base), _turned(k, begins, self.base)
        return (q @ k.unsqueeze(2).mT).flatten(1, 2) * k.shape[-1] ** -0.5

    def extra_repr(self) -> str:
        heads, head_dim, dim = self.query.shape
        sizes = f"{head_dim}, {heads}, {len(self.key)}, block={self.block}, dim={dim}"
        return f"{sizes}, share={self.share!r}, base={self.base}"


def _turned(x: Float[Tensor, "... n E"], positions: Int64[Tensor, " n"], base: float) -> Float[Tensor, "... n E"]:
    """Rotary embedding: channel i and channel i + E/2 are turned by position * base^(-2 i / E)."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
