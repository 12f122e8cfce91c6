"""RingCall: what a call of the ring is besides q, k, v and sinks, on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..engines._placed_call import PlacedCall
from ..masks.orders._placement import Placement
from ._codec import Codec
from ._codec_choice import codec_for
from ._plain_call import PlainCall
from ._pool import BufferPool
from ._pools import pool_named
from ._ranks import Ranks
from ._ring_plan import Part, Turn, turns_of
from ._sharding import Sharding
from ._whole_rule import whole_rule


@dataclass(frozen=True, eq=False)
class RingCall:
    """A call with what its names stand for: ranks, shards, codec, pool; and its run-time tensors and heads.

    `dtype` is that in which a shard is computed with.
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
            # The CPU's kernels round what they give to the type of what they get, a time for each shard. They take as
            # long in float32 as in bfloat16.
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
        """Attention of this rank's queries to these keys."""
        tokens = self.sharding.num_tokens
        placement = Placement(self.own.positions, (part.positions,), complete=False, num_tokens=tokens)
        call = self.plain
        where = (call.head_offset, call.num_heads_global)
        return PlacedCall(call.pattern, placement, call.scale, *where, call.engine, call.block_size)
