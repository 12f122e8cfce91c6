"""The exchange plan: which rows each rank sends to each other, from pattern and sharding alone, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks.core import Expression, Ranges, device_kind, require_expression
from ...masks.orders import Placement
from ...masks.plan_cache import cache
from ..counts import KVNeeds
from ..group import Sharding

# W ranks, S rows sent, R rows received: each a token of one key/value head

Tokens = tuple[tuple[Ranges, ...], ...]  # by rank, by KV head: positions


@dataclass(frozen=True)
class Rows:
    """The rows that go or come, in the order in which they stand on the wire: (rank, KV head, token).

    index: of each row its place among this rank's own tokens, or among those that its head receives.
    """

    heads: Int64[Tensor, " R"]
    index: Int64[Tensor, " R"]

    def to(self, device: torch.device) -> Rows:
        return self if device_kind(device).on_host else Rows(self.heads.to(device), self.index.to(device))


@dataclass(frozen=True)
class ExchangePlan:
    """What one rank receives and sends; all ranks compute each other's plans, and they agree to the order.

    received[source][g] are the positions, held by `source`, of the tokens whose key and value this rank needs in KV
    head g: some of its queries, in some query head of that group, may attend to them. sent[target][g] are those of
    its own that `target` needs. A token that several query heads of a group need counts once. Of itself a rank needs
    nothing. On the wire tokens stand in the order (KV head, token) of these ranges.

    What a rank receives stands in one tensor, head by head. Heads that receive less than others have room to spare at
    the end, which nobody reads.
    """

    received: Tokens
    sent: Tokens
    local: Ranges  # the positions that this rank holds
    num_tokens: int  # of all ranks
    _on: dict[torch.device, tuple[Rows, Rows]] = field(default_factory=dict, repr=False, compare=False)

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
        """The plan of one rank, from the cache if it is there.

        Run-time tensors must have their values in place. Raises ValueError for query heads that do not divide into
        the KV heads or do not lie within num_heads_global, for a rank outside [0, num_ranks), and where the pattern has
        no rule for these heads or tokens.
        """
        sizes = (num_heads, num_kv_heads, head_offset, num_heads_global)

        def build() -> ExchangePlan:
            return _built(KVNeeds.of(pattern, sharding.num_tokens, *sizes), sharding, rank)

        key = ("exchange plan", require_expression(pattern).text, sharding, rank, *sizes)
        return cache().get(key, build, _nbytes, pattern=pattern)

    @property
    def num_received(self) -> tuple[int, ...]:
        """Rows from each source."""
        return tuple(_number(keys) for keys in self.received)

    @property
    def num_sent(self) -> tuple[int, ...]:
        """Rows to each target."""
        return tuple(_number(keys) for keys in self.sent)

    @cached_property
    def own(self) -> Placement:
        """Where the queries and this rank's own keys come from."""
        return Placement(self.local, (self.local,), complete=False, num_tokens=self.num_tokens)

    @cached_property
    def others(self) -> Placement:
        """Where the queries and, by KV head, the received keys come from."""
        return self._placed_after(())

    @cached_property
    def both(self) -> Placement:
        """Where the queries and, by KV head, the own keys and after them the received ones come from."""
        return self._placed_after(self.local)

    def _placed_after(self, first: Ranges) -> Placement:
        heads = zip(*self.received, strict=True)
        keys = tuple((*first, *(run for ranges in by_rank for run in ranges)) for by_rank in heads)
        return Placement(self.local, keys, complete=True, num_tokens=self.num_tokens)

    def rows(self, device: torch.device) -> tuple[Rows, Rows]:
        """(rows sent, among this rank's tokens; rows received, among those received) on a device, kept there."""
        if device not in self._on:
            self._on[device] = self._sent_rows.to(device), self._received_rows.to(device)
        return self._on[device]

    @cached_property
    def _sent_rows(self) -> Rows:
        ranges = [keys for by_head in self.sent for ranges in by_head for keys in ranges]
        return Rows(_heads_of(_counts(self.sent)), local_indices(self.local, tuple(ranges)))

    @cached_property
    def _received_rows(self) -> Rows:
        counts = _counts(self.received)
        first = counts.cumsum(0) - counts  # after what a head has of earlier ranks
        each = counts.flatten()
        row = torch.arange(int(each.sum())) - (each.cumsum(0) - each).repeat_interleave(each)
        return Rows(_heads_of(counts), first.flatten().repeat_interleave(each) + row)


def local_indices(held: Ranges, positions: Ranges) -> Int64[Tensor, " n"]:
    """Where each of these positions, one range after the other, stands among those of some ascending runs."""
    if not positions:
        return torch.empty(0, dtype=torch.int64)
    wanted = torch.cat([torch.arange(each.start, each.stop, each.step) for each in positions])
    starts = torch.tensor([run.start for run in held])
    lengths = torch.tensor([len(run) for run in held])
    before = lengths.cumsum(0) - lengths
    run = torch.searchsorted(starts, wanted, right=True) - 1
    return wanted - starts[run] + before[run]


def _built(needs: KVNeeds, sharding: Sharding, rank: int) -> ExchangePlan:
    others = range(sharding.num_ranks)
    received = tuple(needs.by_head(*_pair(sharding, rank, source)) for source in others)
    sent = tuple(needs.by_head(*_pair(sharding, target, rank)) for target in others)
    return ExchangePlan(received, sent, sharding.ranges(rank), sharding.num_tokens)


def _pair(sharding: Sharding, target: int, source: int) -> tuple[Ranges, Ranges]:
    """The positions of the target's queries and those of the source's keys; none where they are the same rank."""
    return (sharding.ranges(target), sharding.ranges(source)) if target != source else ((), ())


def _counts(tokens: Tokens) -> Int64[Tensor, "W G"]:
    return torch.tensor([[sum(map(len, ranges)) for ranges in by_head] for by_head in tokens], dtype=torch.int64)


def _heads_of(counts: Int64[Tensor, "W G"]) -> Int64[Tensor, " R"]:
    heads = torch.arange(counts.shape[1]).repeat(len(counts))
    return heads.repeat_interleave(counts.flatten())


def _number(keys: Sequence[Ranges]) -> int:
    return sum(len(each) for ranges in keys for each in ranges)


def _nbytes(plan: ExchangePlan) -> int:
    """About what ranges and tuples take, twice where a placement holds them too, and two indices a row."""
    ranges = sum(len(keys) for side in (plan.received, plan.sent) for by_head in side for keys in by_head)
    tuples = sum(len(by_head) + 1 for side in (plan.received, plan.sent) for by_head in side)
    return 320 * ranges + 64 * tuples + 16 * (sum(plan.num_sent) + sum(plan.num_received))
