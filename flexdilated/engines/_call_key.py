"""CallKey: everything a program depends on besides the tensors' values, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Layout, cache
from ..masks.core import Bound, Expression, Extent, content_digest, device_kind, plans
from ..masks.orders import Placement
from ..masks.patterns import blank, names, tables
from ..masks.planning import ANYTHING, Allowed, Choice, Operands, Plan, plan, plan_at
from ..masks.text import read_text

_FEW_BYTES = 1 << 14  # of run-time tensors, whose digest takes less time than what is made of them


class CallKey(NamedTuple):
    """One call's pattern (as JSON) and sizes.

    `rate` is that of the layout in which its tokens come. `block_size` is two sides, or nothing where each term
    takes its own. `placement` is the text of one, where tokens stand at stated positions; offsets are then 0.
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
    placement: str = ""

    @classmethod
    def of(cls, pattern: str, *fields: Any) -> CallKey:
        """From an op's arguments: tracing hands over sizes that are no plain integers, and the block size as a list."""
        *numbers, block_size, placement = fields if isinstance(fields[-1], str) else (*fields, "")
        return cls._make((pattern, *map(int, numbers), tuple(block_size), placement))

    @property
    def first(self) -> tuple[int, int, int]:
        """The global head and the positions of the first head, query and key."""
        return self.head_offset, self.q_offset, self.k_offset

    @property
    def sides(self) -> tuple[int, int] | None:
        """The sides of blocks that were asked for, if any."""
        return None if not self.block_size else (self.block_size[0], self.block_size[1])

    @property
    def layout(self) -> Layout:
        """The order of the queries."""
        return Layout(self.num_queries, self.rate)

    @property
    def extent(self) -> Extent:
        """Where the positions of queries and keys end."""
        if self.placement:
            end = Placement.read(self.placement).end
            return Extent(end, end)
        return Extent(self.q_offset + self.num_queries, self.k_offset + self.num_keys)

    def rules(self, bindings: Sequence[Tensor]) -> Expression:
        """The pattern, with the values of its run-time tensors in place; these come in the order of their names.

        The values are those of now: no call relies on what an earlier one read, as neither a tensor's identity nor its
        version tells that it was written to (collectives, `.data`, NumPy and kernels of others count no version).
        """
        pattern = read_text(self.pattern)
        return pattern.resolve(dict(zip(names(pattern), bindings, strict=True)), self.extent)

    def kept_rules(self, bindings: Sequence[Tensor]) -> Expression:
        """The same, kept in the cache by the contents of the tensors where these are on the CPU and small."""
        if sum(x.nbytes for x in bindings) > _FEW_BYTES or not all(device_kind(x.device).on_host for x in bindings):
            return self.rules(bindings)
        return cache().get(
            ("rule", self.pattern, self.extent, *map(_content, bindings)),
            lambda: self.rules(bindings),
            lambda rule: sum(table.rows.nbytes for table in tables(rule)),
            pattern=self.pattern,
        )

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

    def operands(self, q: Tensor) -> Operands:
        """What of such a call's tensors its plan depends on."""
        return Operands(q.element_size(), int(q.shape[-1]), self.num_heads // self.num_kv_heads)

    def plan(
        self,
        rule: Expression | None = None,
        *,
        device: torch.device | str = "cpu",
        allowed: Allowed = ANYTHING,
        choice: Choice | None = None,
        operands: Operands | None = None,
    ) -> Plan:
        """How the pattern, or what its run-time tensors make of it, is computed on this kind of device."""
        how: dict[str, Any] = {"device": device, "allowed": allowed, "operands": operands}
        if not self.placement:
            return plan(self.bound(rule), layout=self.layout, choice=choice, **how)
        heads = {"num_heads": self.num_heads, "head_offset": self.head_offset}
        return plan_at(
            read_text(self.pattern) if rule is None else rule,
            Placement.read(self.placement),
            **heads,
            num_heads_global=self.num_heads_global,
            **how,
        )


@plans
def _content(x: Tensor) -> tuple[torch.dtype, torch.Size, str]:
    """Plain data: equal for tensors of equal values."""
    return x.dtype, x.shape, content_digest(x.detach().contiguous())
