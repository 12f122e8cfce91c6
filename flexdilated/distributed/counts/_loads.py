"""Choice between exchange and ring; bytes that each rank receives, and allowed pairs of its queries.

All are computed from pattern and sharding, without running any rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int64
from tabulate import tabulate
from torch import Tensor

from ...masks.core import Expression, bytes_text, require_choice, tokens_text
from ...masks.plan_cache import cache, debug_wanted, log, pattern_text
from ...memory import AttentionSize
from ..group import Sharding
from ..wire import CodecName, codec_named, gradient_codec
from ._tokens import tokens_by_chunk, work_of_ranks

# W ranks

RankSchedule = Literal["exchange", "ring"]
ScheduleName = Literal["auto", "exchange", "ring"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
_SHARDS_HELD = 2  # by a ring: the current shard and the one in transfer


@dataclass(frozen=True)
class ScheduleChoice:
    """The chosen schedule ("exchange" or "ring"), the reason, and each cost in bytes on the rank where it is largest.

    exchange_bytes, ring_bytes: received keys and values, as encoded.
    exchange_memory, ring_memory: peak memory of other ranks' keys and values.
    """

    name: RankSchedule
    reason: str
    exchange_bytes: int
    ring_bytes: int
    exchange_memory: int
    ring_memory: int


TokenCounts = dict[RankSchedule, Int64[Tensor, "W W"]]  # tokens that rank i receives from rank j, by schedule


def token_counts(pattern: Expression, sharding: Sharding, *, num_kv_heads: int, **heads: Any) -> TokenCounts:
    """Return {"exchange": counts, "ring": counts}; counts[i, j]: number of tokens that rank i receives from rank j.

    The counts are for the forward, summed over KV heads. An exchange sends the tokens that rank i needs. A ring
    sends each contiguous range of rank j's positions whole, in all KV heads, if rank i needs a token of it.

    heads: num_heads and, if not all heads are on this device, head_offset and num_heads_global.

    Raises ValueError if the pattern does not fit the heads or tokens, or has unresolved run-time tensors.
    """
    needed, chunks = tokens_by_chunk(pattern, sharding, num_kv_heads=num_kv_heads, **heads)
    whole = torch.where(needed > 0, num_kv_heads * chunks.length, 0)
    return {"exchange": chunks.by_source(needed), "ring": chunks.by_source(whole)}


def choose_schedule(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    batch: int = 1,
    wire_vector_bytes: int | None = None,
) -> ScheduleChoice:
    """Return the choice of "exchange" or "ring", by the bytes that the most loaded rank would receive and hold.

    The exchange receives exactly the keys that a rank's queries need, and holds all of them. The ring receives each
    needed contiguous range of a shard whole, and holds two shards. So the exchange never receives more, but may hold
    more. The ring is chosen if exchange_memory / ring_memory > ring_bytes / exchange_bytes: if the factor by which the
    exchange would hold more exceeds the factor by which the ring receives more.

    head_offset, num_heads_global: as in `flexdilated.attend`.
    wire_vector_bytes: bytes of one encoded vector of K or V; None: head_dim numbers of `dtype`.

    The result depends on the arguments alone, so all ranks choose one schedule. It is cached.
    Raises ValueError if the pattern does not fit the sharding's tokens and these heads, or lacks the values of its
    run-time tensors.
    """
    heads = {"num_heads": num_heads, "head_offset": head_offset, "num_heads_global": num_heads_global}
    tokens = sharding.num_tokens
    rule = pattern.bind(num_queries=tokens, num_keys=tokens, **heads).pattern  # includes the values of run-time tensors
    held = 2 * batch * head_dim * dtype.itemsize
    sent = held if wire_vector_bytes is None else 2 * batch * wire_vector_bytes

    def build() -> ScheduleChoice:
        counts = token_counts(rule, sharding, num_kv_heads=num_kv_heads, **heads)
        found = choice_of(counts, held_bytes=held, sent_bytes=sent)
        if debug_wanted():
            log.debug("schedule %r for %s, %s: %s", found.name, pattern_text(rule.text), sharding, found.reason)
        return found

    key = ("schedule", rule.text, sharding.numbers(), num_kv_heads, *heads.values(), held, sent)
    return cache().get(key, build, lambda choice: 512, pattern=rule)


def choice_of(counts: TokenCounts, *, held_bytes: int, sent_bytes: int) -> ScheduleChoice:
    """Return the choice of "exchange" or "ring", by the rule that `choose_schedule` states.

    counts: for each schedule, tokens that rank i receives from rank j, summed over KV heads, as (W, W).
    held_bytes, sent_bytes: bytes of key and value of one token in one KV head, over the batch, as held in memory and as
        sent.
    """
    ring = counts["ring"]
    kept = ring.topk(min(_SHARDS_HELD, len(ring)), dim=1).values.sum(1)
    exchanged, ringed, held = (int(each.max()) for each in (counts["exchange"].sum(1), ring.sum(1), kept))
    return _choice_by_bytes(exchanged * sent_bytes, ringed * sent_bytes, exchanged * held_bytes, held * held_bytes)


def _choice_by_bytes(exchange_bytes: int, ring_bytes: int, exchange_memory: int, ring_memory: int) -> ScheduleChoice:
    numbers = exchange_bytes, ring_bytes, exchange_memory, ring_memory
    if ring_bytes == 0:
        return ScheduleChoice("exchange", "no rank needs a key of another, so nothing is sent", *numbers)
    exchange = f"receives at most {bytes_text(exchange_bytes)} of keys and values in an exchange, and holds it all"
    if exchange_memory <= ring_memory:
        ring = f"it would receive {bytes_text(ring_bytes)} in a ring and hold {bytes_text(ring_memory)}"
        return ScheduleChoice("exchange", f"a rank {exchange}; {ring}", *numbers)
    less, more = ring_bytes / exchange_bytes, exchange_memory / ring_memory
    if less >= more:
        ring = f"it would receive {less:.3g} times as much in a ring, to hold {more:.3g} times less"
        return ScheduleChoice("exchange", f"a rank {exchange}; {ring}", *numbers)
    ring = f"receives at most {bytes_text(ring_bytes)} of keys and values in a ring"
    ring += f", and holds {bytes_text(ring_memory)} at a time"
    instead = f"it would receive {bytes_text(exchange_bytes)} in an exchange, and hold it all"
    return ScheduleChoice("ring", f"a rank {ring}; {instead}", *numbers)


MOST_RANKS = 4096  # of which `fd.plan` counts the loads
_WIDEST_FACT = 70  # characters of a fact


@dataclass(frozen=True, kw_only=True)
class RankLoads:
    """The load of each rank in a call of `distributed.attend` and its backward; `str` returns a table.

    Number i of each tuple is for rank i.

    received_forward: bytes of other ranks' keys and values.
    received_backward: bytes of the gradients of this rank's keys and values and, in a ring, of other ranks' keys and
        values, which are received again.
    pairs: number of (query, key) pairs that the pattern allows for the rank's queries, over all heads and batch
        entries; a pair counts once for each branch of a mixture that allows it.
    reason: why schedule "auto" chose this schedule; None if the caller named it.
    codec: encoding of keys and values in messages; None: their dtype.
    """

    pattern: Expression
    sharding: Sharding
    schedule: RankSchedule
    reason: str | None
    codec: CodecName | None
    received_forward: tuple[int, ...]
    received_backward: tuple[int, ...]
    pairs: tuple[int, ...]

    @property
    def max_over_mean(self) -> dict[str, float]:
        """Largest / mean number of received_forward, received_backward and pairs, by name; 1 if all numbers are 0."""
        return {name: max(each) * len(each) / sum(each) if any(each) else 1.0 for name, each in self._columns.items()}

    @property
    def _columns(self) -> dict[str, tuple[int, ...]]:
        names = ("received_forward", "received_backward", "pairs")
        return {name: getattr(self, name) for name in names}

    def to_data(self) -> dict[str, Any]:
        """Return the loads as plain values for JSON; received_forward and received_backward are in bytes."""
        columns = {"tokens": self.sharding.lengths, **self._columns}
        return {
            "pattern": repr(self.pattern),
            "num_tokens": self.sharding.num_tokens,
            "num_ranks": self.sharding.num_ranks,
            "order": self.sharding.order,
            "schedule": self.schedule,
            "reason": self.reason,
            "codec": self.codec,
            "ranks": {name: list(each) for name, each in columns.items()},
            "max_over_mean": self.max_over_mean,
        }

    def __str__(self) -> str:
        sharding, wire = self.sharding, f", {self.codec} on the wire" if self.codec else ""
        facts = [
            ("pattern", repr(self.pattern)),
            ("ranks", f"{sharding.num_ranks:,}, {tokens_text(sharding.num_tokens)} tokens, {sharding.order}"),
            ("schedule", f"{self.schedule}{wire}{f': {self.reason}' if self.reason else ''}"),
        ]
        columns = sharding.lengths, *self._columns.values()
        rows = [_table_row(f"{rank}", *each) for rank, each in enumerate(zip(*columns, strict=True))]
        rows.append(_table_row("max", *map(max, columns)))
        rows.append(("max / mean", "", *(f"{each:.4f}" for each in self.max_over_mean.values())))
        headers = ("rank", "tokens", "received\nin the forward", "received\nin the backward", "pairs")
        table = tabulate(rows, headers, disable_numparse=True, colalign=("right",) * len(headers))
        shown = tabulate(facts, tablefmt="plain", disable_numparse=True, maxcolwidths=[None, _WIDEST_FACT])
        return f"{shown}\n\n{table}"


def _table_row(name: str, tokens: int, forward: int, backward: int, pairs: int) -> tuple[str, ...]:
    return name, f"{tokens:,}", bytes_text(forward), bytes_text(backward), f"{pairs:,}"


def rank_loads(
    pattern: Expression,
    sharding: Sharding,
    size: AttentionSize,
    *,
    schedule: ScheduleName = "auto",
    codec: CodecName | None = None,
) -> RankLoads:
    """Return the bytes that each rank receives in a call of `distributed.attend`, and the allowed pairs of its queries.

    Nothing is run and no process group is needed.

    size: batch, heads, head dims and dtype of the call; the sharding gives the tokens. Keys and values are sent padded
        to the wider head dim.
    schedule: as in `distributed.attend`.
    codec: encoding of keys and values in messages; None: their dtype.

    Raises ValueError for an unknown schedule or codec, for a codec that cannot encode the dtype, and for a pattern that
    does not fit the heads, tokens or batch, or lacks the values of its run-time tensors.
    """
    require_choice("schedule", schedule, SCHEDULES)
    if codec is not None:
        require_choice("codec", codec, get_args(CodecName))
    sent = codec_named(codec)
    sent.check(size.dtype)
    tokens, heads = sharding.num_tokens, {"num_heads": size.num_heads}
    rule = pattern.bind(num_queries=tokens, num_keys=tokens, batch=size.batch, **heads).pattern
    rule.require_entries(size.batch)
    counts = token_counts(rule, sharding, num_kv_heads=size.kv_heads, **heads)
    width = max(size.dims)
    held = 2 * size.batch * width * size.dtype.itemsize
    key_bytes, gradient_bytes = (
        2 * size.batch * each.vector_bytes(width, size.dtype) for each in (sent, gradient_codec(sent, size.dtype))
    )
    choice = choice_of(counts, held_bytes=held, sent_bytes=key_bytes)
    name, reason = (choice.name, choice.reason) if schedule == "auto" else (schedule, None)
    keys, gradients = key_bytes * counts[name].sum(1), gradient_bytes * counts[name].sum(0)
    return RankLoads(
        pattern=pattern,
        sharding=sharding,
        schedule=name,
        reason=reason,
        codec=codec,
        received_forward=tuple(keys.tolist()),
        received_backward=tuple((keys + gradients if name == "ring" else gradients).tolist()),
        pairs=tuple(work_of_ranks(rule, sharding, batch=size.batch, **heads).tolist()),
    )
