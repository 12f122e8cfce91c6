"""Interval lowering: a branch over the tokens that a device holds, in which each query sees neighbouring keys.

For engines whose kernels take lists of blocks: one term a branch, however many runs of positions are held.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...blocks import UNKNOWN, Blocks
from ...core import And, Bound, Every, MaskMod, Pattern, Ranges, index_dtype
from ...orders import Held, Placement
from ...patterns import Band, Dilated
from ._padded import SharedListTerm
from ._term import Term

# H heads, T tables, Q slots of queries, K slots of keys, R rows of blocks, C columns


class IntervalTerm(SharedListTerm):
    """Each query with the keys from one slot to another. Tokens are counted by position, of queries and of keys."""

    q: Held  # pyright: ignore[reportIncompatibleVariableOverride]
    k: Held  # pyright: ignore[reportIncompatibleVariableOverride]

    @cached_property
    def limits(self) -> tuple[Int64[Tensor, "T Q"], Int64[Tensor, "T Q"]]:
        """Of each query of each row the slot of its first key, and one past its last; twice the same if it has none."""
        queries, keys = self.q.positions, self.k.positions
        first, past = _interval(self.rule.factors(), queries)
        known = torch.where(keys < 0, torch.iinfo(torch.int64).max, keys)
        low, high = (torch.searchsorted(known, each.contiguous()) for each in (first, past))
        return low, torch.where(queries < 0, low, high.maximum(low))

    def in_blocks_of(self, q_block: int, k_block: int) -> IntervalTerm:
        return replace(self, q=self.q.in_blocks_of(q_block), k=self.k.in_blocks_of(k_block))

    def pairs_of_heads(self) -> Int64[Tensor, " H"]:
        """The pairs of each head, each once."""
        low, high = self.limits
        return (high - low).sum(1)[list(self.q.rows)]

    def blocks(self, q_block: int, k_block: int, *, settle: bool = True) -> Blocks:
        """The block list over all slots."""
        full, partial = self._listed(q_block, k_block)
        row, column = (full | partial).nonzero().unbind(1)
        table = torch.zeros(len(row), dtype=torch.int32)
        shape = (self.q.num_slots, self.k.num_slots, q_block, k_block)
        unknown = torch.full_like(table, UNKNOWN)
        return Blocks(*shape, self.tables(), table, row.int(), column.int(), full[row, column], unknown)

    def _listed(self, q_block: int, k_block: int) -> tuple[Bool[Tensor, "R C"], Bool[Tensor, "R C"]]:
        """Which blocks are full, and which are partial."""
        low, high = self.limits
        rows, columns = -(-low.shape[1] // q_block), -(-self.k.num_slots // k_block)
        some = high > low
        row = torch.arange(low.shape[1]).expand_as(low)[some] // q_block
        touched = torch.zeros(rows, columns + 1, dtype=torch.int32)
        one = torch.ones_like(row, dtype=torch.int32)
        touched.index_put_((row, low[some] // k_block), one, accumulate=True)
        touched.index_put_((row, (high[some] - 1) // k_block + 1), -one, accumulate=True)
        latest = torch.zeros(rows * q_block, dtype=torch.int64)
        latest[: low.shape[1]] = low.amax(0)
        soonest = torch.zeros(rows * q_block, dtype=torch.int64)  # of slots beyond the last: no block is full for them
        soonest[: low.shape[1]] = high.amin(0)
        latest, soonest = latest.view(rows, -1).amax(1), soonest.view(rows, -1).amin(1)
        begin = torch.arange(columns) * k_block
        full = (begin >= latest[:, None]) & (begin + k_block <= soonest[:, None])
        return full, (touched.cumsum(1)[:, :-1] > 0) & ~full

    def hidden(self) -> tuple[Bool[Tensor, "1 H Q"] | None, Bool[Tensor, "1 H K"] | None]:
        """The slots of tokens that are in no pair, of queries and of keys; None where a side has none."""
        low, high = self.limits
        steps = torch.zeros(len(low), self.k.num_slots + 1, dtype=torch.int64)
        one = (high > low).long()
        seen = steps.scatter_add(1, low, one).scatter_add(1, high, -one).cumsum(1)[:, :-1]
        found = (low == high) & (self.q.positions >= 0), (seen == 0) & (self.k.positions >= 0)
        rows = list(self.q.rows)
        queries, keys = (side[None, rows] if bool(side.any()) else None for side in found)
        return queries, keys

    def mask_mod(self, device: torch.device) -> MaskMod:
        """Closure (b, h, q slot, k slot) -> bool over the term's own heads."""
        dtype = index_dtype(device, 0, self.k.num_slots)
        rows = torch.tensor(self.q.rows, dtype=dtype, device=device)
        return _between(rows, *(limit.to(device, dtype) for limit in self.limits))


def _between(rows: Int64[Tensor, " H"], low: Int64[Tensor, "T Q"], high: Int64[Tensor, "T Q"]) -> MaskMod:
    def seen(b, h, q, k):
        row = rows[h]
        return (low[row, q] <= k) & (k < high[row, q])

    return seen


def interval_terms(branch: Pattern, multiplicity: int, bound: Bound, placement: Placement) -> list[Term] | None:
    """One term for all heads with the same segments, rates and rule; None if the rule of a head has no such form.

    A head's rule must be an intersection of bands without steps and of dilated segments, one of these with a rate.
    """
    groups: dict[tuple[Pattern, int, int], dict[int, tuple[int, Ranges]]] = {}
    of_head = placement.keys
    for head in range(bound.num_heads):
        factors = branch.for_head(head + bound.head_offset, bound.num_heads_global).factors()
        sparse = [each for each in factors if isinstance(each, Dilated) and each.rate > 1]
        if len(sparse) > 1 or not all(map(_is_interval, factors)):
            return None
        base = sparse[0] if sparse else Dilated(1, 1, 0)
        assert isinstance(base.offset, int), "a rule for one head has its offset resolved"
        # What is left of a dilated segment once its active tokens are chosen.
        left = And.of(*(Dilated(base.segment, 1, 0) if each == base else each for each in factors))
        row = base.offset, of_head[head * len(of_head) // bound.num_heads]
        groups.setdefault((left, base.segment, base.rate), {})[head] = row
    terms: list[Term] = []
    for (rule, segment, rate), row_of in groups.items():
        rows = tuple(dict.fromkeys(row_of.values()))
        where = tuple(map(rows.index, row_of.values())), rate, segment
        offsets, runs = zip(*rows, strict=True)
        sides = Held(offsets, (placement.queries,) * len(rows), *where), Held(offsets, runs, *where)
        term = IntervalTerm.of(bound, rule, "blocks", multiplicity, *cast(Any, sides), heads=tuple(row_of))
        if term.counted_pairs():
            terms.append(term)
    return terms


def _is_interval(factor: Pattern) -> bool:
    return isinstance(factor, Dilated | Every) or (isinstance(factor, Band) and factor.step == 1)


def _interval(factors: tuple[Pattern, ...], query: Int64[Tensor, "H Q"]) -> tuple[Tensor, Tensor]:
    """The first position that each query may see, and one past the last."""
    first, past = torch.zeros_like(query), torch.full_like(query, torch.iinfo(torch.int64).max)
    for factor in factors:
        if isinstance(factor, Dilated):
            begin = query - query % factor.segment
            first, past = first.maximum(begin), past.minimum(begin + factor.segment)
        elif isinstance(factor, Band):
            first = first if factor.least is None else first.maximum(query + factor.least)
            past = past if factor.most is None else past.minimum(query + factor.most + 1)
    return first, past
