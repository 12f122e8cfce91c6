"""Dilated attention as torchscale publishes it: pad with zeros, cut, dilate, a softmax for each part, scatter, merge.

Written from the description of microsoft/torchscale, torchscale/component/dilated_attention.py, dense and in loops.
"""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from tests.support import oracle

# B batch, H heads, N tokens, D head dim


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[int],
    rates: Sequence[int],
    *,
    offsets: str = "contiguous",
    shifted: bool = True,
    detached: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all branches. detached: the weights of the merge have no gradient, as published.

    shifted: as published, where a branch has several segments and its rate does not divide them. Else each segment's
    rows go back to where its tokens stand.
    """
    parts = [branch(q, k, v, w, r, offsets, shifted) for w, r in zip(segments, rates, strict=True)]
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    lse = lses.masked_fill((lses == -torch.inf).all(0), 0.0).logsumexp(0)  # rows of no branch have no gradient
    weights = (lses - lse).exp()
    out = ((weights.detach() if detached else weights)[..., None] * outs).sum(0)
    return out, lse.masked_fill((lses == -torch.inf).all(0), -torch.inf)


def branch(
    q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int, offsets: str, shifted: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one branch; a row that it leaves out has output 0 and lse -inf."""
    B, H, N, D = q.shape
    w = min(segment, N)
    padded_w, number = ceil(w / rate) * rate, ceil(N / w)
    q, k, v = (_padded(x, w, padded_w, number) for x in (q, k, v))
    out, lse = q.new_zeros(B, H, number, padded_w, D), q.new_full((B, H, number, padded_w), -torch.inf)
    for head in range(H):
        offset = oracle.offset_of(offsets, rate, head, H)
        for index in range(number):
            some = (slice(None), head, index, slice(offset, None, rate))
            scores = q[some] @ k[some].mT * D**-0.5
            out[some], lse[some] = scores.softmax(-1) @ v[some], scores.logsumexp(-1)
    if not shifted:
        out, lse = out[:, :, :, :w], lse[:, :, :, :w]
    return out.flatten(2, 3)[:, :, :N], lse.flatten(2, 3)[:, :, :N]


def _padded(x: Tensor, w: int, padded_w: int, number: int) -> Tensor:
    """(B, H, segments, tokens and zeros of each, D)."""
    B, H, N, D = x.shape
    tokens = torch.cat((x, x.new_zeros(B, H, number * w - N, D)), 2).view(B, H, number, w, D)
    return torch.cat((tokens, x.new_zeros(B, H, number, padded_w - w, D)), 3)
