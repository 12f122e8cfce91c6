"""A call over ranks without its tensors: plain values for a custom op, and the rule of the whole sequence."""

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
    """Validated arguments of a call as plain values; only `pool` may differ between ranks.

    pattern: in JSON. block_size: two sides, or () for none. sharding: `Sharding.numbers()`. error_bound: 0 for none.
    pool: name of a pool, or "".
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
        """From an op's arguments, in which tracing replaces integers by symbolic sizes and tuples by lists."""
        call = cls._make(values)
        return call._replace(
            head_offset=int(call.head_offset),
            num_heads_global=int(call.num_heads_global),
            block_size=tuple(map(int, call.block_size)),
            sharding=tuple(map(int, call.sharding)),
        )

    def rows_of(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Empty (out, lse), as an op's shape rule; checks the heads too, which `attend` skips in a trace."""
        read_text(self.pattern).check_heads(self.num_heads_global)
        return empty_rows(q)

    def placed(self, placement: Placement) -> PlacedCall:
        """Attention of this rank's queries to keys at the positions of `placement`."""
        where = (self.head_offset, self.num_heads_global)
        return PlacedCall(self.pattern, placement, self.scale, *where, self.engine, self.block_size)


def empty_rows(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out (B, H, L, D) in the dtype of q, and lse (B, H, L) in float32 or wider."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def as_promised(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype and memory format of `like`, as the shape rules of ops declare."""
    promised = torch.empty_like(like)
    return x if x.dtype == like.dtype and x.stride() == promised.stride() else promised.copy_(x)


def whole_rule(pattern: str, bindings: Sequence[Tensor], num_tokens: int) -> Expression:
    """The pattern, in JSON, with its run-time tensors replaced by their values; `bindings` are ordered by name.

    The values are read at each call, because a tensor may have changed in place.
    """
    if not bindings:
        return read_text(pattern)
    # The rule depends only on the pattern and the number of tokens, so the other fields are placeholders.
    return CallKey(pattern, 1, 1, num_tokens, num_tokens, 0, 0, 0, 1, 1, ()).rules(bindings)
