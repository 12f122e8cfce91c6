"""A call over ranks besides its tensors: plain values for a custom op, and the rule of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ...engines import CallKey, PlacedCall
from ...masks.core import Expression
from ...masks.orders import Placement
from ...masks.text import read_text


class PlainCall(NamedTuple):
    """Plain values, checked, and the same on all ranks but for the pool.

    `pattern` is JSON, `block_size` two sides or none, `sharding` its numbers; `error_bound` is 0 where there is none,
    and `pool` the name of one, or "".
    """

    pattern: str
    scale: float
    head_offset: int
    num_heads_global: int
    engine: str
    block_size: tuple[int, ...]
    sharding: tuple[int, ...]
    group: str
    codec: str | None
    error_bound: float
    pool: str

    @classmethod
    def of(cls, *values: Any) -> Self:
        """From an op's arguments: tracing hands over sizes that are no plain integers, and tuples come as lists."""
        call = cls._make(values)
        return call._replace(
            head_offset=int(call.head_offset),
            num_heads_global=int(call.num_heads_global),
            block_size=tuple(map(int, call.block_size)),
            sharding=tuple(map(int, call.sharding)),
        )

    def rows_of(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) for an op's shape rule, which checks the heads too: `attend` leaves that to it while it traces."""
        read_text(self.pattern).check_heads(self.num_heads_global)
        return empty_rows(q)

    def placed(self, placement: Placement) -> PlacedCall:
        """Attention of this rank's queries to the keys that lie as the placement says."""
        where = (self.head_offset, self.num_heads_global)
        return PlacedCall(self.pattern, placement, self.scale, *where, self.engine, self.block_size)


def empty_rows(q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for out (B, H, L, D) and lse (B, H, L), in float32 or wider."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def as_promised(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype and memory format of `like`: what the shape rules of ops promise."""
    promised = torch.empty_like(like)
    return x if x.dtype == like.dtype and x.stride() == promised.stride() else promised.copy_(x)


def whole_rule(pattern: str, bindings: Sequence[Tensor], num_tokens: int) -> Expression:
    """The pattern, in JSON, with the values of its run-time tensors in place; these come in the order of their names.

    They are read at each call: only its values show whether a tensor has changed.
    """
    if not bindings:
        return read_text(pattern)
    # Of a call only its pattern and its extent make the rule.
    return CallKey(pattern, 1, 1, num_tokens, num_tokens, 0, 0, 0, 1, 1, ()).rules(bindings)
