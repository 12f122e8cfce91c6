"""CallKey: everything a program depends on besides the tensors' values, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .masks import Layout
from .masks._bound import Bound
from .masks._json import read_text
from .masks._pattern import Expression
from .masks._run_time import Extent, blank, names, resolve


class CallKey(NamedTuple):
    """One call's pattern (as JSON) and sizes.

    `rate` is that of the layout in which its tokens come. `block_size` is two sides, or nothing where each term
    takes its own.
    """

    pattern: str
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    q_offset: int
    k_offset: int
    head_offset: int
    num_heads_global: int
    rate: int
    block_size: tuple[int, ...]

    @classmethod
    def of(cls, pattern: str, *fields: Any) -> CallKey:
        """From an op's arguments: tracing hands over sizes that are no plain integers, and the block size as a list."""
        *numbers, block_size = fields
        return cls._make((pattern, *map(int, numbers), tuple(block_size)))

    @property
    def flex_sides(self) -> tuple[int, int]:
        """The sides of FlexAttention's blocks: as asked for, or those that all its kernels take."""
        rows, columns = self.block_size or (128, 128)
        return rows, columns

    @property
    def layout(self) -> Layout:
        """The order of the queries."""
        return Layout(self.num_queries, self.rate)

    @property
    def extent(self) -> Extent:
        """Where the positions of queries and keys end."""
        return Extent(self.q_offset + self.num_queries, self.k_offset + self.num_keys)

    def rules(self, bindings: Sequence[Tensor]) -> Expression:
        """The pattern, with the values of its run-time tensors in place; these come in the order of their names."""
        pattern = read_text(self.pattern)
        return resolve(pattern, dict(zip(names(pattern), bindings, strict=True)), self.extent)

    def blank(self, bindings: Sequence[Tensor]) -> Expression:
        """The pattern with run-time tables of these tensors' shapes, the same for all their values."""
        pattern = read_text(self.pattern)
        return blank(pattern, dict(zip(names(pattern), bindings, strict=True)), self.extent)

    def bound(self, rule: Expression | None = None) -> Bound:
        """The pattern, or what its run-time tensors make of it, with its sizes."""
        return (read_text(self.pattern) if rule is None else rule).bind(
            num_heads=self.num_heads,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            q_offset=self.q_offset,
            k_offset=self.k_offset,
            head_offset=self.head_offset,
            num_heads_global=self.num_heads_global,
        )
