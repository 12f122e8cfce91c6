"""The ring of one rank: the shards that it receives and sends in each turn, and its call without tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...engines import PlacedCall
from ...masks.core import Expression, Ranges
from ...masks.orders import Placement
from ...masks.plan_cache import cache
from ..counts import KVNeeds
from ..group import PlainCall, Ranks, Sharding, whole_rule
from ..wire import BufferPool, Codec, codec_for, pool_named


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a rank's shard, and their positions; empty if no token is needed."""

    tokens: range
    positions: Ranges

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def slice(self) -> slice:
        """Slice of the local tokens."""
        return slice(self.tokens.start, self.tokens.stop)


@dataclass(frozen=True)
class Turn:
    """One turn of a ring for one rank: it receives from `source` and sends to `target`.

    The backward reverses both: gradients of received keys go back to `source`, gradients of sent keys come from
    `target`.
    """

    source: int
    received: Part
    target: int
    sent: Part


def turns_of(
    rule: Expression, sharding: Sharding, rank: int, *, heads: range, num_heads_global: int
) -> tuple[Turn, ...]:
    """Cached turns of a rank with the W - 1 other ranks.

    A run of a shard is sent whole if some query of the receiver needs a key of it. Both sides decide that
    independently, from the sharding and the pattern, which must hold the values of its run-time tensors. heads: global
    query heads.
    """

    def build() -> tuple[Turn, ...]:
        needs = KVNeeds.of(rule, sharding.num_tokens, len(heads), 1, heads.start, num_heads_global)

        def part(holder: int, receiver: int) -> Part:
            return _needed_part(needs, sharding, holder, receiver)

        return tuple(
            Turn(source, part(source, rank), target, part(rank, target))
            for step in _steps(sharding.num_ranks)
            for source, target in [((rank - step) % sharding.num_ranks, (rank + step) % sharding.num_ranks)]
        )

    key = ("ring", rule.text, sharding.numbers(), rank, heads.start, heads.stop, num_heads_global)
    return cache().get(key, build, lambda turns: 500 * len(turns), pattern=rule)


def _steps(num_ranks: int) -> Iterator[int]:
    """Ring steps, nearest neighbours first: if only neighbours need each other's keys, their turns overlap.

    All ranks take the steps in one order; otherwise messages between three ranks could deadlock.
    """
    for step in range(1, num_ranks // 2 + 1):
        yield step
        if num_ranks - step != step:
            yield num_ranks - step


def _needed_part(needs: KVNeeds, sharding: Sharding, holder: int, receiver: int) -> Part:
    """Runs of the holder's shard in which the receiver needs a key; adjacent, because a shard has at most two runs."""
    queries = sharding.ranges(receiver)
    needed, first = [], 0
    for run in sharding.ranges(holder):
        if any(needs.by_head(queries, (run,))):
            needed.append((range(first, first + len(run)), run))
        first += len(run)
    tokens = range(needed[0][0].start, needed[-1][0].stop) if needed else range(0)
    return Part(tokens, tuple(run for _, run in needed))


@dataclass(frozen=True, eq=False)
class RingCall:
    """A call with its names resolved to ranks, sharding, codec and pool, and its run-time tensors and heads.

    dtype: in which attention to a shard is computed.
    """

    plain: PlainCall
    ranks: Ranks
    sharding: Sharding
    bindings: Sequence[Tensor]
    num_heads: int
    dtype: torch.dtype
    codec: Codec
    pool: BufferPool | None

    @classmethod
    def of(cls, plain: PlainCall, q: Tensor, k: Tensor, v: Tensor, bindings: Sequence[Tensor]) -> RingCall:
        ranks = Ranks.named(plain.group, q.device.type)
        return cls(
            plain,
            ranks,
            Sharding.of(plain.sharding),
            bindings,
            q.shape[1],
            # CPU kernels round results to the dtype of their operands, here once per shard; float32 avoids that and is
            # as fast as bfloat16.
            torch.promote_types(q.dtype, torch.float32) if plain.engine == "tiles" else q.dtype,
            codec_for(plain.codec, plain.error_bound, k, v, ranks),
            pool_named(plain.pool, q.device),
        )

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        first, num_heads_global = self.plain.head_offset, self.plain.num_heads_global
        heads = range(first, first + self.num_heads)
        rule = whole_rule(self.plain.pattern, self.bindings, self.sharding.num_tokens)
        return turns_of(rule, self.sharding, self.ranks.rank, heads=heads, num_heads_global=num_heads_global)

    @cached_property
    def own(self) -> Part:
        """This rank's shard."""
        return Part(range(self.sharding.length(self.ranks.rank)), self.sharding.ranges(self.ranks.rank))

    def with_keys_of(self, part: Part) -> PlacedCall:
        """Attention of this rank's queries to the keys of `part`."""
        tokens = self.sharding.num_tokens
        return self.plain.placed(Placement(self.own.positions, (part.positions,), complete=False, num_tokens=tokens))
