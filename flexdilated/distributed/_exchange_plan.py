"""The exchange plan: which tokens' keys and values each rank sends to each other, from pattern and sharding alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from flexdilated.masks.core._pattern import Expression, require_expression
from flexdilated.masks.core._ranges import Ranges
from flexdilated.masks.plan_cache._cache import cache

from ._kv_needs import KVNeeds
from ._sharding import Sharding

# W ranks, S tokens sent, summed over targets and KV heads

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
