"""Block lists as kernel calls: a tile of query slots against its keys is a problem, equal problems are one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ...masks.blocks import Blocks, Places, Rule, evaluate
from ...masks.planning import Term
from .._distinct_masks import added, distinct_masks, random_numbers
from .._operands import Hidden, hidden_slots

# X heads or folds, S slots, n stretches, L slots in a stretch or blocks in a list
# n problems (a block row of a table each), L blocks in a list, U distinct masks


@dataclass(frozen=True)
class Even:
    """Stretch i holds the slots from start + i * step on; stretches may overlap, and with step 0 are the same."""

    start: int
    step: int
    count: int
    length: int

    def select(self, begin: int, end: int) -> Even:
        return replace(self, start=self.start + begin * self.step, count=min(end, self.count) - begin)

    def of(self, x: Shaped[Tensor, "X S ..."]) -> Shaped[Tensor, "X n L ..."]:
        """The stretches, as a view of x."""
        if self.step == 0:
            one = x[:, None, self.start : self.start + self.length]
            return one.expand(-1, self.count, *one.shape[2:])
        return x[:, self.start :].unfold(1, self.length, self.step)[:, : self.count].movedim(-1, 2)

    def put(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Write stretches that do not overlap, in place."""
        self.of(x).copy_(part)

    def add(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Add the stretches onto the slots of x, in place."""
        if self.step == 0:
            x[:, self.start : self.start + self.length].add_(part.sum(1))
            return
        # Pieces of one step's length from the same place of each stretch do not overlap.
        for begin in range(0, self.length, self.step):
            width = min(self.step, self.length - begin)
            piece = Even(self.start + begin, self.step, self.count, width)
            piece.of(x).add_(part[:, :, begin : begin + width])


@dataclass(frozen=True)
class Listed:
    """Stretch i is the blocks[i] of `side` slots one after the other, cut off at `length` slots."""

    blocks: Int[Tensor, "n L"]
    side: int
    length: int

    def select(self, begin: int, end: int) -> Listed:
        return replace(self, blocks=self.blocks[begin:end])

    def of(self, x: Shaped[Tensor, "X S ..."]) -> Shaped[Tensor, "X n L ..."]:
        """The stretches, gathered; listed blocks must be whole in x."""
        picked = self._cut(x).index_select(1, self.blocks.flatten())
        return picked.unflatten(1, self.blocks.shape).flatten(2, 3)[:, :, : self.length]

    def put(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Write stretches that do not overlap, in place."""
        self._cut(x).index_copy_(1, self.blocks.flatten().long(), self._cut(part.flatten(1, 2)).to(x.dtype))

    def add(self, x: Shaped[Tensor, "X S ..."], part: Shaped[Tensor, "X n L ..."]) -> None:
        """Add the stretches onto the slots of x, in place."""
        missing = self.blocks.shape[1] * self.side - self.length
        if missing:
            part = pad(part, (0,) * (2 * part.dim() - 6) + (0, missing))
        self._cut(x).index_add_(1, self.blocks.flatten(), self._cut(part.flatten(1, 2)).to(x.dtype))

    def _cut(self, x: Tensor) -> Tensor:
        """Slots by block: one entry of an index moves a whole block."""
        return x[:, : x.shape[1] // self.side * self.side].unflatten(1, (-1, self.side))


Stretches = Even | Listed


def evenly(starts: list[int] | Tensor, length: int) -> Even | None:
    """The stretches from these starts on, if they are evenly spaced and none comes before its predecessor."""
    begins = torch.as_tensor(starts).long()
    gaps = begins.diff().unique()
    if len(gaps) > 1 or (len(gaps) and int(gaps) < 0):
        return None
    # A single stretch is its own next.
    return Even(int(begins[0]), int(gaps) if len(gaps) else length, len(begins), length)


_MAX_JOINED_SLOTS = 1024  # taller problems gain no speed and split badly over threads
_LEAST_PAIRS = 1 << 20  # a call that pays for itself: some milliseconds of a kernel, beside 100 us of Python


@dataclass(frozen=True)
class Call:
    """n problems of one shape in a table: a stretch of query slots against a stretch of key slots each.

    `row` and `columns` are the blocks they are made of. `masks` picks a mask for each block, in one row where all
    problems have the same; None: every pair.
    """

    table: int
    row: Int64[Tensor, " n"]
    columns: Int32[Tensor, "n L"]
    queries: Stretches
    keys: Stretches
    masks: Int32[Tensor, "m L"] | None

    @property
    def num_pairs(self) -> int:
        """Pairs that a problem computes."""
        return self.queries.length * self.keys.length

    def parts(self, at_once: int) -> Iterator[Call]:
        """The same in calls of at most so many problems."""
        for begin in range(0, len(self.row), at_once):
            end = begin + at_once
            own_masks = self.masks is not None and len(self.masks) > 1
            yield Call(
                self.table, self.row[begin:end], self.columns[begin:end],
                self.queries.select(begin, end), self.keys.select(begin, end),
                self.masks[begin:end] if own_masks and self.masks is not None else self.masks,
            )  # fmt: skip


@dataclass(frozen=True)
class Calls:
    """All calls of a block list of this shape: query slots, key slots, query side of a block, key side.

    `heads` gives the heads of each table. `complete`: every query is in a problem. `key_slots`: how many the keys
    must be padded to. `masks[0]` is the mask of a full block; None where masks would not fit. `hidden` are the slots
    that a call reads although they take part in no pair.
    """

    rule: Rule
    shape: tuple[int, int, int, int]
    heads: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    complete: bool
    key_slots: int
    masks: Bool[Tensor, "U q_block k_block"] | None
    hidden: Hidden

    @property
    def nbytes(self) -> int:
        numbers = (x for call in self.calls for x in (call.row, call.columns, call.masks))
        return sum(x.nbytes for x in (*numbers, self.masks, self.hidden) if x is not None)

    def mask_of(self, call: Call, dtype: torch.dtype) -> Float[Tensor, "m Q K"] | None:
        """What is added to the scores of each problem, or of all; None for nothing."""
        if call.masks is None:
            return None
        if self.masks is None:
            tiles, which = self._evaluated(call), torch.arange(call.masks.numel())
        else:
            distinct, which = call.masks.flatten().unique(return_inverse=True)
            tiles = self.masks[distinct]
        which = which.view(call.masks.shape)
        # Row by row of the blocks side by side, so that nothing is moved twice.
        rows = which[:, None] * tiles.shape[1] + torch.arange(call.queries.length)[:, None]
        mask = added(tiles, dtype).flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape[:2], -1)
        return mask[:, :, : call.keys.length]

    def _evaluated(self, call: Call) -> Tensor:
        length = call.columns.shape[1]
        row = call.row.repeat_interleave(length)
        places = Places(torch.full_like(row, call.table), row, call.columns.flatten())
        return torch.cat(list(evaluate(self.rule, places, self.shape)))


def plan_calls(term: Term, blocks: Blocks) -> Calls:
    """The calls that compute a term's block lists, with the masks of its partial blocks."""
    rule = term.table_rule()
    ids, masks = distinct_masks(rule, blocks)
    lists = _join_rows(_lists(blocks, ids, told_apart=masks is not None), blocks)
    calls = list(_grouped(lists, blocks, ids))
    complete = int(lists.num_queries.sum()) == blocks.num_tables * blocks.num_q_slots
    listed = (call.keys for call in calls if isinstance(call.keys, Listed))
    cut = any(keys.length < keys.blocks.shape[1] * keys.side for keys in listed)
    key_slots = blocks.num_columns * blocks.k_block if cut else blocks.num_k_slots
    heads = tuple(
        tuple(head for head, own in enumerate(blocks.heads) if own == table) for table in range(blocks.num_tables)
    )
    hidden = hidden_slots(rule, blocks, ids, masks)
    return Calls(rule, blocks.shape, heads, tuple(calls), complete, key_slots, masks, hidden)


@dataclass(frozen=True)
class _Lists:
    """The non-empty lists of a Blocks: entries begin to begin + length - 1 are the columns of a row of a table.

    `code` is the same for lists of a length whose masks are the same.
    """

    table: Int64[Tensor, " m"]
    row: Int64[Tensor, " m"]
    begin: Int64[Tensor, " m"]
    length: Int64[Tensor, " m"]
    num_queries: Int64[Tensor, " m"]
    num_keys: Int64[Tensor, " m"]
    masked: Bool[Tensor, " m"]
    code: Int64[Tensor, " m"]

    def select(self, index: Tensor) -> _Lists:
        return _Lists(*(getattr(self, field.name)[index] for field in fields(self)))


def _lists(blocks: Blocks, ids: Int64[Tensor, " E"], *, told_apart: bool) -> _Lists:
    found, length = (blocks.table.long() * blocks.num_rows + blocks.row).unique_consecutive(return_counts=True)
    row, begin = found % blocks.num_rows, length.cumsum(0) - length
    masked = _sum_by_list((~blocks.full).long(), length) > 0
    num_queries = (blocks.num_q_slots - row * blocks.q_block).clamp(max=blocks.q_block)
    last = blocks.column[begin + length - 1].long()
    short = ((last + 1) * blocks.k_block - blocks.num_k_slots).clamp(min=0)
    code = _codes(ids, length) if told_apart else torch.arange(len(row))
    num_keys = length * blocks.k_block - short
    return _Lists(found // blocks.num_rows, row, begin, length, num_queries, num_keys, masked, code * masked)


def _codes(ids: Int64[Tensor, " E"], length: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    """A 64-bit number for each list of ids: equal lists agree, others of their length do but once in 2^57 pairs."""
    if not len(ids):
        return length
    place = torch.arange(len(ids)) - (length.cumsum(0) - length).repeat_interleave(length)
    numbers = random_numbers((int(ids.max()) + 1 + int(length.max()),))
    # A factor for each place that is as random as the ids' own: any regular one has lists that add up to the same.
    of_place, of_id = numbers.split([int(length.max()), int(ids.max()) + 1])
    return _sum_by_list(of_place[place] * of_id[ids], length)


def _join_rows(lists: _Lists, blocks: Blocks) -> _Lists:
    """Make one taller problem of neighbouring rows whose lists are equal and need no mask."""
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


def _grouped(lists: _Lists, blocks: Blocks, ids: Int64[Tensor, " E"]) -> Iterator[Call]:
    """The calls: first of problems with the same masks, as far as these are enough for a call; then of the others."""
    shape = [lists.table, lists.num_queries, lists.length, lists.num_keys, lists.masked.long()]
    left = torch.arange(len(lists.row))
    for key in ([*shape, lists.code], shape):
        last, others = key is shape, []
        for group in _equal(torch.stack(key, 1)[left]):
            group = left[group]
            pairs = int(lists.num_queries[group[0]] * lists.num_keys[group[0]])
            least = 1 if last else -(-_LEAST_PAIRS // pairs)
            if len(group) < least:
                others.append(group)
                continue
            chosen = lists.select(group)
            columns = blocks.column[chosen.begin[:, None] + torch.arange(int(chosen.length[0]))]
            for some in _even_runs(chosen.row, columns, -(-_LEAST_PAIRS // pairs)):
                if len(some) < least:
                    others.append(group[some])
                else:
                    yield _call(chosen.select(some), columns[some], blocks, ids)
        left = torch.cat(others).sort().values if others else left[:0]


def _equal(key: Int64[Tensor, "n c"]) -> tuple[Int64[Tensor, " g"], ...]:
    """Indices of equal rows, ascending, a tensor for each distinct one."""
    if not len(key):
        return ()
    _, group, sizes = key.unique(dim=0, return_inverse=True, return_counts=True)
    return group.argsort(stable=True).split(sizes.tolist())


def _even_runs(row: Int64[Tensor, " n"], columns: Int32[Tensor, "n L"], least: int) -> Iterator[Int64[Tensor, " m"]]:
    """Problems whose queries and keys lie evenly, for each run of at least so many; then all others together."""
    first = columns[:, 0].long()
    unbroken = columns[:, -1].long() - first == columns.shape[1] - 1
    gap = torch.stack([row.diff(), first.diff()], 1)
    steady = unbroken[1:] & unbroken[:-1] & (gap[:, 1] >= 0)
    changes = torch.ones(len(gap) + 1, dtype=torch.bool)
    changes[1:-1] = ~(steady[1:] & steady[:-1] & (gap[1:] == gap[:-1]).all(1))
    # The gap before a problem says which run it is in; where there is none, the gap after it.
    after = changes.cumsum(0)
    before = torch.cat([torch.tensor([0]), after[:-1]])
    no_before, some_after = torch.cat([torch.tensor([True]), ~steady]), torch.cat([steady, torch.tensor([False])])
    run_of = torch.where(no_before & some_after, after, before)
    _, sizes = run_of.unique_consecutive(return_counts=True)
    others = []
    for run in torch.arange(len(row)).split(sizes.tolist()):
        if len(run) >= least and unbroken[run].all():
            yield run
        else:
            others.append(run)
    if others:
        yield torch.cat(others)


def _call(chosen: _Lists, columns: Int32[Tensor, "n L"], blocks: Blocks, ids: Int64[Tensor, " E"]) -> Call:
    length, height, width = (int(x[0]) for x in (chosen.length, chosen.num_queries, chosen.num_keys))
    unbroken = bool((columns[:, -1] - columns[:, 0] == length - 1).all())
    queries: Stretches | None = evenly(chosen.row * blocks.q_block, height)
    keys: Stretches | None = evenly(columns[:, 0].long() * blocks.k_block, width) if unbroken else None
    if queries is None:
        rows = chosen.row[:, None] + torch.arange(-(-height // blocks.q_block))
        queries = Listed(rows, blocks.q_block, height)
    if keys is None:
        keys = Listed(columns, blocks.k_block, width)
    masks = None
    if bool(chosen.masked[0]):
        begin = chosen.begin[:1] if len(chosen.code.unique()) == 1 else chosen.begin
        masks = ids[begin[:, None] + torch.arange(length)].int()
    return Call(int(chosen.table[0]), chosen.row, columns, queries, keys, masks)
