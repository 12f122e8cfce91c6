"""A plain attention over LongNet's branches, right as it stands, and what other libraries do at its steps instead."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flexdilated import masks
from flexdilated.testing import Calls, check_attention_module
from tests import oracle
from tests.planted_bugs import Bug, Look

# B batch, H query heads, G key/value heads, N tokens, D head dim, P parts

SEGMENTS, RATES = (6, 12), (1, 2)
PATTERN = masks.longnet(segment_lengths=SEGMENTS, dilation_rates=RATES) & masks.causal()
GROUPS = masks.longnet(segment_lengths=(4, 6, 8, 12, 16), dilation_rates=(1, 1, 2, 2, 4), heads="grouped")
HERE = "tests.planted_bugs_of_others"


def visible(segment: int, rate: int, q: Tensor, hidden: Tensor | None) -> Tensor:
    """(B, H, N, N): the pairs of one branch, without the keys that are hidden (B, N)."""
    rule = oracle.both(oracle.dilated(segment, rate, "interleaved"), oracle.causal())
    places = torch.arange(q.shape[2])
    pairs = oracle.counts(rule, range(q.shape[1]), q.shape[1], places, places) > 0
    return pairs.expand(q.shape[0], -1, -1, -1) & (True if hidden is None else ~hidden[:, None, None, :])


def for_each_query_head(x: Tensor, num_heads: int) -> Tensor:
    """Query head h reads key/value head h // (H / G)."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def soft(scores: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """(weights, lse) of (B, H, N, N) scores, hidden ones -inf; a row without keys has weights 0."""
    lse = scores.logsumexp(-1)
    empty = lse == -torch.inf
    return (scores - lse.masked_fill(empty, 0.0)[..., None]).exp(), lse


def joined(outs: Tensor, lses: Tensor) -> Tensor:
    """One softmax over all parts: (P, B, H, N, D) outputs weighed by the softmax of their (P, B, H, N) lses."""
    none = (lses == -torch.inf).all(0)
    weights = lses.masked_fill(none, 0.0).softmax(0)
    return (weights[..., None] * outs).sum(0).masked_fill(none[..., None], 0.0)


def branch(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, segment: int, rate: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of one branch."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    weights, lse = soft(scores.masked_fill(~visible(segment, rate, q, hidden), -torch.inf), segment)
    return weights @ v, lse


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """LongNet, causal, branch by branch."""
    k, v = (for_each_query_head(x, q.shape[1]) for x in (k, v))
    parts = [branch(q, k, v, hidden, *sizes) for sizes in zip(SEGMENTS, RATES, strict=True)]
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    return joined(outs, lses)


def group_sizes(num_heads: int, num_groups: int) -> list[int]:
    """The first groups have one head more, where they are unequal."""
    return [len(group) for group in torch.arange(num_heads).tensor_split(num_groups)]


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each group of heads follows one branch."""
    out, first, places = torch.zeros_like(q), 0, torch.arange(q.shape[2])
    sizes = zip((4, 6, 8, 12, 16), (1, 1, 2, 2, 4), group_sizes(q.shape[1], 5), strict=True)
    for segment, rate, count in sizes:
        rule = oracle.dilated(segment, rate, "interleaved")
        pairs = oracle.counts(rule, range(first, first + count), q.shape[1], places, places)
        heads = slice(first, first + count)
        out[:, heads] = oracle.attention(q[:, heads], k[:, heads], v[:, heads], pairs)[0].to(q.dtype)
        first += count
    return out


def shards_seen(rank: int) -> range:
    """The shards of keys that a rank's queries attend to."""
    return range(rank + 1)


def sharded_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of two ranks, one after the other: each sees its own keys and what lies before."""
    places = torch.arange(q.shape[2]).tensor_split(2)
    outs = []
    for rank, own in enumerate(places):
        seen = torch.cat([places[0][:0], *(places[shard] for shard in shards_seen(rank))])
        pairs = (seen <= own[:, None]).long().expand(q.shape[1], -1, -1)
        queries, keys, values = q[:, :, own], k[:, :, seen], v[:, :, seen]
        nothing = torch.zeros_like(queries)
        outs.append(
            oracle.attention(queries, keys, values, pairs)[0].to(q.dtype) if len(seen) and len(own) else nothing
        )
    return torch.cat(outs, dim=2)


def _padded(module: object, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return attention(q, k, v, hidden)


@cache
def plain(check: str) -> Look:
    """Looks at the attention above by one check."""
    calls = Calls(padded=_padded)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "max_tokens": 27, "examples": 6}
    return lambda: check_attention_module(lambda: attention, PATTERN, calls=calls, checks=[check], **sizes)


def _grouped() -> None:
    sizes = {"num_heads": 12, "max_tokens": 20, "examples": 3, "checks": ["coverage"]}
    check_attention_module(lambda: grouped_attention, GROUPS, **sizes)


def _sharded() -> None:
    check_attention_module(lambda: sharded_attention, masks.causal(), max_tokens=12, examples=4, checks=["coverage"])


def _over_heads(scores: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    weights = scores.softmax(1)
    return weights.nan_to_num(0.0), scores.logsumexp(-1)


def _divided_by_all_positions(outs: Tensor, lses: Tensor) -> Tensor:
    added = outs.sum(0)
    return added / added.sum(2, keepdim=True)


def _with_zero_padding(original):
    """Each row has keys of score 0 and value 0 for the places by which the last segment falls short."""

    def padded(scores: Tensor, segment: int) -> tuple[Tensor, Tensor]:
        weights, lse = original(scores, segment)
        missing = -scores.shape[-1] % segment
        if not missing:
            return weights, lse
        more = torch.logaddexp(lse, torch.tensor(float(missing), dtype=lse.dtype).log())
        return weights * (lse - more).exp()[..., None], more

    return padded


OF_OTHERS = (
    Bug(
        "softmax over the heads instead of the keys", f"{HERE}:soft", lambda _: _over_heads, plain("coverage"),
        "check_attention_module: coverage", "the weights of this query add up to", "darcstar",
    ),
    Bug(
        "parts normalised each by itself, then added up", f"{HERE}:joined", lambda _: lambda outs, lses: outs.sum(0),
        plain("agreement"), "check_attention_module: agreement",
        "as if each branch has a softmax of its own, and the results are summed", "darcstar",
    ),
    Bug(
        "`causal` left out of the dilated branches", f"{HERE}:oracle.causal", lambda _: oracle.every,
        plain("causality"), "check_attention_module: causality", "is hidden from query", "darcstar",
    ),
    Bug(
        "a padding mask that nothing reads", f"{HERE}:visible",
        lambda right: lambda segment, rate, q, hidden: right(segment, rate, q, None),
        plain("padding"), "check_attention_module: padding", "is not applied", "darcstar, torchscale",
    ),
    Bug(
        "division by the sum over all positions", f"{HERE}:joined", lambda _: _divided_by_all_positions,
        plain("causality"), "check_attention_module: causality", "is hidden from query", "fkodom",
    ),
    Bug(
        "unequal groups of heads: the last heads never written", f"{HERE}:group_sizes",
        lambda _: lambda num_heads, num_groups: [num_heads // num_groups] * num_groups,
        _grouped, "check_attention_module: coverage", "takes no part", "fkodom",
    ),
    Bug(
        "zero padding of the last segment takes part in the softmax", f"{HERE}:soft", _with_zero_padding,
        plain("agreement"), "check_attention_module: agreement",
        "keys more, of score 0 and value 0, take part in the softmax", "torchscale",
    ),
    Bug(
        "weights of the merge detached", f"{HERE}:joined",
        lambda right: lambda outs, lses: right(outs, lses.detach()),
        plain("gradients"), "check_attention_module: gradients", "dq is wrong", "torchscale",
    ),
    Bug(
        "causal sequence parallelism without the rank's own keys", f"{HERE}:shards_seen", lambda _: range,
        _sharded, "check_attention_module: coverage", "is allowed and takes no part", "torchscale",
    ),
    Bug(
        "key/value heads repeated in the wrong order", f"{HERE}:for_each_query_head",
        lambda _: lambda x, num_heads: x.repeat(1, num_heads // x.shape[1], 1, 1),
        plain("agreement"), "check_attention_module: agreement",
        "as if query head h reads key/value head h % G, not h // (H / G)",
    ),
    Bug(
        "one entry's padding mask used for the whole batch", f"{HERE}:visible",
        lambda right: lambda segment, rate, q, hidden: right(
            segment, rate, q, None if hidden is None else hidden[:1].expand_as(hidden)
        ),
        plain("padding"), "check_attention_module: padding", "out is wrong",
    ),
)  # fmt: skip
