"""A call over ranks besides its tensors: plain values for a custom op, and the rule of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor

from ...engines import CallKey
from ...masks.core import Expression
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


def whole_rule(pattern: str, bindings: Sequence[Tensor], num_tokens: int) -> Expression:
    """The pattern, in JSON, with the values of its run-time tensors in place; these come in the order of their names.

    They are read at each call: nothing tells that a tensor has not changed but its values.
    """
    if not bindings:
        return read_text(pattern)
    # Of a call only its pattern and its extent make the rule.
    return CallKey(pattern, 1, 1, num_tokens, num_tokens, 0, 0, 0, 1, 1, ()).rules(bindings)
