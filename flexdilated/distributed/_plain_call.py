"""PlainCall: what a call over ranks is besides its tensors, as an op can take it."""

from __future__ import annotations

from typing import Any, NamedTuple, Self


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
