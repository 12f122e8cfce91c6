"""RingCall: what a call of the ring is besides q, k, v and sinks, on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._placed_call import PlacedCall
from ..masks._placement import Placement
from ._codec import Codec
from ._pool import BufferPool
from ._ranks import Ranks
from ._ring_plan import Part, Turn, turns_of
from ._sharding import Sharding
from ._whole_rule import whole_rule


@dataclass(frozen=True, eq=False)
class RingCall:
    """The ranks and their shards, the pattern in JSON with its run-time tensors, heads, engine, and the way to send.

    `dtype` is that in which a shard is computed with.
    """

    ranks: Ranks
    sharding: Sharding
    pattern: str
    bindings: Sequence[Tensor]
    scale: float
    num_heads: int
    head_offset: int
    num_heads_global: int
    engine: str
    sides: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec
    pool: BufferPool | None

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        heads = range(self.head_offset, self.head_offset + self.num_heads)
        rule = whole_rule(self.pattern, self.bindings, self.sharding.num_tokens)
        return turns_of(rule, self.sharding, self.ranks.rank, heads=heads, num_heads_global=self.num_heads_global)

    @cached_property
    def own(self) -> Part:
        """This rank's shard."""
        return Part(range(self.sharding.length(self.ranks.rank)), self.sharding.ranges(self.ranks.rank))

    def with_keys_of(self, part: Part) -> PlacedCall:
        """Attention of this rank's queries to these keys."""
        tokens = self.sharding.num_tokens
        placement = Placement(self.own.positions, (part.positions,), complete=False, num_tokens=tokens)
        where = (self.head_offset, self.num_heads_global)
        return PlacedCall(self.pattern, placement, self.scale, *where, self.engine, self.sides)
