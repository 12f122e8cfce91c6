"""Dilated self-attention with torchscale's parameters, exact or as published."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from ..._attend import attend
from ...masks import dilated, longnet
from ._config import LongNetEncoderConfig

# B batch, N tokens, E embed dim, H heads, D head dim


class DilatedSelfAttention(nn.Module):
    """Projections, dilated attention, a norm, and the output projection.

    Source: microsoft/torchscale, component/dilated_attention.py and multihead_attention.py.

    >>> from flexdilated.integrations.torchscale import DilatedSelfAttention, LongNetEncoderConfig
    >>> sizes = {"embed_dim": 64, "depth": 1, "num_heads": 4}
    >>> attention = DilatedSelfAttention(LongNetEncoderConfig(**sizes, segment_lengths=(64,), dilation_rates=(2,)))
    >>> attention(torch.randn(1, 100, 64)).shape
    torch.Size([1, 100, 64])
    """

    def __init__(
        self,
        config: LongNetEncoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        E = config.embed_dim
        self.k_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.v_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.q_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.out_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.inner_attn_ln = nn.LayerNorm(E, eps=config.norm_eps, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        """Attention output of all tokens, after the output projection."""
        q, k, v = self.project(x)
        config, N = self.config, x.shape[1]
        branches = list(zip(config.segment_lengths, config.dilation_rates, strict=True))
        if config.merge_grad == "exact" and not any(self._shifts(segment, rate, N) for segment, rate in branches):
            out = attend(q, k, v, config.pattern, engine=config.engine)
        else:
            out = join([self._branch(q, k, v, *each) for each in branches], detached=config.merge_grad == "detached")
        return self.out_proj(self.inner_attn_ln(out.transpose(1, 2).flatten(2)))

    def project(
        self, x: Float[Tensor, "B N E"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N D"], Float[Tensor, "B H N D"]]:
        """Queries, keys and values, as `attend` takes them."""
        q, k, v = (
            each(x).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def _shifts(self, segment: int, rate: int, num_tokens: int) -> bool:
        """True if torchscale shifts rows of a branch: it pads every segment for the rate, but trims only the last."""
        return self.config.padding is not None and num_tokens > segment and segment % rate != 0

    def _branch(self, q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int) -> tuple[Tensor, Tensor]:
        """(out, lse) of one branch."""
        N, engine = q.shape[2], self.config.engine
        if not self._shifts(segment, rate, N):
            pattern = longnet((segment,), (rate,), offsets="contiguous", padding=self.config.padding)
            return attend(q, k, v, pattern, engine=engine, return_lse=True)
        # Zeros are inserted as tokens, so all zero keys take part; output row p is row p of the longer sequence.
        longer = segment + -segment % rate
        q, k, v = (_with_zeros(x, segment, longer) for x in (q, k, v))
        out, lse = attend(q, k, v, dilated(longer, rate, "contiguous"), engine=engine, return_lse=True)
        return out[:, :, :N], lse[:, :, :N]

    def extra_repr(self) -> str:
        return f"{self.config.pattern!r}, merge_grad={self.config.merge_grad!r}"


def join(
    parts: list[tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]], *, detached: bool
) -> Float[Tensor, "B H N D"]:
    """Sum of branch outputs, weighted by their softmax denominators; detached: no gradient through the weights."""
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    lses = lses.detach() if detached else lses
    none = (lses == -torch.inf).all(0)  # rows without keys in any branch: outputs are 0, and weights must not be NaN
    weights = lses.masked_fill(none, 0.0).softmax(0)
    return (weights.unsqueeze(-1).to(outs.dtype) * outs).sum(0)


def _with_zeros(x: Float[Tensor, "B H N D"], segment: int, longer: int) -> Float[Tensor, "B H M D"]:
    """Pad the sequence to whole segments, then each segment to length `longer`, with zeros."""
    x = pad(x, (0, 0, 0, -x.shape[2] % segment)).unflatten(2, (-1, segment))
    return pad(x, (0, 0, 0, longer - segment)).flatten(2, 3)
