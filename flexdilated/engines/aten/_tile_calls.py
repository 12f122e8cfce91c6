"""Grouping of block lists into batched kernel calls.

A block list has the key blocks of one query block, or of consecutive ones that were joined. A problem is dense
attention of these queries over their keys, possibly with a mask; a kernel call batches problems of equal shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ...masks.blocks import BlockPlaces, Blocks, Rule, dense_masks
from ...masks.planning import Term
from .._operands import HiddenSlots, additive_mask, distinct_masks, hidden_slots, random_numbers

# X heads or folds, S slots, n ranges of slots (one for each problem), L slots in a range or blocks in a list
# E listed blocks, m block lists, U distinct masks


@dataclass(frozen=True)
class EvenRanges:
    """Evenly spaced ranges of tokens: range i is `length` tokens from start + i * step on, for i below `count`.

    Ranges may overlap; with step 0 all are equal.
    """

    start: int
    step: int
    count: int
    length: int

    def select(self, begin: int, end: int) -> EvenRanges:
        return replace(self, start=self.start + begin * self.step, count=min(end, self.count) - begin)

    def of(self, x: Shaped[Tensor, "X S ..."]) -> Shaped[Tensor, "X n L ..."]:
        """Return a view of x with the tokens of each range, n = count, L = length; ranges may share memory."""
        if self.step == 0:
            one = x[:, None, self.start : self.start + self.length]
            return one.expand(-1, self.count, *one.shape[2:])
        return x[:, self.start :].unfold(1, self.length, self.step)[:, : self.count].movedim(-1, 2)

    def put(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Copy part[:, i] to range i of x, in place; ranges must not overlap."""
        self.of(x).copy_(part)

    def add(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Add part[:, i] to range i of x, in place; where ranges overlap, all are summed."""
        if self.step == 0:
            x[:, self.start : self.start + self.length].add_(part.sum(1))
            return
        # Pieces of at most `step` slots at one offset in every range do not overlap.
        for begin in range(0, self.length, self.step):
            width = min(self.step, self.length - begin)
            piece = EvenRanges(self.start + begin, self.step, self.count, width)
            piece.of(x).add_(part[:, :, begin : begin + width])


@dataclass(frozen=True)
class BlockRanges:
    """Lists of blocks: range i is the tokens of the blocks blocks[i], concatenated and cut off at `length` tokens.

    Block j is the `side` tokens from j * side on.
    """

    blocks: Int[Tensor, "n L"]
    side: int
    length: int

    def select(self, begin: int, end: int) -> BlockRanges:
        return replace(self, blocks=self.blocks[begin:end])

    def of(self, x: Shaped[Tensor, "X S ..."]) -> Shaped[Tensor, "X n L ..."]:
        """Return the tokens of each range, gathered from x; every listed block must be complete in x."""
        picked = self._in_blocks(x).index_select(1, self.blocks.flatten())
        return picked.unflatten(1, self.blocks.shape).flatten(2, 3)[:, :, : self.length]

    def put(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Copy part[:, i], which must be whole blocks, to range i of x, in place; no block may be listed twice."""
        self._in_blocks(x).index_copy_(1, self.blocks.flatten().long(), self._in_blocks(part.flatten(1, 2)).to(x.dtype))

    def add(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Add part[:, i] to range i of x, in place; a block in several ranges gets the sum."""
        missing = self.blocks.shape[1] * self.side - self.length
        if missing:  # index_add_ takes whole blocks, and the last listed one may be cut off at `length`
            dims_after = part.dim() - 3
            part = pad(part, (0, 0) * dims_after + (0, missing))
        self._in_blocks(x).index_add_(1, self.blocks.flatten(), self._in_blocks(part.flatten(1, 2)).to(x.dtype))

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Return a view of x (X, S, ...) as (X, blocks, side, ...), without an incomplete last block."""
        return x[:, : x.shape[1] // self.side * self.side].unflatten(1, (-1, self.side))


TokenRanges = EvenRanges | BlockRanges


def even_ranges(starts: list[int] | Tensor, length: int) -> EvenRanges | None:
    """Return ranges of `length` tokens that begin at `starts`; None if the starts descend or are not evenly spaced."""
    begins = torch.as_tensor(starts).long()
    gaps = begins.diff().unique()
    if len(gaps) > 1 or (len(gaps) and int(gaps) < 0):
        return None
    # A single range has no gap; its length serves as the step.
    return EvenRanges(int(begins[0]), int(gaps) if len(gaps) else length, len(begins), length)


_MAX_JOINED_SLOTS = 1024  # taller problems gain no speed and split badly over threads
_LEAST_PAIRS = 1 << 20  # smallest call worth its overhead: milliseconds of kernel time for 100 us of Python


@dataclass(frozen=True)
class KernelCall:
    """Batch of n attention problems of equal shape: problem i is query range i over key range i.

    table: index of the block table that the problems are part of; heads with equal rules share one.
    row: first query block of each problem.
    columns: key blocks of each problem.
    masks: for each block, index of its mask in `KernelCalls.masks`; one row (m = 1) if all problems have equal masks,
        else m = n; None if every pair is allowed.
    """

    table: int
    row: Int64[Tensor, " n"]
    columns: Int32[Tensor, "n L"]
    queries: TokenRanges
    keys: TokenRanges
    masks: Int32[Tensor, "m L"] | None

    @property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs that one problem computes, masked ones included."""
        return self.queries.length * self.keys.length

    def parts(self, at_once: int) -> Iterator[KernelCall]:
        """Yield calls of at most `at_once` problems each, which together have the problems of this call."""
        for begin in range(0, len(self.row), at_once):
            end = begin + at_once
            own_masks = self.masks is not None and len(self.masks) > 1
            yield KernelCall(
                self.table, self.row[begin:end], self.columns[begin:end],
                self.queries.select(begin, end), self.keys.select(begin, end),
                self.masks[begin:end] if own_masks and self.masks is not None else self.masks,
            )  # fmt: skip


@dataclass(frozen=True)
class KernelCalls:
    """Kernel calls that together compute attention under a block-sparse mask.

    rule: the mask as a function of query and key slots.
    shape: (query slots, key slots, queries of a block, keys of a block).
    heads: for each table, its heads.
    complete: True if every query is in a problem.
    key_slots: number of slots to which keys must be padded.
    masks: the U distinct masks of blocks, an all-True one first; None if they are too large to keep and are evaluated
        for each call.
    hidden: queries that attend to no key and keys that no query attends to, in the listed blocks.
    """

    rule: Rule
    shape: tuple[int, int, int, int]
    heads: tuple[tuple[int, ...], ...]
    calls: tuple[KernelCall, ...]
    complete: bool
    key_slots: int
    masks: Bool[Tensor, "U q_block k_block"] | None
    hidden: HiddenSlots

    @property
    def nbytes(self) -> int:
        numbers = (x for call in self.calls for x in (call.row, call.columns, call.masks))
        return sum(x.nbytes for x in (*numbers, self.masks, self.hidden) if x is not None)

    def mask_of(self, call: KernelCall, dtype: torch.dtype) -> Float[Tensor, "m Q K"] | None:
        """Return the additive masks (0 or -inf) of a call's n problems; None if every pair is allowed.

        m = n, or m = 1 if all problems have equal masks.
        """
        if call.masks is None:
            return None
        if self.masks is None:
            tiles, which = self._block_masks(call), torch.arange(call.masks.numel())
        else:
            distinct, which = call.masks.flatten().unique(return_inverse=True)
            tiles = self.masks[distinct]
        which = which.view(call.masks.shape)
        # For each query row the blocks of a list are gathered in sequence, so one copy gives the layout of the mask.
        rows = which[:, None] * tiles.shape[1] + torch.arange(call.queries.length)[:, None]
        mask = additive_mask(tiles, dtype).flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape[:2], -1)
        return mask[:, :, : call.keys.length]

    def _block_masks(self, call: KernelCall) -> Tensor:
        length = call.columns.shape[1]
        row = call.row.repeat_interleave(length)
        places = BlockPlaces(torch.full_like(row, call.table), row, call.columns.flatten())
        return torch.cat(list(dense_masks(self.rule, places, self.shape)))


def plan_calls(term: Term, blocks: Blocks) -> KernelCalls:
    """Return the kernel calls that compute a term from its non-empty blocks, with their masks."""
    rule = term.table_rule()
    ids, masks = distinct_masks(rule, blocks)
    lists = _join_query_blocks(_block_lists(blocks, ids, masks_kept=masks is not None), blocks)
    calls = list(_batched_calls(lists, blocks, ids))
    complete = int(lists.num_queries.sum()) == blocks.num_tables * blocks.num_q_slots
    listed = (call.keys for call in calls if isinstance(call.keys, BlockRanges))
    cut = any(keys.length < keys.blocks.shape[1] * keys.side for keys in listed)
    key_slots = blocks.num_columns * blocks.k_block if cut else blocks.num_k_slots
    heads = tuple(
        tuple(head for head, own in enumerate(blocks.heads) if own == table) for table in range(blocks.num_tables)
    )
    hidden = hidden_slots(rule, blocks, ids, masks)
    return KernelCalls(rule, blocks.shape, heads, tuple(calls), complete, key_slots, masks, hidden)


@dataclass(frozen=True)
class _BlockLists:
    """The m non-empty block lists of a `Blocks`: the key blocks of one query block, or of several that were joined.

    A list's key blocks are `length` consecutive blocks of the `Blocks`, from index `begin` on.

    table, row: index of the list's block table, and its first query block.
    num_queries, num_keys: number of tokens.
    masked: True if a block is only partly allowed.
    code: fingerprint of the list's masks, equal for lists of equal length with equal masks, or unique to each list if
        masks are too large to keep; 0 if not masked.
    """

    table: Int64[Tensor, " m"]
    row: Int64[Tensor, " m"]
    begin: Int64[Tensor, " m"]
    length: Int64[Tensor, " m"]
    num_queries: Int64[Tensor, " m"]
    num_keys: Int64[Tensor, " m"]
    masked: Bool[Tensor, " m"]
    code: Int64[Tensor, " m"]

    def select(self, index: Tensor) -> _BlockLists:
        return _BlockLists(*(getattr(self, field.name)[index] for field in fields(self)))


def _block_lists(blocks: Blocks, ids: Int64[Tensor, " E"], *, masks_kept: bool) -> _BlockLists:
    found, length = (blocks.table.long() * blocks.num_rows + blocks.row).unique_consecutive(return_counts=True)
    row, begin = found % blocks.num_rows, length.cumsum(0) - length
    masked = _sum_by_list((~blocks.full).long(), length) > 0
    num_queries = (blocks.num_q_slots - row * blocks.q_block).clamp(max=blocks.q_block)
    last = blocks.column[begin + length - 1].long()
    short = ((last + 1) * blocks.k_block - blocks.num_k_slots).clamp(min=0)
    code = _mask_fingerprints(ids, length) if masks_kept else torch.arange(len(row))
    num_keys = length * blocks.k_block - short
    return _BlockLists(found // blocks.num_rows, row, begin, length, num_queries, num_keys, masked, code * masked)


def _mask_fingerprints(ids: Int64[Tensor, " E"], length: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    """Return a 64-bit fingerprint of each list of mask indices.

    Two unequal lists of equal length have equal fingerprints with a probability of at most 2^-57.

    ids: mask indices of all lists, concatenated.
    length: number of indices in each list.
    """
    if not len(ids):
        return length
    place = torch.arange(len(ids)) - (length.cumsum(0) - length).repeat_interleave(length)
    numbers = random_numbers((int(ids.max()) + 1 + int(length.max()),))
    # Random factors for places as well as for ids: regular factors would give unequal lists equal sums.
    of_place, of_id = numbers.split([int(length.max()), int(ids.max()) + 1])
    return _sum_by_list(of_place[place] * of_id[ids], length)


def _join_query_blocks(lists: _BlockLists, blocks: Blocks) -> _BlockLists:
    """Return the lists, with those of consecutive query blocks joined if they have equal key blocks and no mask.

    A joined list has at most _MAX_JOINED_SLOTS queries.
    """
    numbers = random_numbers((blocks.num_columns,))
    contents = _sum_by_list(numbers[blocks.column.long()], lists.length)
    follows = torch.zeros_like(lists.masked)
    follows[1:] = (
        ~(lists.masked[1:] | lists.masked[:-1])
        & (lists.table[1:] == lists.table[:-1])
        & (lists.row[1:] == lists.row[:-1] + 1)
        & (lists.length[1:] == lists.length[:-1])
        & (contents[1:] == contents[:-1])
    )
    index = torch.arange(len(follows))
    since = index - torch.where(follows, 0, index).cummax(0).values if len(index) else index
    starts = (since % max(1, _MAX_JOINED_SLOTS // blocks.q_block) == 0).nonzero().squeeze(1)
    heights = torch.diff(starts, append=torch.tensor([len(index)]))
    joined = lists.select(starts)
    return replace(joined, num_queries=torch.where(heights > 1, heights * blocks.q_block, joined.num_queries))


def _sum_by_list(values: Int64[Tensor, " E"], length: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    sums = torch.zeros(len(length), dtype=torch.int64)
    return sums.index_add_(0, torch.repeat_interleave(length), values)


def _batched_calls(lists: _BlockLists, blocks: Blocks, ids: Int64[Tensor, " E"]) -> Iterator[KernelCall]:
    """Yield kernel calls that together compute all block lists; each batches lists of one table and of equal sizes.

    First come groups of lists with equal masks, which share one mask tensor, if a group is large enough for its own
    call; then all other lists.

    ids: mask index of each listed block.
    """
    shape = [lists.table, lists.num_queries, lists.length, lists.num_keys, lists.masked.long()]
    left = torch.arange(len(lists.row))
    for key in ([*shape, lists.code], shape):
        last, others = key is shape, []
        for group in _equal_rows(torch.stack(key, 1)[left]):
            group = left[group]
            pairs = int(lists.num_queries[group[0]] * lists.num_keys[group[0]])
            least = 1 if last else -(-_LEAST_PAIRS // pairs)
            if len(group) < least:
                others.append(group)
                continue
            chosen = lists.select(group)
            columns = blocks.column[chosen.begin[:, None] + torch.arange(int(chosen.length[0]))]
            for some in _even_sequences(chosen.row, columns, -(-_LEAST_PAIRS // pairs)):
                if len(some) < least:
                    others.append(group[some])
                else:
                    yield _kernel_call(chosen.select(some), columns[some], blocks, ids)
        left = torch.cat(others).sort().values if others else left[:0]


def _equal_rows(key: Int64[Tensor, "n c"]) -> tuple[Int64[Tensor, " g"], ...]:
    """Return, for each distinct row of a matrix, the ascending indices of the rows that are equal to it."""
    if not len(key):
        return ()
    _, group, sizes = key.unique(dim=0, return_inverse=True, return_counts=True)
    return group.argsort(stable=True).split(sizes.tolist())


def _even_sequences(
    row: Int64[Tensor, " n"], columns: Int32[Tensor, "n L"], least: int
) -> Iterator[Int64[Tensor, " m"]]:
    """Yield indices of problems: of each sequence with evenly spaced queries and keys, then of all other problems.

    row, columns: first query block, and key blocks, of each problem; query blocks ascend.

    A sequence has at least `least` problems, each with consecutive key blocks, so it can be read as strided views.
    """
    # Example: query blocks 0 1 2 5 7 9, all over the same consecutive key blocks, are the sequences 0 1 2, 5 and 7 9.
    first = columns[:, 0].long()
    unbroken = columns[:, -1].long() - first == columns.shape[1] - 1
    # For each of the n - 1 gaps between neighbours: distances of queries and of keys; True if a view can cross it.
    gap = torch.stack([row.diff(), first.diff()], 1)
    steady = unbroken[1:] & unbroken[:-1] & (gap[:, 1] >= 0)
    # changes[i]: gap i differs from gap i - 1, or there is no such gap.
    changes = torch.ones(len(gap) + 1, dtype=torch.bool)
    changes[1:-1] = ~(steady[1:] & steady[:-1] & (gap[1:] == gap[:-1]).all(1))
    # For each of the n problems: the sequence of the gap after it, and that of the gap before it. The gap before it
    # decides; without a steady gap before it, the gap after it does.
    after = changes.cumsum(0)
    before = torch.cat([torch.tensor([0]), after[:-1]])
    no_before, some_after = torch.cat([torch.tensor([True]), ~steady]), torch.cat([steady, torch.tensor([False])])
    sequence_of = torch.where(no_before & some_after, after, before)
    _, sizes = sequence_of.unique_consecutive(return_counts=True)
    others = []
    for sequence in torch.arange(len(row)).split(sizes.tolist()):
        if len(sequence) >= least and unbroken[sequence].all():
            yield sequence
        else:
            others.append(sequence)
    if others:
        yield torch.cat(others)


def _kernel_call(
    chosen: _BlockLists, columns: Int32[Tensor, "n L"], blocks: Blocks, ids: Int64[Tensor, " E"]
) -> KernelCall:
    length, height, width = (int(x[0]) for x in (chosen.length, chosen.num_queries, chosen.num_keys))
    unbroken = bool((columns[:, -1] - columns[:, 0] == length - 1).all())
    queries: TokenRanges | None = even_ranges(chosen.row * blocks.q_block, height)
    keys: TokenRanges | None = even_ranges(columns[:, 0].long() * blocks.k_block, width) if unbroken else None
    if queries is None:
        rows = chosen.row[:, None] + torch.arange(-(-height // blocks.q_block))
        queries = BlockRanges(rows, blocks.q_block, height)
    if keys is None:
        keys = BlockRanges(columns, blocks.k_block, width)
    masks = None
    if bool(chosen.masked[0]):
        begin = chosen.begin[:1] if len(chosen.code.unique()) == 1 else chosen.begin
        masks = ids[begin[:, None] + torch.arange(length)].int()
    return KernelCall(int(chosen.table[0]), chosen.row, columns, queries, keys, masks)
