"""Block lists as kernel calls: rows whose lists have equal lengths are gathered into one batch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from .masks._blocks import Blocks, Places, evaluate
from .masks._rule import Rule
from .masks._term import Term

# n problems (a head's block row each), L blocks in a list, U distinct masks

_MASK_BYTES = 64 << 20  # distinct masks kept; beyond, masks are evaluated at each call
_MAX_JOINED_ROWS = 8  # taller problems gain no speed and split badly over threads


@dataclass(frozen=True)
class Call:
    """n problems of one shape: a tile of query slots against a list of key blocks.

    `head` and `table` say whose slots and whose rule; `row` and `columns` count blocks. The last column may
    be short: the problem has `num_keys` keys. `masks` picks a mask for each block; None: every pair.
    """

    head: Int64[Tensor, " n"]
    table: Int64[Tensor, " n"]
    row: Int64[Tensor, " n"]
    columns: Int32[Tensor, "n L"]
    num_queries: int
    num_keys: int
    masks: Int32[Tensor, "n L"] | None

    def select(self, index: slice) -> Call:
        masks = None if self.masks is None else self.masks[index]
        return Call(
            self.head[index], self.table[index], self.row[index], self.columns[index],
            self.num_queries, self.num_keys, masks,
        )  # fmt: skip


@dataclass(frozen=True)
class Calls:
    """All calls of a block list of this shape: query slots, key slots, query side of a block, key side.

    `masks[0]` is the mask of a full block; None where masks would not fit.
    """

    rule: Rule
    shape: tuple[int, int, int, int]
    calls: tuple[Call, ...]
    masks: Bool[Tensor, "U q_block k_block"] | None

    @property
    def nbytes(self) -> int:
        numbers = (x for call in self.calls for x in (call.head, call.table, call.row, call.columns, call.masks))
        return sum(x.nbytes for x in (*numbers, self.masks) if x is not None)

    def mask_of(self, call: Call) -> Bool[Tensor, "n Q K"] | None:
        """Which pairs of each problem are allowed; None if all."""
        if call.masks is None:
            return None
        n, length = call.columns.shape
        tiles = self._evaluated(call) if self.masks is None else self.masks[call.masks.flatten()]
        tiles = tiles.view(n, length, *self.shape[2:]).transpose(1, 2).flatten(2)
        return tiles[:, : call.num_queries, : call.num_keys]

    def _evaluated(self, call: Call) -> Tensor:
        length = call.columns.shape[1]
        table, row = (x.repeat_interleave(length) for x in (call.table, call.row))
        places = Places(table, row, call.columns.flatten())
        return torch.cat(list(evaluate(self.rule, places, self.shape)))


def plan_calls(term: Term, blocks: Blocks) -> Calls:
    """The calls that compute a term's block lists, with the masks of its partial blocks."""
    rule = term.table_rule()
    ids, masks = _distinct_masks(rule, blocks)
    lists = _join_rows(_lists(blocks), blocks)
    kind = torch.stack([lists.num_queries, lists.length, lists.short(blocks), lists.masked.long()], 1)
    kinds, kind_of = kind.unique(dim=0, return_inverse=True)
    calls = []
    for index, (queries, length, missing, masked) in enumerate(kinds.tolist()):
        chosen = lists.select((kind_of == index).nonzero().squeeze(1))
        entries = chosen.begin[:, None] + torch.arange(length)
        head, which = _heads_of(blocks, chosen.table)
        columns, picked = blocks.column[entries][which], ids[entries][which].int() if masked else None
        num_keys = length * blocks.k_block - missing
        calls.append(Call(head, chosen.table[which], chosen.row[which], columns, queries, num_keys, picked))
    return Calls(rule, blocks.shape, tuple(calls), masks)


@dataclass(frozen=True)
class _Lists:
    """The non-empty lists of a Blocks: entries begin to begin + length - 1 are the columns of a row of a table."""

    table: Int64[Tensor, " m"]
    row: Int64[Tensor, " m"]
    begin: Int64[Tensor, " m"]
    length: Int64[Tensor, " m"]
    num_queries: Int64[Tensor, " m"]
    masked: Bool[Tensor, " m"]

    def select(self, index: Tensor) -> _Lists:
        return _Lists(*(getattr(self, field.name)[index] for field in fields(self)))

    def short(self, blocks: Blocks) -> Int64[Tensor, " m"]:
        """Slots by which the last block of each list reaches beyond the keys."""
        last = blocks.column[self.begin + self.length - 1].long()
        return ((last + 1) * blocks.k_block - blocks.num_k_slots).clamp(min=0)


def _lists(blocks: Blocks) -> _Lists:
    found, length = (blocks.table.long() * blocks.num_rows + blocks.row).unique_consecutive(return_counts=True)
    row = found % blocks.num_rows
    partial = _sum_by_list((~blocks.full).long(), length)
    num_queries = (blocks.num_q_slots - row * blocks.q_block).clamp(max=blocks.q_block)
    return _Lists(found // blocks.num_rows, row, length.cumsum(0) - length, length, num_queries, partial > 0)


def _join_rows(lists: _Lists, blocks: Blocks) -> _Lists:
    """Make one taller problem of neighbouring rows whose lists are equal and need no mask."""
    numbers = _random_numbers((blocks.num_columns,))
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
    starts = (since % _MAX_JOINED_ROWS == 0).nonzero().squeeze(1)
    heights = torch.diff(starts, append=torch.tensor([len(index)]))
    joined = lists.select(starts)
    return replace(joined, num_queries=torch.where(heights > 1, heights * blocks.q_block, joined.num_queries))


def _sum_by_list(values: Int64[Tensor, " E"], length: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    sums = torch.zeros(len(length), dtype=torch.int64)
    return sums.index_add_(0, torch.repeat_interleave(length), values)


def _heads_of(blocks: Blocks, table: Int64[Tensor, " m"]) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """(head, index into table) for every head that uses one of these tables."""
    heads = torch.tensor(blocks.heads)
    head, index = (heads[:, None] == table[None, :]).nonzero().unbind(1)
    return head, index


def _distinct_masks(rule: Rule, blocks: Blocks) -> tuple[Int64[Tensor, " E"], Tensor | None]:
    """(mask of each block, the distinct masks); mask 0 allows every pair."""
    partial = (~blocks.full).nonzero().squeeze(1)
    distinct = [torch.ones(1, blocks.q_block, blocks.k_block, dtype=torch.bool)]
    limit = _MASK_BYTES // distinct[0].nbytes
    known: dict[int, int] = {}
    codes: list[int] = []
    looked_at, look_of = _repeats(rule, blocks, partial)
    for tiles in evaluate(rule, blocks.places(looked_at), blocks.shape):
        found = _fingerprints(tiles).tolist()
        for index, code in enumerate(found):
            if code not in known:
                known[code] = len(distinct)
                distinct.append(tiles[index : index + 1])
        codes += found
        if len(distinct) > limit:
            return torch.zeros(len(blocks.full), dtype=torch.int64), None
    ids = torch.zeros(len(blocks.full), dtype=torch.int64)
    ids[partial] = torch.tensor([known[code] for code in codes], dtype=torch.int64)[look_of]
    return ids, torch.cat(distinct)


def _repeats(rule: Rule, blocks: Blocks, partial: Int64[Tensor, " n"]) -> tuple[Int64[Tensor, " d"], Tensor]:
    """(blocks to look at, which of these each partial block repeats), as the rule's period tells."""
    period = rule.pattern.period()
    if period is None or len(rule.q.starts) > 1 or len(rule.k.starts) > 1:
        return partial, torch.arange(len(partial))
    table, row, column = (x.long() for x in blocks.places(partial))
    q_slot, k_slot = row * blocks.q_block, column * blocks.k_block
    q, k = rule.q.position(table, q_slot), rule.k.position(table, k_slot)
    # At the ends a block is cut short.
    height = (blocks.num_q_slots - q_slot).clamp(max=blocks.q_block)
    width = (blocks.num_k_slots - k_slot).clamp(max=blocks.k_block)
    look, look_of = torch.stack([table, q - k, q % period, height, width], dim=1).unique(dim=0, return_inverse=True)
    first = torch.full((len(look),), len(partial))
    first.scatter_reduce_(0, look_of, torch.arange(len(partial)), "amin")
    return partial[first], look_of


def _fingerprints(tiles: Bool[Tensor, "n q_block k_block"]) -> Int64[Tensor, " n"]:
    """64-bit sums of one random number a cell: equal masks agree, others do but once in 2^64 pairs."""
    return torch.where(tiles, _random_numbers(tiles.shape[1:]), 0).sum((1, 2))


def _random_numbers(shape: tuple[int, ...]) -> Int64[Tensor, "..."]:
    """64-bit numbers, the same at every call: sums of them tell sets apart."""
    bounds = torch.iinfo(torch.int64)
    return torch.randint(bounds.min, bounds.max, shape, generator=torch.Generator().manual_seed(0))
