"""Joining softmax parts, as expressions that autograd and torch.compile follow."""

import torch
from jaxtyping import Float
from torch import Tensor


def merge(
    out: Float[Tensor, "*rows D"], lse: Float[Tensor, "*rows"], part: Float[Tensor, "*rows D"], part_lse: Tensor
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows"]]:
    """(out, lse) with one more part over the same queries; a key that is in both counts twice.

    A row without keys on either side gives output 0 and lse -inf, with gradient 0. lses are natural logs.
    Source: LongNet, arXiv 2307.02486, eq. 10.
    """
    absent = part_lse == -torch.inf
    # Two infinities would make NaN, also in gradients that are not used: both are replaced before the arithmetic.
    gap = torch.where(absent, 0.0, part_lse) - torch.where(absent, 0.0, lse)
    share = torch.where(absent, 0.0, torch.sigmoid(gap))
    both = torch.logaddexp(torch.where(absent, 0.0, lse), torch.where(absent, 0.0, part_lse))
    joined = torch.where(absent, lse, both)
    return torch.lerp(out, part.to(out.dtype), share.unsqueeze(-1).to(out.dtype)), joined
