"""Simulation: what attention on many ranks sends, computes, holds and takes, from the plan alone, on no rank at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from ..distributed.counts import (
    ScheduleChoice,
    all_gather_tokens,
    choice_of,
    held_in_ring,
    ring_tokens,
    tokens_by_chunk,
    work_of_ranks,
)
from ..distributed.group import Order, Sharding
from ..distributed.wire import CodecName, codec_named, gradient_codec
from ..masks.core._pattern import Expression
from ..memory._memory import AttentionMemory, AttentionSize, attention_memory
from ._links import Links
from ._step_time import Computing, StepTime, computing_time, step_time

# W ranks

WAYS = ("exchange", "ring", "all-gather")
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class Way:
    """One way to bring keys and values to the ranks that need them.

    tokens[i, j]: those that rank i gets from rank j, once a KV head; their key and value take `key_bytes` on the wire,
    and the gradients of these, which go back, `gradient_bytes`. held: bytes of others' keys and values that each rank
    holds at one time; held_gradients: of their gradients, in float32 or wider. step: None where no links were given.
    """

    tokens: Int64[Tensor, "W W"]
    key_bytes: int
    gradient_bytes: int
    held: Int64[Tensor, " W"]
    held_gradients: Int64[Tensor, " W"]
    step: StepTime | None

    @property
    def keys(self) -> Int64[Tensor, "W W"]:
        """Bytes of keys and values that rank i gets from rank j."""
        return self.key_bytes * self.tokens


@dataclass(frozen=True)
class Simulation:
    """What is known of a call before it runs, for every rank.

    work: pairs of each rank's queries, once a branch. balance: the most over the mean, in either order of the same
    number of tokens. call: memory of attention over the largest shard alone, without other ranks' keys.
    """

    sharding: Sharding
    choice: ScheduleChoice
    ways: Mapping[str, Way]
    work: Int64[Tensor, " W"]
    balance: Mapping[str, float]
    computing: Computing
    call: AttentionMemory

    def inference_peak(self, way: str) -> int:
        """Bytes of the rank that holds most: the call on its shard, and others' keys and values."""
        return self.call.inference_peak + self._copied(way) + int(self.ways[way].held.max())

    def training_peak(self, way: str) -> int:
        """The same with all gradients."""
        held = self.ways[way].held + self.ways[way].held_gradients
        return self.call.training_peak + self._copied(way) + int(held.max())

    def _copied(self, way: str) -> int:
        """Bytes of a rank's own keys and values, which it copies to lie beside others' where one kernel takes all."""
        return 0 if way == "ring" or not int(self.ways[way].held.max()) else self.call.keys


def simulate(
    pattern: Expression,
    sharding: Sharding,
    size: AttentionSize,
    *,
    device: str = "cpu",
    codec: CodecName | None = None,
    links: Links | None = None,
) -> Simulation:
    """Everything at once. `size` is that of the call on one device: its tokens are those of the sharding.

    The codec writes what an exchange and a ring send; an all-gather, which nothing does, sends rows as they are.
    Raises ValueError where the pattern does not bind to these sizes, and where the codec does not write the dtype.
    """
    codec_named(codec).check(size.dtype)
    work = work_of_ranks(pattern, sharding, num_heads=size.num_heads)
    computing = computing_time(pattern, size, work, device=device)
    tokens = _tokens(pattern, sharding, size)
    ways = {name: _way(name, tokens[name], size, codec, computing, links) for name in WAYS}
    sent, held = ways["exchange"].key_bytes, ways["all-gather"].key_bytes
    choice = choice_of(tokens["exchange"], tokens["ring"], held_bytes=held, sent_bytes=sent)
    call = _call_on(max(sharding.lengths), pattern, size, device)
    return Simulation(sharding, choice, ways, work, _balances(pattern, sharding, size, work), computing, call)


def _tokens(pattern: Expression, sharding: Sharding, size: AttentionSize) -> dict[str, Int64[Tensor, "W W"]]:
    needed, chunks = tokens_by_chunk(pattern, sharding, num_heads=size.num_heads, num_kv_heads=size.kv_heads)
    return {
        "exchange": chunks.by_source(needed),
        "ring": ring_tokens(needed, chunks, num_kv_heads=size.kv_heads),
        "all-gather": all_gather_tokens(torch.tensor(sharding.lengths), num_kv_heads=size.kv_heads),
    }


def _way(
    name: str,
    tokens: Int64[Tensor, "W W"],
    size: AttentionSize,
    codec: CodecName | None,
    computing: Computing,
    links: Links | None,
) -> Way:
    writes = codec_named(None if name == "all-gather" else codec)
    codecs = writes, gradient_codec(writes, size.dtype)
    key_bytes, gradient_bytes = (2 * size.batch * each.row_bytes(size.head_dim, size.dtype) for each in codecs)
    numbers = 2 * size.batch * size.head_dim * (held_in_ring(tokens) if name == "ring" else tokens.sum(1))
    wide = torch.promote_types(size.dtype, torch.float32)
    step = None
    if links is not None:
        moved = {"keys": key_bytes * tokens, "gradients": gradient_bytes * tokens}
        step = step_time(computing, links, **moved, overlapped=name == "ring")
    return Way(tokens, key_bytes, gradient_bytes, size.dtype.itemsize * numbers, wide.itemsize * numbers, step)


def _balances(pattern: Expression, sharding: Sharding, size: AttentionSize, work: Tensor) -> dict[str, float]:
    """The most work over the mean, for contiguous and for zigzag shards of these lengths; 1 where there is no work."""
    found = {}
    for order in ORDERS:
        here = work
        if order != sharding.order:
            other = replace(sharding, order=order)
            here = work_of_ranks(pattern, other, num_heads=size.num_heads)
        found[order] = float(here.max() / here.double().mean()) if int(here.sum()) else 1.0
    return found


def _call_on(num_tokens: int, pattern: Expression, size: AttentionSize, device: str) -> AttentionMemory:
    """Attention over one shard as if it were the sequence; or its share of the whole, where that is no pattern."""
    try:
        pattern.check_tokens(range(num_tokens), range(num_tokens))
    except ValueError:  # such as a list of blocks that names keys beyond the shard
        whole = attention_memory(pattern, size, device=device)
        return AttentionMemory(
            **{each.name: getattr(whole, each.name) * num_tokens // size.num_tokens for each in fields(whole)}
        )
    return attention_memory(pattern, replace(size, num_tokens=num_tokens), device=device)
