"""What the jobs of `doctor --verify` compute, and what must come out: float64, from rules written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# B batch, H query heads, G key/value heads, N tokens, D head dim

TOKENS, HEADS, HEAD_DIM = 1000, 4, 32  # a multiple of nothing, so that every segment ends early
BRANCHES = ((64, 256), (1, 4))  # segment lengths, dilation rates


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs in float64 on the CPU, the gradient of the output, and how often query i of head h may see key j."""

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B G N D"]
    v: Float[Tensor, "B G N D"]
    grad: Float[Tensor, "B H N D"]
    times: Int64[Tensor, "H N N"]

    @classmethod
    def of(cls, times: Int64[Tensor, "H N N"], *, kv_heads: int = HEADS) -> Problem:
        """Drawn from a seed of their own: torch's generators stay as they are."""
        generator = torch.Generator().manual_seed(0)
        tokens = times.shape[-1]
        sizes = (HEADS, kv_heads, kv_heads, HEADS)
        options = {"generator": generator, "dtype": torch.float64}
        q, k, v, grad = (torch.randn(1, heads, tokens, HEAD_DIM, **options) for heads in sizes)
        return cls(q, k, v, grad, times)

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in float32 there, as leaves that want gradients."""
        q, k, v = (x.to(device, torch.float32).requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v

    def exact(self) -> tuple[Tensor, ...]:
        """The output, and the gradients of q, k and v."""
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        groups = HEADS // k.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        weights = self.times * torch.exp(q @ keys.transpose(-2, -1) * HEAD_DIM**-0.5)
        sums = weights.sum(-1, keepdim=True)
        out = weights @ values / torch.where(sums > 0, sums, 1)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), self.grad))


def causal(tokens: int = TOKENS) -> Int64[Tensor, "H N N"]:
    """No query sees a later key."""
    q, k = _positions(tokens)
    return (k <= q).long().expand(HEADS, tokens, tokens)


def window(left: int, tokens: int = TOKENS) -> Int64[Tensor, "H N N"]:
    """Each query sees itself and `left` keys before it."""
    q, k = _positions(tokens)
    return ((k <= q) & (q - k <= left)).long().expand(HEADS, tokens, tokens)


def dilated(
    segments: Sequence[int] = BRANCHES[0], rates: Sequence[int] = BRANCHES[1], tokens: int = TOKENS
) -> Int64[Tensor, "H N N"]:
    """LongNet's causal branches: the active tokens of a segment see each other; each branch counts."""
    q, k = _positions(tokens)
    head = torch.arange(HEADS)[:, None, None]
    found = torch.zeros(HEADS, tokens, tokens, dtype=torch.int64)
    for segment, rate in zip(segments, rates, strict=True):
        active = [(x % segment) % rate == head % rate for x in (q, k)]
        found += active[0] & active[1] & (q // segment == k // segment) & (k <= q)
    return found


def documents(ids: Int64[Tensor, " N"]) -> Int64[Tensor, "H N N"]:
    """Causal within each document."""
    return causal(len(ids)) * (ids[:, None] == ids)


def error_of(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, against the largest number of its kind; infinite where a result is not finite."""
    largest = 0.0
    for x, y in zip(found, exact, strict=True):
        if x.shape != y.shape:
            raise ValueError(f"a result must have shape {tuple(y.shape)}; got {tuple(x.shape)}")
        difference = float((x.detach().cpu().double() - y.cpu()).abs().max() / y.abs().max().clamp(min=1e-300))
        largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def _positions(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.arange(tokens)[:, None], torch.arange(tokens)
