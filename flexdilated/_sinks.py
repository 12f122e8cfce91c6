"""Attention sinks: one more term a head in each row's softmax denominator, a logit without a key."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ._merge import merge

# B batch, H heads, N queries, D head dim


def with_sinks(
    out: Float[Tensor, "B H N D"], lse: Float[Tensor, "B H N"], sinks: Float[Tensor, " H"]
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """(out, lse) with each row's sink in its softmax: a part with output 0 and the sink for its lse."""
    logits = sinks.to(lse.dtype)[:, None].expand_as(lse)
    return merge(out, lse, out.new_zeros(()).expand_as(out), logits)


def add_sinks(
    out: Float[Tensor, "B H N D"], lse: Float[Tensor, "B H N"], sinks: Float[Tensor, " H"]
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """The same without autograd, in the memory of `out`."""
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # A row without keys keeps nothing; its difference may be that of two infinities.
    kept = (lse - joined).exp().masked_fill(lse == -torch.inf, 0.0)
    return out.mul_(kept[..., None]), joined


def sinks_gradient(
    sinks: Float[Tensor, " H"],
    out: Float[Tensor, "B H N D"],
    lse: Float[Tensor, "B H N"],
    grad_out: Float[Tensor, "B H N D"],
    grad_lse: Float[Tensor, "B H N"] | None,
) -> Float[Tensor, " H"]:
    """Gradient of the sinks, from the out and lse of which they are part.

    A sink has weight exp(sink - lse) and value 0, so like any score it gets that weight times
    (grad_out · value - grad_out · out + grad_lse).
    """
    # A row without keys has output 0, whatever its gradient holds.
    delta = torch.where(out == 0, 0.0, grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(lse.dtype)
    absent = lse == -torch.inf
    weight = (sinks.to(lse.dtype)[:, None] - lse.masked_fill(absent, torch.inf)).exp()
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
