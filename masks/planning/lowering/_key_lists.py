"""The keys of each query as lists of single keys, of any lengths, for kernels that gather keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...blocks import allowed_pairs
from ...core import Pattern
from ._table import TableProblems

# b batch entries with lists of their own, T tables, N queries, M keys, E listed pairs

_CELLS = 1 << 18  # pairs evaluated at once


@dataclass(frozen=True, eq=False)
class KeyLists:
    """The keys of each query: list (b * T + t) * N + n has those that query n sees in the heads of table t.

    keys: indices of keys in the call, list after list, ascending in each.
    ends: one past the last place of each list in `keys`.
    shape: (b, T, N); b is 1 or the number of batch entries, and heads share tables in consecutive groups of equal size.
    """

    keys: Int64[Tensor, " E"]
    ends: Int64[Tensor, " bTN"]
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, entries: Sequence[TableProblems]) -> KeyLists:
        """Return the keys of each query that the tables of a call list and the rule of pairs in them allows.

        entries: the tables of each batch entry, or those of all entries as a single item. If their numbers differ, the
            tables of an entry are repeated up to the largest number.
        """
        tables = max(each.num_tables for each in entries)
        found = [_listed(each, tables) for each in entries]
        counts = torch.cat([count for count, _ in found])
        shape = len(entries), tables, entries[0].bound.num_queries
        return cls(torch.cat([keys for _, keys in found]), counts.cumsum(0), shape)

    @cached_property
    def counts(self) -> Int64[Tensor, " bTN"]:
        """Number of keys in each list."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    def on(self, device: torch.device) -> KeyLists:
        return replace(self, keys=self.keys.to(device), ends=self.ends.to(device))


def _listed(of: TableProblems, tables: int) -> tuple[Int64[Tensor, " TN"], Int64[Tensor, " E"]]:
    """Return (number of keys of each query of each table, these keys, one list after another)."""
    row, side = of.row_of_query, of.block[1]
    column, open_ = of.column[:, row], (~of.full & (of.column >= 0))[:, row]
    keys = (column[..., None] * side + torch.arange(side)).flatten(2)
    shown = (column >= 0).repeat_interleave(side, 2) & (keys < of.bound.num_keys)
    for some in (open_.repeat_interleave(side, 2) & shown).nonzero().split(_CELLS):
        shown[some.unbind(1)] = _allowed(of, some, keys)
    if tables > of.num_tables:
        keys, shown = (x.repeat_interleave(tables // of.num_tables, 0) for x in (keys, shown))
    return shown.sum(2).flatten(), keys[shown]


def _allowed(of: TableProblems, pairs: Int64[Tensor, "n 3"], keys: Int64[Tensor, "T N W"]) -> Bool[Tensor, " n"]:
    """True for each pair, given as (table, query, place in `keys`), that the rule of the pairs in the tables allows."""
    bound, (table, query, _) = of.bound, pairs.unbind(1)
    assert isinstance(bound.pattern, Pattern)
    head = table * (bound.num_heads // of.num_tables) + bound.head_offset
    at = query + bound.q_offset, keys[pairs.unbind(1)] + bound.k_offset
    return allowed_pairs(bound.pattern, bound.num_heads_global, head, *at)
