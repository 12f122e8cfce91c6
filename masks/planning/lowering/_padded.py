"""Padded lowering: a dilated branch as one block list over the active tokens of all its segments.

For engines whose kernels take lists of blocks: one term a branch, the same of every length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import lcm
from typing import Any, cast

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...blocks import UNKNOWN, Blocks, ListedBlocks
from ...core import Bound, Every, MaskMod, Pattern, index_dtype
from ...orders import Padded
from ...patterns import Causal
from ._term import Term
from ._ways import split_dilated

# H heads, F segments, R rows of blocks in a segment, C columns, S slots


class SharedListTerm(Term):
    """All heads share one table: a block is listed where any of them has a pair in it, and full where all fill it."""

    @cached_property
    def listed_blocks(self) -> ListedBlocks:
        """Blocks over all heads."""
        found = cast(Any, self.in_blocks_of(self.block_side, self.block_side))._listed(self.block_side, self.block_side)
        full, partial = (int(each.sum()) * len(self.heads) for each in found)
        return ListedBlocks(0, full, partial)

    def pairs_of_heads(self) -> Int64[Tensor, " H"]:
        """The pairs of each head, each once."""
        raise NotImplementedError  # every such term states its own

    def counted_pairs(self) -> int:
        """Pairs over all heads, each as often as it counts."""
        return self.multiplicity * int(self.pairs_of_heads().sum())

    def tables(self) -> tuple[int, ...]:
        return (0,) * len(self.heads)

    def hidden(self) -> tuple[Bool[Tensor, "1 H S"] | None, Bool[Tensor, "1 H S"] | None]:
        """The slots of tokens that are in no pair, of queries and of keys; None where a side has none."""
        raise NotImplementedError

    def _listed(self, q_block: int, k_block: int) -> tuple[Bool[Tensor, "..."], Bool[Tensor, "..."]]:
        """Which blocks are full, and which are partial."""
        raise NotImplementedError


class PaddedTerm(SharedListTerm):
    """Each segment's active tokens with those of the same segment: all of them, or with slots k <= q.

    All heads share one table: a block is listed where any of them has a pair in it, and full where the keys of all
    heads fill it and every query of it sees them.
    """

    q: Padded  # pyright: ignore[reportIncompatibleVariableOverride]
    k: Padded  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def is_causal(self) -> bool:
        return isinstance(self.rule, Causal)

    def in_blocks_of(self, q_block: int, k_block: int) -> PaddedTerm:
        """The same with segments filled up to whole blocks of these sides."""
        side = lcm(q_block, k_block)
        return replace(self, q=self.q.in_blocks_of(side), k=self.k.in_blocks_of(side))

    def pairs_of_heads(self) -> Int64[Tensor, " H"]:
        """The pairs of each head, each once."""
        (q_first, q_past), (k_first, k_past) = self.q.held(), self.k.held()
        keys = k_past - k_first
        if not self.is_causal:
            return ((q_past - q_first) * keys).sum(1)

        def before(place: Int64[Tensor, "H F"]) -> Int64[Tensor, "H F"]:
            """Of the queries before a place: each next one sees a key more, and at last all."""
            growing = (place - k_first).clamp(min=0).minimum(keys)
            return growing * (growing + 1) // 2 + keys * (place - k_past).clamp(min=0)

        return (before(q_past) - before(q_first)).sum(1)

    def moved(self, q_tokens: int, k_tokens: int) -> PaddedTerm:
        q, k = self.q.moved(q_tokens), self.k.moved(k_tokens)
        return replace(self, q=q, k=k, q_offset=self.q_offset - q_tokens, k_offset=self.k_offset - k_tokens)

    def blocks(self, q_block: int, k_block: int, *, settle: bool = True) -> Blocks:
        """The block list over all slots; segments must be filled up to such blocks."""
        full, partial = self._listed(q_block, k_block)
        segment, row, column = (full | partial).nonzero().unbind(1)
        rows, columns = full.shape[1:]
        table = torch.zeros(len(row), dtype=torch.int32)
        shape = (self.q.num_slots, self.k.num_slots, q_block, k_block)
        place = (segment * rows + row).int(), (segment * columns + column).int()
        order = (place[0].long() * shape[1] + place[1]).argsort()
        is_full = full[segment, row, column]
        parts = (table, *place, is_full, torch.full_like(table, UNKNOWN))
        return Blocks(*shape, self.tables(), *(each[order] for each in parts))

    def _listed(self, q_block: int, k_block: int) -> tuple[Bool[Tensor, "F R C"], Bool[Tensor, "F R C"]]:
        """Which blocks of each segment are full, and which are partial."""
        (q_first, q_past), (k_first, k_past) = self.q.held(), self.k.held()
        row = torch.arange(self.q.width // q_block)[:, None] * q_block
        column = torch.arange(self.k.width // k_block) * k_block
        listed = torch.zeros(len(k_first[0]), len(row), len(column), dtype=torch.bool)
        for head in {offset: head for head, offset in enumerate(self.q.offsets)}.values():
            low, high, begin, end = (each[head, :, None, None] for each in (q_first, q_past, k_first, k_past))
            seen = (row < high) & (row + q_block > low) & (column < end) & (column + k_block > begin)
            seen &= (low < high) & (begin < end)
            if self.is_causal:
                seen &= (row + q_block).minimum(high) > column.maximum(begin)
            listed |= seen
        whole = (column >= k_first.amax(0)[:, None, None]) & (column + k_block <= k_past.amin(0)[:, None, None])
        if self.is_causal:
            whole = whole & (row + 1 >= column + k_block)
        return listed & whole, listed & ~whole

    def hidden(self) -> tuple[Bool[Tensor, "1 H S"] | None, Bool[Tensor, "1 H S"] | None]:
        """The slots of tokens that are in no pair, of queries and of keys; None where a side has none."""
        (q_first, q_past), (k_first, k_past) = self.q.held(), self.k.held()
        no_queries, no_keys = q_first >= q_past, k_first >= k_past
        lonely_q = torch.where(no_keys, q_past, k_first.minimum(q_past) if self.is_causal else q_first)
        lonely_k = torch.where(no_queries, k_first, q_past.maximum(k_first) if self.is_causal else k_past)
        queries = self._marked(q_first, lonely_q, self.q)
        return queries, self._marked(lonely_k, k_past, self.k)

    @staticmethod
    def _marked(first: Int64[Tensor, "H F"], past: Int64[Tensor, "H F"], order: Padded) -> Bool[Tensor, "1 H S"] | None:
        if bool((first >= past).all()):
            return None
        slot = torch.arange(order.num_slots)
        segment = (slot // order.width).clamp(max=order.num_segments - 1)
        place = slot - segment * order.width
        return ((place >= first[:, segment]) & (place < past[:, segment]))[None]

    def mask_mod(self, device: torch.device) -> MaskMod:
        """Closure (b, h, q slot, k slot) -> bool over the term's own heads; true of all slots of queries."""
        (first, past), width = self.k.held(), self.k.width
        last = self.k.num_segments - 1
        each = (torch.tensor([self.k.segment - offset for offset in self.k.offsets]) + self.k.step - 1) // self.k.step
        dtype = index_dtype(device, 0, (last + 2) * width)
        limits = (first[:, 0], each, last * width + past[:, last])
        # On accelerators a constant of the kernel, which belongs to such segments anyway.
        size = width if device.type != "cpu" else torch.tensor(width)
        return _of_segments(size, *(limit.to(device, dtype) for limit in limits), is_causal=self.is_causal)


def _of_segments(
    width: Tensor | int,
    begins: Int64[Tensor, " H"],
    counts: Int64[Tensor, " H"],
    ends: Int64[Tensor, " H"],
    *,
    is_causal: bool,
) -> MaskMod:
    """Of keys in the segment of the query those that hold a token; of these, where asked for, the past.

    Of each head the first slot that holds one, how many of a segment's do, and one past the last of all. An interval
    for each query: what depends on pairs is compared twice, and takes few registers.
    """

    def seen(b, h, q, k):
        start = q // width * width
        first, past = torch.maximum(start, begins[h]), torch.minimum(start + counts[h], ends[h])
        return (k >= first) & (k < past)

    def seen_before(b, h, q, k):
        start = q // width * width
        first, past = torch.maximum(start, begins[h]), torch.minimum(start + counts[h], ends[h])
        return (k >= first) & (k < torch.minimum(past, q + 1))

    return seen_before if is_causal else seen


def padded_terms(branch: Pattern, multiplicity: int, bound: Bound, *, side: int = Term.block_side) -> list[Term] | None:
    """One term for all heads with the same segments, rates and rule within; None if a head's rule has no such form.

    A head's rule must be dilated segments, of every key or of the past, and their active tokens must fill so few blocks
    of this side that at most half of the pairs are computed that are in natural order: whatever the number of tokens.
    """
    groups: dict[tuple[Pattern, int, int], list[tuple[int, int]]] = {}
    for head in range(bound.num_heads):
        split = split_dilated(branch.for_head(head + bound.head_offset, bound.num_heads_global))
        if split is None or not isinstance(split[1], Every | Causal) or split[0].rate == 1:
            return None
        base, rest = split
        filled = -(-base.segment // (base.rate * side)) * side
        if 2 * filled**2 > base.segment**2:
            return None
        assert isinstance(base.offset, int), "a rule for one head has its offset resolved"
        if base.offset < base.segment:
            groups.setdefault((rest, base.segment, base.rate), []).append((head, base.offset))
    terms = []
    for (rest, segment, rate), members in groups.items():
        sides = _sides(tuple(offset for _, offset in members), segment, rate, bound)
        if sides is not None:
            heads = tuple(head for head, _ in members)
            terms.append(PaddedTerm.of(bound, rest, "blocks", multiplicity, *cast(Any, sides), heads=heads))
    return terms


def _sides(offsets: tuple[int, ...], segment: int, rate: int, bound: Bound) -> tuple[Padded, Padded] | None:
    """The queries and the keys of the segments that have both."""
    begins = bound.q_offset, bound.k_offset
    ends = begins[0] + bound.num_queries, begins[1] + bound.num_keys
    first, past = max(begins) // segment, (min(ends) - 1) // segment + 1
    if first >= past:
        return None
    q, k = (
        Padded(
            offsets, rate, segment, -(-segment // rate), first * segment - begin,
            max(0, first * segment - begin), min(end, past * segment) - begin,
        )
        for begin, end in zip(begins, ends, strict=True)
    )  # fmt: skip
    # Where no token of either side is active nothing is to be computed.
    return (q, k) if all(bool((side.held()[1] > side.held()[0]).any()) for side in (q, k)) else None
