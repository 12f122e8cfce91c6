"""Terms with one block list for all heads, over the active tokens of all segments of a branch.

A token is active for a head if its place in the segment, modulo the dilation rate, is the head's offset.

For engines whose kernels take only block lists: a branch has one term for all heads whose rules differ only by their
offset, at every sequence length, and for any number of runs of consecutive positions on a device.
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
from ...core import And, Bound, Every, MaskMod, Pattern, Ranges, device_kind, index_dtype
from ...orders import ActivePositions, Padded, Placement
from ...patterns import Band, Causal, Dilated
from ._layouts import split_dilated
from ._term import Term

# H heads, T tables, F segments, S slots, Q of queries, K of keys, R rows of blocks (in a segment), C columns


class SharedListTerm(Term):
    """Term whose heads share one block list.

    The list has the blocks in which any head has pairs; a block is full if it is full for all heads.
    """

    @cached_property
    def listed_blocks(self) -> ListedBlocks:
        """Number of computed blocks over all heads: full ones as `plain`, partial ones as `masked`; `runs` is 0."""
        found = cast(Any, self.in_blocks_of(self.block_side, self.block_side))._full_and_partial(
            self.block_side, self.block_side
        )
        full, partial = (int(each.sum()) * len(self.heads) for each in found)
        return ListedBlocks(0, full, partial)

    def pairs_of_heads(self) -> Int64[Tensor, " H"]:
        """Return the number of allowed pairs of each head, not multiplied by the term's multiplicity."""
        raise NotImplementedError  # defined by each kind of term

    def counted_pairs(self) -> int:
        return self.multiplicity * int(self.pairs_of_heads().sum())

    def tables(self) -> tuple[int, ...]:
        return (0,) * len(self.heads)

    def hidden(self) -> tuple[Bool[Tensor, "1 H S"] | None, Bool[Tensor, "1 H S"] | None]:
        """Return masks (queries, keys), True at slots with a token in no allowed pair; None for a mask without True."""
        raise NotImplementedError

    def blocks(self, q_block: int, k_block: int, *, settle: bool = True) -> Blocks:
        """Return the block list over all slots; the segments of a `PaddedTerm` must be whole blocks of these sizes.

        settle: not used, as full and partial blocks are known exactly.
        """
        full, partial = self._full_and_partial(q_block, k_block)
        segment, row, column = (full | partial).nonzero().unbind(1)
        rows, columns = full.shape[1:]
        table = torch.zeros(len(row), dtype=torch.int32)
        places = (segment * rows + row).int(), (segment * columns + column).int()
        unknown, shape = torch.full_like(table, UNKNOWN), (self.q.num_slots, self.k.num_slots, q_block, k_block)
        return Blocks(*shape, self.tables(), table, *places, full[segment, row, column], unknown)

    def _full_and_partial(self, q_block: int, k_block: int) -> tuple[Bool[Tensor, "F R C"], Bool[Tensor, "F R C"]]:
        """Return masks (full, partial) of the blocks of each segment; an order without segments is one segment."""
        raise NotImplementedError


class PaddedTerm(SharedListTerm):
    """Pairs of active tokens of the same dilated segment: all pairs, or causal ones; segments are padded to blocks.

    In a full block, for all heads, each key slot has a token, and each query attends to all of these keys.
    """

    q: Padded  # pyright: ignore[reportIncompatibleVariableOverride]
    k: Padded  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def is_causal(self) -> bool:
        return isinstance(self.rule, Causal)

    def in_blocks_of(self, q_block: int, k_block: int) -> PaddedTerm:
        side = lcm(q_block, k_block)
        return replace(self, q=self.q.in_blocks_of(side), k=self.k.in_blocks_of(side))

    def pairs_of_heads(self) -> Int64[Tensor, " H"]:
        (q_first, q_past), (k_first, k_past) = self.q.filled_slots(), self.k.filled_slots()
        keys = k_past - k_first
        if not self.is_causal:
            return ((q_past - q_first) * keys).sum(1)

        def before(place: Int64[Tensor, "H F"]) -> Int64[Tensor, "H F"]:
            """Return the number of causal pairs that the slots before `place` would have if each held a query."""
            growing = (place - k_first).clamp(min=0).minimum(keys)
            return growing * (growing + 1) // 2 + keys * (place - k_past).clamp(min=0)

        return (before(q_past) - before(q_first)).sum(1)

    def moved(self, q_tokens: int, k_tokens: int) -> PaddedTerm:
        q, k = self.q.moved(q_tokens), self.k.moved(k_tokens)
        return replace(self, q=q, k=k, q_offset=self.q_offset - q_tokens, k_offset=self.k_offset - k_tokens)

    def _full_and_partial(self, q_block: int, k_block: int) -> tuple[Bool[Tensor, "F R C"], Bool[Tensor, "F R C"]]:
        (q_first, q_past), (k_first, k_past) = self.q.filled_slots(), self.k.filled_slots()
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
        (q_first, q_past), (k_first, k_past) = self.q.filled_slots(), self.k.filled_slots()
        no_queries, no_keys = q_first >= q_past, k_first >= k_past
        lonely_q = torch.where(no_keys, q_past, k_first.minimum(q_past) if self.is_causal else q_first)
        lonely_k = torch.where(no_queries, k_first, q_past.maximum(k_first) if self.is_causal else k_past)
        queries = self._mask_of_slots(q_first, lonely_q, self.q)
        return queries, self._mask_of_slots(lonely_k, k_past, self.k)

    @staticmethod
    def _mask_of_slots(
        first: Int64[Tensor, "H F"], past: Int64[Tensor, "H F"], order: Padded
    ) -> Bool[Tensor, "1 H S"] | None:
        if bool((first >= past).all()):
            return None
        slot = torch.arange(order.num_slots)
        segment = (slot // order.width).clamp(max=order.num_segments - 1)
        place = slot - segment * order.width
        return ((place >= first[:, segment]) & (place < past[:, segment]))[None]

    def mask_mod(self, device: torch.device) -> MaskMod:
        """Return a FlexAttention mask_mod (b, h, q slot, k slot) -> bool; h is an index into the term's heads.

        It may be True for a query slot without a token.
        """
        (first, past), width = self.k.filled_slots(), self.k.width
        last = self.k.num_segments - 1
        each = (torch.tensor([self.k.segment - offset for offset in self.k.offsets]) + self.k.step - 1) // self.k.step
        dtype = index_dtype(device, 0, (last + 2) * width)
        limits = (first[:, 0], each, last * width + past[:, last])
        # On accelerators a constant of the kernel, which is compiled for these segments anyway.
        size = width if device_kind(device).flex_trains else torch.tensor(width)
        return _segment_mask_mod(
            size, *(limit.to(device, dtype).contiguous() for limit in limits), is_causal=self.is_causal
        )


def _segment_mask_mod(
    width: Tensor | int,
    begins: Int64[Tensor, " H"],
    counts: Int64[Tensor, " H"],
    ends: Int64[Tensor, " H"],
    *,
    is_causal: bool,
) -> MaskMod:
    """Return a mask_mod that allows the key slots with tokens in the query's segment; if `is_causal`, only k <= q.

    width: slots of a segment.
    begins, ends: for each head, key slots: no slot before `begins`, and none from `ends` on, has a token.
    counts: for each head, the number of key slots with tokens in a whole segment.
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
    """Return a term for each group of heads with equal segment, rate and inner rule; None if any head's does not fit.

    A head's rule must be dilated segments of rate above 1, with all pairs or causal order inside. Let w be the number
    of active tokens of a segment, rounded up to whole blocks of `side` slots: 2 * w**2 must be at most segment**2, so
    that blocks have at most half of a segment's pairs.

    Groups without an active query or key have no term; heads whose offset is beyond the segment are in no group.
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
        sides = _padded_orders(tuple(offset for _, offset in members), segment, rate, bound)
        if sides is not None:
            heads = tuple(head for head, _ in members)
            terms.append(PaddedTerm.of(bound, rest, "blocks", multiplicity, *cast(Any, sides), heads=heads))
    return terms


_LEAST_SEGMENT = 1 << 20  # shorter segments are not cut, so that graphs compiled for all lengths share these numbers


def _padded_orders(offsets: tuple[int, ...], segment: int, rate: int, bound: Bound) -> tuple[Padded, Padded] | None:
    """Return (query order, key order) of the segments that have both queries and keys.

    None if no head has an active query in them, or no head an active key.

    offsets: dilation offset of each head.
    """
    begins = bound.q_offset, bound.k_offset
    ends = begins[0] + bound.num_queries, begins[1] + bound.num_keys
    first, past = max(begins) // segment, (min(ends) - 1) // segment + 1
    if first >= past:
        return None
    start, stop = first * segment, past * segment
    if past == first + 1:  # lists cover whole segments: cut a single one to existing tokens
        segment = min(segment, max(_LEAST_SEGMENT, 1 << (max(ends) - start - 1).bit_length()))
    q, k = (
        Padded(
            offsets, rate, segment, -(-segment // rate), start - begin, max(0, start - begin), min(end, stop) - begin,
        )
        for begin, end in zip(begins, ends, strict=True)
    )  # fmt: skip
    # Nothing to compute if a side has no active token.
    return (q, k) if all(bool((side.filled_slots()[1] > side.filled_slots()[0]).any()) for side in (q, k)) else None


class IntervalTerm(SharedListTerm):
    """Term in which the query in each slot attends to one interval of key slots.

    Slots hold the positions of an `ActivePositions`, ascending. The index of a token is its position in the whole
    sequence, not its place in q or k; so q_offset and k_offset are 0.
    """

    q: ActivePositions  # pyright: ignore[reportIncompatibleVariableOverride]
    k: ActivePositions  # pyright: ignore[reportIncompatibleVariableOverride]

    @cached_property
    def limits(self) -> tuple[Int64[Tensor, "T Q"], Int64[Tensor, "T Q"]]:
        """(low, high): the query in a slot attends to key slots low to high - 1, to none if low == high.

        Axis T has the lists of `q.positions` and `k.positions`, each for one or more heads.
        """
        queries, keys = self.q.positions, self.k.positions
        first, past = _key_interval(self.rule.factors(), queries)
        known = torch.where(keys < 0, torch.iinfo(torch.int64).max, keys)
        low, high = (torch.searchsorted(known, each.contiguous()) for each in (first, past))
        return low, torch.where(queries < 0, low, high.maximum(low))

    def in_blocks_of(self, q_block: int, k_block: int) -> IntervalTerm:
        return replace(self, q=self.q.in_blocks_of(q_block), k=self.k.in_blocks_of(k_block))

    def pairs_of_heads(self) -> Int64[Tensor, " H"]:
        low, high = self.limits
        return (high - low).sum(1)[list(self.q.rows)]

    def _full_and_partial(self, q_block: int, k_block: int) -> tuple[Bool[Tensor, "1 R C"], Bool[Tensor, "1 R C"]]:
        low, high = self.limits
        rows, columns = -(-low.shape[1] // q_block), -(-self.k.num_slots // k_block)
        some = high > low
        row = torch.arange(low.shape[1]).expand_as(low)[some] // q_block
        # A query touches the blocks from that of `low` to that of `high` - 1: +1 where they begin, -1 after their end.
        touched = torch.zeros(rows, columns + 1, dtype=torch.int32)
        one = torch.ones_like(row, dtype=torch.int32)
        touched.index_put_((row, low[some] // k_block), one, accumulate=True)
        touched.index_put_((row, (high[some] - 1) // k_block + 1), -one, accumulate=True)
        # A block is full if it begins at or after `low`, and ends at or before `high`, of every query.
        latest = torch.zeros(rows * q_block, dtype=torch.int64)
        latest[: low.shape[1]] = low.amax(0)
        soonest = torch.zeros(rows * q_block, dtype=torch.int64)  # 0 beyond the last slot: no block is full there
        soonest[: low.shape[1]] = high.amin(0)
        latest, soonest = latest.view(rows, -1).amax(1), soonest.view(rows, -1).amin(1)
        begin = torch.arange(columns) * k_block
        full = (begin >= latest[:, None]) & (begin + k_block <= soonest[:, None])
        return full[None], ((touched.cumsum(1)[:, :-1] > 0) & ~full)[None]

    def hidden(self) -> tuple[Bool[Tensor, "1 H Q"] | None, Bool[Tensor, "1 H K"] | None]:
        low, high = self.limits
        steps = torch.zeros(len(low), self.k.num_slots + 1, dtype=torch.int64)
        one = (high > low).long()  # +1 where a query's keys begin, -1 after their end; the sum counts queries of a key
        seen = steps.scatter_add(1, low, one).scatter_add(1, high, -one).cumsum(1)[:, :-1]
        found = (low == high) & (self.q.positions >= 0), (seen == 0) & (self.k.positions >= 0)
        rows = list(self.q.rows)
        queries, keys = (side[None, rows] if bool(side.any()) else None for side in found)
        return queries, keys

    def mask_mod(self, device: torch.device) -> MaskMod:
        dtype = index_dtype(device, 0, self.k.num_slots)
        rows = torch.tensor(self.q.rows, dtype=dtype, device=device)
        return _interval_mask_mod(rows, *(limit.to(device, dtype) for limit in self.limits))


def _interval_mask_mod(rows: Int64[Tensor, " H"], low: Int64[Tensor, "T Q"], high: Int64[Tensor, "T Q"]) -> MaskMod:
    def seen(b, h, q, k):
        row = rows[h]
        return (low[row, q] <= k) & (k < high[row, q])

    return seen


def interval_terms(branch: Pattern, multiplicity: int, bound: Bound, placement: Placement) -> list[Term] | None:
    """Return one term for each group of heads with equal segments, rates and rule; None if a head's rule does not fit.

    A head's rule must be an intersection of bands (intervals of key position - query position) and of dilated segments,
    at most one of which has a rate above 1.

    placement: positions of the device's queries and keys.

    Terms without an allowed pair are left out.
    """
    groups: dict[tuple[Pattern, int, int], dict[int, tuple[int, Ranges]]] = {}
    of_head = placement.keys
    for head in range(bound.num_heads):
        factors = branch.for_head(head + bound.head_offset, bound.num_heads_global).factors()
        sparse = [each for each in factors if isinstance(each, Dilated) and each.rate > 1]
        if len(sparse) > 1 or not all(map(_fits_interval_term, factors)):
            return None
        base = sparse[0] if sparse else Dilated(1, 1, 0)
        assert isinstance(base.offset, int), "a rule for one head has its offset resolved"
        # With the active tokens selected, a dilated factor reduces to its segments.
        left = And.of(*(Dilated(base.segment, 1, 0) if each == base else each for each in factors))
        row = base.offset, of_head[head * len(of_head) // bound.num_heads]
        groups.setdefault((left, base.segment, base.rate), {})[head] = row
    terms: list[Term] = []
    for (rule, segment, rate), row_of in groups.items():
        rows = tuple(dict.fromkeys(row_of.values()))
        where = tuple(map(rows.index, row_of.values())), rate, segment
        offsets, runs = zip(*rows, strict=True)
        sides = (
            ActivePositions(offsets, (placement.queries,) * len(rows), *where),
            ActivePositions(offsets, runs, *where),
        )
        term = IntervalTerm.of(bound, rule, "blocks", multiplicity, *cast(Any, sides), heads=tuple(row_of))
        if term.counted_pairs():
            terms.append(term)
    return terms


def _fits_interval_term(factor: Pattern) -> bool:
    return isinstance(factor, Dilated | Every) or (isinstance(factor, Band) and factor.step == 1)


def _key_interval(factors: tuple[Pattern, ...], query: Int64[Tensor, "H Q"]) -> tuple[Tensor, Tensor]:
    """Return (first, past): all factors allow a query position to attend to key positions first to past - 1.

    They allow it no key if past <= first.
    """
    first, past = torch.zeros_like(query), torch.full_like(query, torch.iinfo(torch.int64).max)
    for factor in factors:
        if isinstance(factor, Dilated):
            begin = query - query % factor.segment
            first, past = first.maximum(begin), past.minimum(begin + factor.segment)
        elif isinstance(factor, Band):
            first = first if factor.least is None else first.maximum(query + factor.least)
            past = past if factor.most is None else past.minimum(query + factor.most + 1)
    return first, past
