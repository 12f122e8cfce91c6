"""Bugs planted into the engines, what they keep between calls, and what runs around them."""

from functools import cache
from math import log

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._call import Call
from flexdilated.testing import Calls, check_attention_module
from tests.support.planted_bugs import Bug, Look

# B batch, H query heads, G key/value heads, N tokens, D head dim

ENGINES, MASKS = "flexdilated.engines", "flexdilated.masks"
MIXTURE = masks.longnet(segment_lengths=(6, 12), dilation_rates=(1, 2)) & masks.causal()
WINDOW = masks.local_window(left=3, right=0)
SIZES = {"num_heads": 4, "max_tokens": 27, "examples": 6}


def attention(pattern: masks.Pattern | masks.Mixture):
    """(out, lse) by the aten engine."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fd.attend(q, k, v, pattern, enable_gqa=True, engine="aten", return_lse=True)

    return attend


@cache
def module(check: str) -> Look:
    """Looks at the aten engine by one check."""
    return lambda: check_attention_module(lambda: attention(MIXTURE), MIXTURE, checks=[check], **SIZES)


def _head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As four devices would that have one head each."""
    parts = [
        fd.attend(*(x[:, first : first + 1] for x in (q, k, v)), MIXTURE, head_offset=first, num_heads_global=4)
        for first in range(4)
    ]
    return torch.cat(parts, dim=1)


def _heads_apart() -> None:
    check_attention_module(lambda: _head_by_head, MIXTURE, checks=["agreement"], **SIZES)


def _from_a_cache(module: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A KVCache over keys that are packed as soon as they may be."""
    kept = fd.KVCache(WINDOW, num_heads=q.shape[1], capacity=CAPACITY)
    return torch.cat([kept.attend(*parts) for parts in zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True)], 2)


CAPACITY = 192  # three pages: one is packed away before the end of what is decoded


def _decoded() -> None:
    """Looks at decoding, token by token."""
    options = SIZES | {"checks": ["decoding"], "lengths": (200,)}
    check_attention_module(lambda: attention(WINDOW), WINDOW, calls=Calls(decoded=_from_a_cache), **options)


def _without(**fields: object):
    """A cache that does not tell these fields of a call apart."""

    def wrong(right):
        def get(self, name, build, size, **options):
            known = tuple(part._replace(**fields) if isinstance(part, Call) else part for part in name)
            return right(self, known, build, size, **options)

        return get

    return wrong


def _by_own_lse(right):
    def backward(self, x, grad_out, out, lse, scale):
        part = self.forward(x, scale)[1]
        own = self.queries.all_tokens(part, *lse.shape[1:])
        if own is None:
            own = lse.clone()
            self.queries.put(own, part)
        return right(self, x, grad_out, out, own, scale)

    return backward


def _in_base_two(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """As if the lse of both were logarithms to base 2."""
    share = torch.sigmoid((part_lse - lse) * log(2.0)).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


IN_ENGINES = (
    Bug(
        "lse taken for a logarithm to base 2 in the merge", f"{ENGINES}._gather:merge_", lambda _: _in_base_two,
        module("agreement"), "out is wrong",
    ),
    Bug(
        "backward fed each part's own lse instead of the whole's", f"{ENGINES}.aten._program:Step.backward",
        _by_own_lse,
        module("gradients"), "dq is wrong",
    ),
    Bug(
        "plans kept without the head offset", f"{MASKS}.plan_cache._cache:Cache.get", _without(head_offset=0),
        _heads_apart, "out is wrong",
    ),
    Bug(
        "plans kept without the number of tokens", f"{MASKS}.plan_cache._cache:Cache.get",
        _without(num_queries=0, num_keys=0),
        module("lengths"), "raises RuntimeError",
    ),
    Bug(
        "keys evicted that the next query still sees", "flexdilated.decoding._held_keys:maybe_visible",
        lambda right: lambda sources, firsts, lengths, query, num: right(sources, firsts, lengths, query + 3, num),
        _decoded, "key evicted",
    ),
)  # fmt: skip
