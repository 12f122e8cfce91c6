"""Bugs planted into the engines, what they keep between calls, and what runs around them."""

from __future__ import annotations

from functools import cache
from math import log

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._call import Call
from flexdilated.engines._rows import MOST_ROWS
from flexdilated.testing import Calls, check_attention_module
from tests.support.planted_bugs import Bug, Look

# B batch, H query heads, G key/value heads, N tokens, D head dim

ENGINES, MASKS = "flexdilated.engines", "flexdilated.masks"
MIXTURE = masks.longnet(segment_lengths=(6, 12), dilation_rates=(1, 2)) & masks.causal()
WINDOW = masks.local_window(left=3, right=0)
# Query 0 sees no key in either branch.
SPARSE = (masks.local_window(left=3, right=0) + masks.causal()) & ~masks.local_window(left=0, right=0)
SIZES = {"num_heads": 4, "max_tokens": 27, "examples": 6}


def attention(pattern: masks.Pattern | masks.Mixture):
    """(out, lse) by the aten engine."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fd.attend(q, k, v, pattern, enable_gqa=True, engine="aten", return_lse=True)

    return attend


@cache
def module(pattern: masks.Pattern | masks.Mixture, check: str, *, groups: int | None = None, **sizes: object) -> Look:
    """Looks at the aten engine by one check."""
    options = {**SIZES, "num_kv_heads": groups, "checks": [check], **sizes}
    return lambda: check_attention_module(lambda: attention(pattern), pattern, **options)


def _head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As four devices would that have one head each."""
    parts = [
        fd.attend(*(x[:, first : first + 1] for x in (q, k, v)), MIXTURE, head_offset=first, num_heads_global=4)
        for first in range(4)
    ]
    return torch.cat(parts, dim=1)


def _heads_apart() -> None:
    check_attention_module(lambda: _head_by_head, MIXTURE, checks=["agreement"], **SIZES)


def _one_by_one(module: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A call for each query over the keys so far."""
    steps = [
        fd.attend(q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1], MIXTURE, q_offset=n)
        for n in range(q.shape[2])
    ]
    return torch.cat(steps, dim=2)


def _in_chunks(module: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same over all keys, with chunks of queries that are too many to go without a plan."""
    chunk = MOST_ROWS + 1
    steps = [fd.attend(q[:, :, n : n + chunk], k, v, MIXTURE, q_offset=n) for n in range(0, q.shape[2], chunk)]
    return torch.cat(steps, dim=2)


def _from_a_cache(module: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A KVCache over keys that are packed as soon as they may be."""
    kept = fd.KVCache(WINDOW, num_heads=q.shape[1], capacity=CAPACITY)
    return torch.cat([kept.attend(*parts) for parts in zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True)], 2)


CAPACITY = 192  # three pages: one is packed away before the end of what is decoded


@cache
def decoded(pattern: masks.Pattern | masks.Mixture, call, **sizes: object) -> Look:
    """Looks at decoding, token by token."""
    calls = Calls(decoded=call)
    return lambda: check_attention_module(
        lambda: attention(pattern), pattern, calls=calls, checks=["decoding"], **{**SIZES, **sizes}
    )


def _without(**fields: object):
    """A cache that does not tell these fields of a call apart."""

    def wrong(right):
        def get(self, name, build, size, **options):
            known = tuple(part._replace(**fields) if isinstance(part, Call) else part for part in name)
            return right(self, known, build, size, **options)

        return get

    return wrong


def _bound_without(**fields: int):
    return lambda right: lambda self, rule=None: right(self._replace(**fields), rule)


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


def _unguarded(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Nothing stands against the difference of two infinities."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


IN_ENGINES = (
    Bug(
        "lse taken for a logarithm to base 2 in the merge", f"{ENGINES}._gather:merge_", lambda _: _in_base_two,
        module(MIXTURE, "agreement"), "out is wrong",
    ),
    Bug(
        "merge of two parts that are both empty: (-inf) - (-inf)", f"{ENGINES}._gather:merge_", lambda _: _unguarded,
        module(SPARSE, "empty rows"), "sees no key",
    ),
    Bug(
        "backward fed each part's own lse instead of the whole's", f"{ENGINES}.aten._program:Step.backward",
        _by_own_lse,
        module(MIXTURE, "gradients"), "dq is wrong",
    ),
    Bug(
        "plans kept without the head offset", f"{MASKS}.plan_cache._cache:Cache.get", _without(head_offset=0),
        _heads_apart, "out is wrong",
    ),
    Bug(
        "plans kept without the query offset", f"{MASKS}.plan_cache._cache:Cache.get", _without(q_offset=0),
        decoded(MIXTURE, _in_chunks, lengths=(3 * (MOST_ROWS + 1),)), "out is wrong",
    ),
    Bug(
        "plans kept without the number of tokens", f"{MASKS}.plan_cache._cache:Cache.get",
        _without(num_queries=0, num_keys=0),
        module(MIXTURE, "lengths"), "raises RuntimeError",
    ),
    Bug(
        "head offset ignored", f"{ENGINES}._call:Call.bound", _bound_without(head_offset=0),
        _heads_apart, "out is wrong",
    ),
    Bug(
        "query offset ignored while decoding", f"{ENGINES}._call:Call.bound", _bound_without(q_offset=0),
        decoded(MIXTURE, _one_by_one), "out is wrong",
    ),
    Bug(
        "keys evicted that the next query still sees", "flexdilated.decoding._held_keys:visible",
        lambda right: lambda sources, firsts, lengths, query, num: right(sources, firsts, lengths, query + 3, num),
        decoded(WINDOW, _from_a_cache, lengths=(200,)), "key evicted",
    ),
)  # fmt: skip
