"""Bound: a pattern with its sizes; its rule as a mask_mod, as counts over boxes, and as a cache key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._box import Bounds, Box
from ._check import require_int

if TYPE_CHECKING:
    from ._pattern import Expression, MaskMod, Pattern

EMPTY, PARTIAL, FULL = 0, 1, 2


class Extent(NamedTuple):
    """Exclusive upper bounds of positions: one past the last query position, and one past the last key position.

    >>> masks.extend.Extent(queries=5, keys=8).tokens
    8
    """

    queries: int
    keys: int

    @property
    def tokens(self) -> int:
        """One past the last position of any query or key."""
        return max(self)


@dataclass(frozen=True)
class Bound:
    """A pattern or mixture bound to sizes. Query i is at position q_offset + i, key j at k_offset + j.

    It covers heads head_offset to head_offset + num_heads - 1 of num_heads_global, and `batch` batch entries. The rule
    has three forms: `mask_mod`, elementwise and exact; `count` and `classify`, sound bounds on each box of pairs;
    `key`, hashable data for caches. For a mixture, all but `key` use the union of its branches.

    >>> bound = masks.causal().bind(num_heads=1, num_queries=4, num_keys=4)
    >>> bound.mask_mod()(*torch.tensor([0, 0, 2, 3]))  # batch, head, query, key
    tensor(False)
    """

    pattern: Expression
    num_queries: int
    num_keys: int
    num_heads: int
    head_offset: int
    num_heads_global: int
    q_offset: int
    k_offset: int
    batch: int

    def __post_init__(self) -> None:
        for name in ("num_queries", "num_keys", "num_heads", "batch"):
            require_int(name, getattr(self, name), minimum=1)
        for name in ("head_offset", "q_offset", "k_offset"):
            require_int(name, getattr(self, name), minimum=0)
        require_int("num_heads_global", self.num_heads_global, minimum=1)
        if self.head_offset + self.num_heads > self.num_heads_global:
            raise ValueError(
                f"heads {self.head_offset} to {self.head_offset + self.num_heads - 1} must lie within "
                f"num_heads_global; got num_heads_global={self.num_heads_global}"
            )
        self.pattern.check_heads(self.num_heads_global)
        if self.pattern.varies:
            self.pattern.require_entries(self.batch)

    @property
    def union(self) -> Pattern:
        """Pairs of nonzero attention weight, as one pattern: for a mixture, the union of its branches."""
        return self.pattern.union

    @property
    def num_positions(self) -> int:
        """One past the last position of any query or key."""
        return max(self.q_offset + self.num_queries, self.k_offset + self.num_keys)

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys are at equal positions."""
        return (self.num_queries, self.q_offset) == (self.num_keys, self.k_offset)

    @property
    def masked_heads(self) -> range:
        """Return the global heads, of this `Bound`, that need a mask: the first if all have equal rules, else all."""
        heads = range(self.head_offset, self.head_offset + self.num_heads)
        branches = self.pattern.branches()
        rules = {tuple(each.for_head(head, self.num_heads_global) for each in branches) for head in heads}
        return heads[:1] if len(rules) == 1 else heads

    def entry(self, batch: int) -> Bound:
        """Return the `Bound` of the single batch entry `batch`, with this entry's values of run-time tensors."""
        return replace(self, pattern=self.pattern.entry(batch), batch=1)

    def key(self) -> tuple[str | int, ...]:
        """Return the pattern's text and the sizes as hashable data for caches.

        Equal keys mean equal masks if run-time tensors, such as document ids, have their values, as after `bind`.
        """
        sizes = (self.num_queries, self.num_keys, self.num_heads, self.head_offset, self.num_heads_global)
        return (self.pattern.text, *sizes, self.q_offset, self.k_offset, self.batch)

    def mask_mod(self, device: torch.device | str = "cpu") -> MaskMod:
        """Return a closure (b, h, q, k) -> bool for FlexAttention; h, q and k are indices from 0, without the offsets.

        The closure adds head_offset, q_offset and k_offset to them. Constants of the rule are tensors on `device`.
        """
        where = torch.device(device)
        inner = self.union.mask_mod(num_heads=self.num_heads_global, device=where)
        offsets = (self.head_offset, self.q_offset, self.k_offset)
        if not any(offsets):
            return inner
        head, query, key = (torch.tensor(offset, device=where) for offset in offsets)
        return lambda b, h, q, k: inner(b, h + head, q + query, k + key)

    def count(self, box: Box) -> Bounds:
        """Return lower and upper bounds on the number of allowed (query, key) pairs in each of n boxes.

        box: boxes of global heads and of positions, in which the offsets are included.

        Boxes have no batch index: if run-time tensors differ by batch entry, call this method of `entry(batch)`.
        """
        return self.union.count(box, num_heads=self.num_heads_global)

    def classify(self, box: Box) -> Tensor:
        """Return EMPTY, PARTIAL or FULL for each of n boxes: none, some or all of its pairs are allowed; int64, (n,).

        EMPTY and FULL are certain; PARTIAL also marks boxes that the bounds leave undecided. box: as for `count`.
        """
        bounds = self.count(box)
        verdict = torch.full_like(box.area, PARTIAL)
        verdict[bounds.low == box.area] = FULL
        verdict[bounds.high == 0] = EMPTY
        return verdict
