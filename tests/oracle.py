"""The rules and the attention, dense and straight from their definitions: what the library is compared with.

A rule maps (head, heads in all, query positions, key positions) to an (N, M) table of counts: how often each
pair is allowed, 0 or 1 for a set. Nothing here is taken from the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import Tensor

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

Rule = Callable[[int, int, Tensor, Tensor], Tensor]


def causal() -> Rule:
    """Keys at the query's own position and before."""
    return lambda h, H, q, k: (k[None, :] <= q[:, None]).long()


def local_window(left: int, right: int) -> Rule:
    """Keys from query - left to query + right."""
    return lambda h, H, q, k: ((k[None, :] >= q[:, None] - left) & (k[None, :] <= q[:, None] + right)).long()


def dilated(segment: int, rate: int, offset: int | str) -> Rule:
    """Segment by segment: tokens offset, offset + rate, ... of each see each other, the rest nothing."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        end = int(max(q.max(), k.max())) + 1
        segment_of = torch.full((end,), -1)  # -1: not active
        for number, start in enumerate(range(0, end, segment)):
            segment_of[start : start + segment][offset_of(offset, rate, h, H) :: rate] = number
        return ((segment_of[q][:, None] == segment_of[k][None, :]) & (segment_of[q] >= 0)[:, None]).long()

    return rule


def offset_of(offset: int | str, rate: int, head: int, num_heads: int) -> int:
    """The offset of one of all heads: LongNet's eq. 13, torchscale's rule, or a fixed one."""
    if offset == "interleaved":
        return head % rate
    if offset == "contiguous":
        return head // ceil(num_heads / rate)
    assert isinstance(offset, int)
    return offset


def both(*rules: Rule) -> Rule:
    """Pairs that every set allows; one mixture among them keeps its counts."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([part(h, H, q, k) for part in rules]).prod(0)

    return rule


def either(*rules: Rule) -> Rule:
    """Pairs that any set allows."""
    return lambda h, H, q, k: torch.stack([part(h, H, q, k) for part in rules]).amax(0)


def neither(inner: Rule) -> Rule:
    """Pairs that a set forbids."""
    return lambda h, H, q, k: 1 - inner(h, H, q, k)


def total(*rules: Rule) -> Rule:
    """A mixture: counts add up."""
    return lambda h, H, q, k: torch.stack([part(h, H, q, k) for part in rules]).sum(0)


def per_head(*rules: Rule) -> Rule:
    """Head h follows rule h."""
    return lambda h, H, q, k: rules[h](h, H, q, k)


def grouped(*rules: Rule) -> Rule:
    """Consecutive groups of heads follow one rule each; unequal groups: the first have one head more."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        groups = torch.arange(H).tensor_split(len(rules))
        (mine,) = (index for index, heads in enumerate(groups) if h in heads)
        return rules[mine](h, H, q, k)

    return rule


def longnet(segments: Sequence[int], rates: Sequence[int], offsets: str = "interleaved", heads: str = "all") -> Rule:
    """LongNet's branches: every head runs all of them, or groups of heads run one each."""
    branches = [dilated(w, r, offsets) for w, r in zip(segments, rates, strict=True)]
    return grouped(*branches) if heads == "grouped" else total(*branches)


def counts(rule: Rule, heads: range, num_heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """(H, N, M): the rule over global heads and positions."""
    return torch.stack([rule(head, num_heads, queries, keys) for head in heads])


def useful_pairs(segments: Sequence[int], rates: Sequence[int], *, num_heads: int, N: int, causal: bool) -> int:
    """Pairs that a LongNet with interleaved offsets allows over N tokens, summed over branches and heads."""
    pairs = 0
    for w, r in zip(segments, rates, strict=True):
        for head in range(num_heads):
            lengths = (len(range(start + head % r, min(start + w, N), r)) for start in range(0, N, w))
            pairs += sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    return pairs


def attention(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of one softmax in which a pair weighs as often as it is allowed.

    A row without keys has output 0 and lse -inf. Query head h reads key/value head h // (H / G).
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(counts == 0, -torch.inf)
    empty = (counts.sum(-1) == 0).expand(scores.shape[:-1])
    top = scores.detach().amax(-1).masked_fill(empty, 0.0)
    weights = counts * (scores - top[..., None]).exp()
    sums = weights.sum(-1).masked_fill(empty, 1.0)
    return weights @ v / sums[..., None], (sums.log() + top).masked_fill(empty, -torch.inf)
