"""Weights: multiplicities of the pairs of one term, and the bias that they add to the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ...blocks import allowed_pairs
from ...core import Bound, plans
from ...plan_cache import cache

# H heads, Q query slots, K key slots, P slots of a period

_Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class KeyWeights:
    """Weight of a pair by its key slot: for each head one period, repeated over the slots."""

    periods: tuple[tuple[int, ...], ...]

    def of_heads(self, some: slice) -> KeyWeights:
        return KeyWeights(self.periods[some])

    def counted(self, num_queries: int, num_keys: int) -> int:
        """Sum of the weights over all pairs of all heads."""
        return num_queries * int(_repeated(torch.tensor(self.periods), num_keys).sum())

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Float[Tensor, "H 1 K"]:
        """Log of the weights."""
        return _repeated(torch.tensor(self.periods, dtype=dtype).log(), num_keys)[:, None]


@dataclass(frozen=True)
class PairWeights:
    """Weight of a pair by a table, for slots k <= q where the queries are the last of the key slots.

    The table has a row for each query slot and a column for each key slot, both modulo the period; the first query slot
    is at a multiple of the period. All heads share it.
    """

    table: _Table

    def of_heads(self, some: slice) -> PairWeights:
        return self

    def counted(self, num_queries: int, num_keys: int) -> int:
        """Sum of the weights over all pairs of one head."""
        table, (q, k) = torch.tensor(self.table), _strip(num_queries, num_keys - num_queries, num_queries)
        return int((table[q % len(table)][:, k % len(table)] * (k <= q[:, None])).sum())

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Float[Tensor, "1 Q K"]:
        """Log of the weights, -inf for keys after the query: a view of memory that many strips share."""
        period, lead = len(self.table), num_keys - num_queries
        table, shift = self._least_shifted
        rows, before = _power_of_two(num_queries), _power_of_two(lead) if lead else 0
        strip = cache().get(
            ("pair weights", table, rows, before, dtype),
            lambda: _bias_of_strip(torch.tensor(table), rows + period, before, rows + period, dtype),
            lambda strip: strip.nbytes,
        )
        first = before - lead + shift
        return strip[None, shift : shift + num_queries, first : first + num_keys]

    @cached_property
    def _least_shifted(self) -> tuple[_Table, int]:
        """(smallest of the shifted tables, its shift), which heads of other offsets share; one strip has all shifts."""
        return min((_shifted(self.table, shift), shift) for shift in range(len(self.table)))


@dataclass(frozen=True)
class CountedPairs:
    """Weight of a pair: the number of branches of a bound pattern that allow it, as a table of few tokens' pairs."""

    bound: Bound

    def of_heads(self, some: slice) -> CountedPairs:
        heads = range(self.bound.num_heads)[some]
        first = self.bound.head_offset + heads.start
        return CountedPairs(replace(self.bound, num_heads=len(heads), head_offset=first))

    @plans
    def counts(self) -> Int64[Tensor, "H Q K"]:
        bound = self.bound
        heads = torch.arange(bound.num_heads)[:, None, None] + bound.head_offset
        q, k = torch.arange(bound.num_queries)[:, None] + bound.q_offset, torch.arange(bound.num_keys) + bound.k_offset
        total = torch.zeros(bound.num_heads, bound.num_queries, bound.num_keys, dtype=torch.int64)
        for branch in bound.pattern.branches():
            total += allowed_pairs(branch, bound.num_heads_global, heads, q, k)
        return total

    @cached_property
    @plans
    def is_causal(self) -> bool:
        """True if no pair has its key slot after its query slot."""
        return not bool(self.counts().triu(1).any())

    def counted(self, num_queries: int, num_keys: int) -> int:
        """Sum of the counts over all pairs of all heads."""
        return int(self.counts().sum())

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Float[Tensor, "#H Q K"]:
        """Log of the counts, -inf for 0; of one head if all heads have equal counts."""
        return cache().get(
            ("counted pairs", self.bound.key(), dtype),
            lambda: self._bias(dtype),
            lambda bias: bias.nbytes,
            pattern=self.bound.pattern,
        )

    @plans
    def _bias(self, dtype: torch.dtype) -> Tensor:
        counts = self.counts()
        alike = bool((counts == counts[:1]).all())
        return (counts[:1] if alike else counts).to(dtype).log()


Weights = KeyWeights | PairWeights | CountedPairs


def _repeated(periods: Tensor, slots: int) -> Tensor:
    return periods.repeat(1, -(-slots // periods.shape[1]))[:, :slots]


def _strip(rows: int, before: int, columns: int) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " all"]]:
    """Query slots from 0 on, and key slots from `-before` on."""
    return torch.arange(rows), torch.arange(-before, columns)


def _bias_of_strip(table: Tensor, rows: int, before: int, columns: int, dtype: torch.dtype) -> Tensor:
    q, k = _strip(rows, before, columns)
    logs = table.to(dtype).log()[q % len(table)][:, k % len(table)]
    return logs.masked_fill_(k > q[:, None], -torch.inf)


def _shifted(table: _Table, shift: int) -> _Table:
    """The table with entry (q + shift, k + shift) equal to entry (q, k) of this one."""
    rows = table[-shift:] + table[:-shift] if shift else table
    return tuple(row[-shift:] + row[:-shift] if shift else row for row in rows)


def _power_of_two(number: int) -> int:
    """Least power of two that is not smaller: rounded sizes share cached tensors."""
    return 1 << (number - 1).bit_length()
