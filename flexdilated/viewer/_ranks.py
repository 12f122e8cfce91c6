"""Ranks: what the page shows of many ranks, which tokens they hold and the bytes that go between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from ..distributed.counts import token_counts
from ..distributed.group import Order, Sharding
from ..distributed.wire import codec_named
from ..masks.core import Bound, require_choice, require_int

# W ranks

MOST_RANKS = 128
_ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many ranks share the sequence, and what a key and a value take. The page can show either sharding.

    `sharding` is the one it shows first. Bytes are those of an exchange of one call: keys and values of `batch`
    sequences with `num_kv_heads` heads (None: as many as query heads) of `head_dim` numbers each.

    >>> html = viewer.page(masks.causal(), 4096, ranks=viewer.Ranks(num_ranks=8))
    """

    num_ranks: int
    sharding: Order = "contiguous"
    num_kv_heads: int | None = None
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    batch: int = 1

    def __post_init__(self) -> None:
        require_int("num_ranks", self.num_ranks, minimum=1, maximum=MOST_RANKS)
        require_choice("sharding", self.sharding, _ORDERS)
        if self.num_kv_heads is not None:
            require_int("num_kv_heads", self.num_kv_heads, minimum=1)
        require_int("head_dim", self.head_dim, minimum=1)
        require_int("batch", self.batch, minimum=1)
        codec_named(None).check(self.dtype)

    @property
    def key_bytes(self) -> int:
        """Of the keys and values that one token has in one KV head."""
        return 2 * self.batch * codec_named(None).row_bytes(self.head_dim, self.dtype)


def ranks_data(bound: Bound, ranks: Ranks) -> dict[str, Any]:
    """Both shardings as plain data. Raises ValueError where the heads do not divide, and but for self-attention."""
    if not isinstance(ranks, Ranks):
        raise TypeError(f"ranks must be a Ranks(num_ranks=...) or None; got {ranks!r:.80}")
    if bound.num_keys != bound.num_queries:
        raise ValueError(
            f"ranks share one sequence: as many keys as queries; got num_keys={bound.num_keys} and "
            f"num_tokens={bound.num_queries}"
        )
    num_heads = bound.num_heads
    kv_heads = num_heads if ranks.num_kv_heads is None else ranks.num_kv_heads
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads; got num_kv_heads={kv_heads} and {num_heads=}")
    shardings = {}
    for order in _ORDERS:
        sharding = Sharding(bound.num_queries, ranks.num_ranks, order)
        tokens = token_counts(bound.pattern, sharding, num_heads=num_heads, num_kv_heads=kv_heads)
        shardings[order] = _sharding_data(sharding, ranks.key_bytes * tokens)
    return {"first": ranks.sharding, "shardings": shardings, "note": _note(ranks, kv_heads)}


def _sharding_data(sharding: Sharding, received: Int64[Tensor, "W W"]) -> dict[str, Any]:
    """`runs` of positions that each rank holds; row i of `received`: the bytes that rank i gets from each."""
    ranges = [sharding.ranges(rank) for rank in range(sharding.num_ranks)]
    return {
        "runs": [[[run.start, run.stop] for run in runs] for runs in ranges],
        "received": received.tolist(),
    }


def _note(ranks: Ranks, kv_heads: int) -> str:
    each = f"{kv_heads} KV head{'s' if kv_heads > 1 else ''} of {ranks.head_dim}"
    kind = str(ranks.dtype).removeprefix("torch.") + (f", batch {ranks.batch}" if ranks.batch > 1 else "")
    return (
        f"Ranks: 2 ← 0 are the keys and values that rank 2 receives from rank 0 in an exchange, "
        f"for all heads together ({each}, {kind})."
    )
