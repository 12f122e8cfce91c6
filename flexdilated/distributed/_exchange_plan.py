"""The exchange plan: vectors that each rank sends to each other rank, with their positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from ..masks.core import Expression, Ranges, require_expression
from ..masks.orders import Placement
from ..masks.plan_cache import cache
from .counts import KVNeeds
from .group import Sharding

# W ranks, R vectors of a message, each of one token and KV head

Tokens = tuple[tuple[Ranges, ...], ...]  # by rank, by KV head: positions


class MessageVectors(NamedTuple):
    """Vectors (each of one token and KV head) sent or received by a rank, in message order: by (rank, KV head, token).

    heads: KV head of each vector.
    tokens: of a sent vector, its local token index on this rank; of a received vector, its index among the tokens
        received in its head.
    """

    heads: Int64[Tensor, " R"]
    tokens: Int64[Tensor, " R"]


@dataclass(frozen=True)
class ExchangePlan:
    """Vectors (each of one token and KV head) that a rank receives and sends; sender and receiver use the same order.

    received[source][g]: positions on rank `source` whose key and value this rank needs in KV head g, because some of
        its queries, in some query head that uses KV head g, may attend to them.
    sent[target][g]: positions of this rank that rank `target` needs in KV head g.
    local: positions that this rank holds.
    num_tokens: tokens of all ranks.

    A token counts once per KV head; no rank sends to itself. The vectors of a message are ordered by KV head, then in
    the order of the positions above. Received vectors go into one tensor (B, G, R, D), where R is the number of vectors
    in the head that has most; the padding of the other heads is never read.
    """

    received: Tokens
    sent: Tokens
    local: Ranges
    num_tokens: int
    _vectors_on: dict[torch.device, tuple[MessageVectors, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        pattern: Expression,
        sharding: Sharding,
        rank: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_offset: int = 0,
        num_heads_global: int | None = None,
    ) -> ExchangePlan:
        """Return the plan of one rank, from the cache of plans if it is there.

        num_heads, num_kv_heads, head_offset, num_heads_global: as in `KVNeeds.of`.

        Raises ValueError if the pattern does not fit the heads or tokens, or has unresolved run-time tensors.
        """
        sizes = (num_heads, num_kv_heads, head_offset, num_heads_global)

        def build() -> ExchangePlan:
            needs, own = KVNeeds.of(pattern, sharding.num_tokens, *sizes), sharding.ranges(rank)
            others = [() if peer == rank else sharding.ranges(peer) for peer in range(sharding.num_ranks)]
            received = tuple(needs.by_head(own, keys) for keys in others)
            sent = tuple(needs.by_head(queries, own) for queries in others)
            return ExchangePlan(received, sent, own, sharding.num_tokens)

        key = ("exchange plan", require_expression(pattern).text, sharding, rank, *sizes)
        return cache().get(key, build, _nbytes, pattern=pattern)

    @cached_property
    def num_received(self) -> tuple[int, ...]:
        """Number of vectors received from each rank."""
        return tuple(_num_vectors(self.received).sum(1).tolist())

    @cached_property
    def num_sent(self) -> tuple[int, ...]:
        """Number of vectors sent to each rank."""
        return tuple(_num_vectors(self.sent).sum(1).tolist())

    @cached_property
    def own(self) -> Placement:
        """Positions of this rank's queries and keys."""
        return Placement(self.local, (self.local,), complete=False, num_tokens=self.num_tokens)

    @cached_property
    def others(self) -> Placement:
        """Positions of this rank's queries and, by KV head, of the received keys."""
        return self._placement(())

    @cached_property
    def both(self) -> Placement:
        """Positions of this rank's queries and, by KV head, of its keys followed by the received keys."""
        return self._placement(self.local)

    def _placement(self, local_keys: Ranges) -> Placement:
        heads = zip(*self.received, strict=True)
        keys = tuple((*local_keys, *(run for ranges in by_rank for run in ranges)) for by_rank in heads)
        return Placement(self.local, keys, complete=True, num_tokens=self.num_tokens)

    def vectors_on(self, device: torch.device) -> tuple[MessageVectors, ...]:
        """Return (sent, received): KV head and token index of each vector, as tensors on `device`; cached."""
        if device not in self._vectors_on:
            ranges = tuple(keys for by_head in self.sent for ranges in by_head for keys in ranges)
            counts = _num_vectors(self.received)
            first = counts.cumsum(0) - counts  # index of each rank's first vector within its head
            each = counts.flatten()
            row = torch.arange(int(each.sum())) - (each.cumsum(0) - each).repeat_interleave(each)
            sent = _heads_of_vectors(_num_vectors(self.sent)), local_indices(self.local, ranges)
            received = _heads_of_vectors(counts), first.flatten().repeat_interleave(each) + row
            self._vectors_on[device] = tuple(MessageVectors(*(x.to(device) for x in side)) for side in (sent, received))
        return self._vectors_on[device]


def local_indices(held: Ranges, positions: Ranges) -> Int64[Tensor, " n"]:
    """Return the index of each position of `positions`, in order, among the tokens of a rank that holds `held`.

    held: the rank's ascending ranges of positions, which contain all of `positions`.
    """
    if not positions:
        return torch.empty(0, dtype=torch.int64)
    wanted = torch.cat([torch.arange(each.start, each.stop, each.step) for each in positions])
    starts = torch.tensor([run.start for run in held])
    lengths = torch.tensor([len(run) for run in held])
    before = lengths.cumsum(0) - lengths
    run = torch.searchsorted(starts, wanted, right=True) - 1
    return wanted - starts[run] + before[run]


def _num_vectors(tokens: Tokens) -> Int64[Tensor, "W G"]:
    return torch.tensor([[sum(map(len, ranges)) for ranges in by_head] for by_head in tokens], dtype=torch.int64)


def _heads_of_vectors(counts: Int64[Tensor, "W G"]) -> Int64[Tensor, " R"]:
    heads = torch.arange(counts.shape[1]).repeat(len(counts))
    return heads.repeat_interleave(counts.flatten())


def _nbytes(plan: ExchangePlan) -> int:
    """Return the estimated bytes of a plan: its ranges, tuples and two int64 indices per vector."""
    # 320 bytes per range, because placements hold copies of the ranges.
    ranges = sum(len(keys) for side in (plan.received, plan.sent) for by_head in side for keys in by_head)
    tuples = sum(len(by_head) + 1 for side in (plan.received, plan.sent) for by_head in side)
    return 320 * ranges + 64 * tuples + 16 * (sum(plan.num_sent) + sum(plan.num_received))
