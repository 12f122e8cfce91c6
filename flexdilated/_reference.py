"""The dense oracle: attention as the definition says it, in float64 with an N x M matrix. For tests and tiny inputs."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .masks import Bound

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


def multiplicity(bound: Bound, device: torch.device) -> Int64[Tensor, "H N M"]:
    """How many branches allow each pair."""
    h = torch.arange(bound.num_heads, device=device)[:, None, None] + bound.head_offset
    q = torch.arange(bound.num_queries, device=device)[None, :, None] + bound.q_offset
    k = torch.arange(bound.num_keys, device=device)[None, None, :]
    shape = (bound.num_heads, bound.num_queries, bound.num_keys)
    total = torch.zeros(shape, dtype=torch.int64, device=device)
    for branch in bound.pattern.branches():
        rule = branch.mask_mod(num_heads=bound.num_heads_global, device=device)
        total += rule(torch.zeros((), dtype=torch.int64, device=device), h, q, k)
    return total


def reference_attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    bound: Bound,
    *,
    scale: float,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """One softmax over the multiset union, in float64; out in q's dtype, lse in float64.

    Differentiable as often as wanted. Rows without keys give output 0 and lse -inf.
    """
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.double() @ keys.transpose(-1, -2)) * scale + multiplicity(bound, q.device).double().log()
    empty = (scores == -torch.inf).all(-1)
    # A row without keys has no softmax, and none of its NaN gradients: its weights come out 0 all the same.
    lse = scores.masked_fill(empty[..., None], 0.0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ values).to(q.dtype), lse.masked_fill(empty, -torch.inf)
