"""CallKey: everything a program depends on besides the tensors' values, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from .masks import Layout, from_json
from .masks._bound import Bound


class CallKey(NamedTuple):
    """One call's pattern (as JSON) and sizes. `rate` is that of the layout in which its tokens come."""

    pattern: str
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    q_offset: int
    head_offset: int
    num_heads_global: int
    rate: int
    block_size: tuple[int, int]

    @property
    def layout(self) -> Layout:
        """The order of the queries."""
        return Layout(self.num_queries, self.rate)

    def bound(self) -> Bound:
        """The pattern with its sizes."""
        return from_json(self.pattern).bind(
            num_heads=self.num_heads,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            q_offset=self.q_offset,
            head_offset=self.head_offset,
            num_heads_global=self.num_heads_global,
        )
