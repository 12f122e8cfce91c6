"""The exchange plan: which rows each rank sends to each other, from pattern and sharding alone, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks.core._pattern import Expression, require_expression
from ...masks.core._ranges import Ranges
from ...masks.orders._placement import Placement
from ...masks.plan_cache._cache import cache
from ..counts import KVNeeds
from ..group import Sharding

# W ranks, S rows sent, R rows received: each a token of one key/value head

Tokens = tuple[tuple[Ranges, ...], ...]  # by rank, by KV head: positions


@dataclass(frozen=True)
class ExchangePlan:
    """What one rank receives and sends; all ranks compute each other's plans, and they agree to the order.

    received[source][g] are the positions, held by `source`, of the tokens whose key and value this rank needs in KV
    head g: some of its queries, in some query head of that group, may attend to them. sent[target][g] are those of
    its own that `target` needs. A token that several query heads of a group need counts once. Of itself a rank needs
    nothing. On the wire tokens stand in the order (KV head, token) of these ranges.
    """

    received: Tokens
    sent: Tokens
    local: Ranges  # the positions that this rank holds

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
        """Tokens from each source, summed over KV heads."""
        return tuple(_number(keys) for keys in self.received)

    @property
    def num_sent(self) -> tuple[int, ...]:
        """Tokens to each target, summed over KV heads."""
        return tuple(_number(keys) for keys in self.sent)

    @cached_property
    def sent_heads(self) -> Int64[Tensor, " S"]:
        """The KV head of each sent token, in the order (target, KV head, token)."""
        counts = [sum(map(len, keys)) for by_head in self.sent for keys in by_head]
        heads = [head for by_head in self.sent for head in range(len(by_head))]
        return torch.tensor(heads, dtype=torch.int64).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    @cached_property
    def sent_tokens(self) -> Int64[Tensor, " S"]:
        """The index in this rank's shard of each sent token, in the order (target, KV head, token)."""
        ranges = [keys for by_head in self.sent for ranges in by_head for keys in ranges]
        return local_indices(self.local, tuple(ranges))


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
    local, others = sharding.ranges(rank), range(sharding.num_ranks)
    received = tuple(needs.by_head(*_pair(sharding, rank, source)) for source in others)
    sent = tuple(needs.by_head(*_pair(sharding, target, rank)) for target in others)
    return ExchangePlan(received, sent, local)


def _pair(sharding: Sharding, target: int, source: int) -> tuple[Ranges, Ranges]:
    """The positions of the target's queries and those of the source's keys; none where they are the same rank."""
    return (sharding.ranges(target), sharding.ranges(source)) if target != source else ((), ())


def _number(keys: tuple[Ranges, ...]) -> int:
    return sum(len(each) for ranges in keys for each in ranges)


def _nbytes(plan: ExchangePlan) -> int:
    """About what ranges, tuples and the two index tensors take."""
    ranges = sum(len(keys) for side in (plan.received, plan.sent) for by_head in side for keys in by_head)
    tuples = sum(len(by_head) + 1 for side in (plan.received, plan.sent) for by_head in side)
    return 160 * ranges + 64 * tuples + 16 * sum(plan.num_sent)


@dataclass(frozen=True, eq=False)
class Wires:
    """The keys that a rank attends to stand in one tensor a head: first its own, then what it receives.

    Heads that receive less than others have room to spare at the end, which nobody reads. `num_sent` and
    `num_received` are rows by rank.
    """

    placement: Placement
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    sent_heads: Int64[Tensor, " S"]
    sent_tokens: Int64[Tensor, " S"]
    received_heads: Int64[Tensor, " R"]
    received_slots: Int64[Tensor, " R"]
    _on: dict[torch.device, Wires] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        rule: Expression,
        sharding: Sharding,
        rank: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_offset: int,
        num_heads_global: int,
    ) -> Wires:
        """The wires of a pattern with the values of its run-time tensors in place, from the cache if they are there."""
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_offset": head_offset}

        def build() -> Wires:
            plan = ExchangePlan.of(rule, sharding, rank, **heads, num_heads_global=num_heads_global)
            return _laid(plan, sharding.ranges(rank), num_kv_heads, sharding.num_tokens)

        key = ("wires", rule.text, sharding, rank, *heads.values(), num_heads_global)
        return cache().get(key, build, lambda wires: wires.nbytes, pattern=rule)

    def on(self, device: torch.device) -> Wires:
        """The same with its indices on a device, where they are put once."""
        if device.type == "cpu":
            return self
        if device not in self._on:
            names = ("sent_heads", "sent_tokens", "received_heads", "received_slots")
            self._on[device] = replace(self, **{name: getattr(self, name).to(device) for name in names})
        return self._on[device]

    @property
    def nbytes(self) -> int:
        """About what the indices and ranges take."""
        indices = (self.sent_heads, self.sent_tokens, self.received_heads, self.received_slots)
        return sum(x.nbytes for x in indices) + 160 * sum(map(len, self.placement.keys))

    @property
    def num_keys(self) -> int:
        """Tokens of the tensor that holds own and received keys."""
        return self.placement.num_keys


def _laid(plan: ExchangePlan, own: Ranges, num_kv_heads: int, num_tokens: int) -> Wires:
    ranks, num_own = range(len(plan.received)), sum(map(len, own))
    counts = [[sum(map(len, plan.received[source][head])) for head in range(num_kv_heads)] for source in ranks]
    each = torch.tensor(counts, dtype=torch.int64)
    before = each.cumsum(0) - each  # received by a head from earlier ranks
    heads = torch.arange(num_kv_heads).repeat(len(ranks)).repeat_interleave(each.flatten())
    row = torch.arange(len(heads)) - (each.flatten().cumsum(0) - each.flatten()).repeat_interleave(each.flatten())
    slots = num_own + before.flatten().repeat_interleave(each.flatten()) + row
    by_head = [
        (*own, *(run for source in ranks for run in plan.received[source][head])) for head in range(num_kv_heads)
    ]
    return Wires(
        Placement(own, tuple(by_head), complete=True, num_tokens=num_tokens),
        tuple(plan.num_sent),
        tuple(plan.num_received),
        plan.sent_heads,
        plan.sent_tokens,
        heads,
        slots,
    )
