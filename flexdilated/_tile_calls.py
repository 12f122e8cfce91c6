"""Block lists as kernel calls: rows whose lists have equal lengths are gathered into one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from .masks._blocks import Blocks, evaluate
from .masks._rule import Rule
from .masks._term import Term

# n problems (a head's block row each), L blocks in a list, U distinct masks

_MASK_BYTES = 64 << 20  # distinct masks kept; beyond, masks are evaluated at each call


@dataclass(frozen=True)
class Call:
    """n problems of one shape: a tile of query slots against a list of key blocks.

    `head` and `table` say whose slots and whose rule; `row` and `columns` count blocks. The last column may
    be short: the problem has `num_keys` keys. `masks` picks a mask for each block; None: every pair.
    """

    head: Int64[Tensor, " n"]
    table: Int64[Tensor, " n"]
    row: Int64[Tensor, " n"]
    columns: Int64[Tensor, "n L"]
    num_queries: int
    num_keys: int
    masks: Int64[Tensor, "n L"] | None

    def select(self, index: slice) -> Call:
        masks = None if self.masks is None else self.masks[index]
        return Call(
            self.head[index], self.table[index], self.row[index], self.columns[index],
            self.num_queries, self.num_keys, masks,
        )  # fmt: skip


@dataclass(frozen=True)
class Calls:
    """All calls of a block list. `masks[0]` is the mask of a full block; None where masks would not fit."""

    rule: Rule
    blocks: Blocks
    calls: tuple[Call, ...]
    masks: Bool[Tensor, "U q_block k_block"] | None

    @property
    def nbytes(self) -> int:
        held = sum(call.columns.nbytes + 3 * call.row.nbytes for call in self.calls)
        return held + self.blocks.nbytes + (0 if self.masks is None else self.masks.nbytes)

    def mask_of(self, call: Call) -> Bool[Tensor, "n Q K"] | None:
        """Which pairs of each problem are allowed; None if all."""
        if call.masks is None:
            return None
        n, length = call.columns.shape
        tiles = self._evaluated(call) if self.masks is None else self.masks[call.masks.flatten()]
        tiles = tiles.view(n, length, self.blocks.q_block, self.blocks.k_block).transpose(1, 2).flatten(2)
        return tiles[:, : call.num_queries, : call.num_keys]

    def _evaluated(self, call: Call) -> Tensor:
        length = call.columns.shape[1]
        table, row = (x.repeat_interleave(length) for x in (call.table, call.row))
        return torch.cat(list(evaluate(self.rule, table, row, call.columns.flatten(), self.blocks.shape)))


def plan_calls(term: Term, blocks: Blocks) -> Calls:
    """The calls that compute a term's block lists, with the masks of its partial blocks."""
    rule = term.table_rule()
    ids, masks = _distinct_masks(rule, blocks)
    lists = blocks.table.long() * blocks.num_rows + blocks.row
    found, length = lists.unique_consecutive(return_counts=True)
    begin = length.cumsum(0) - length
    partial = torch.zeros(len(found), dtype=torch.int64).index_add_(
        0, torch.repeat_interleave(length), (~blocks.full).long()
    )
    row = found % blocks.num_rows
    num_queries = (blocks.num_q_slots - row * blocks.q_block).clamp(max=blocks.q_block)
    last = blocks.column[begin + length - 1].long()
    short = ((last + 1) * blocks.k_block - blocks.num_k_slots).clamp(min=0)
    kind = torch.stack([num_queries, length, short, (partial > 0).long()], 1)
    kinds, kind_of = kind.unique(dim=0, return_inverse=True)
    calls = []
    for index, (queries, blocks_each, missing, masked) in enumerate(kinds.tolist()):
        chosen = (kind_of == index).nonzero().squeeze(1)
        entries = begin[chosen, None] + torch.arange(blocks_each)
        head, which = _heads_of(blocks, found[chosen] // blocks.num_rows)
        calls.append(
            Call(
                head,
                found[chosen][which] // blocks.num_rows,
                row[chosen][which],
                blocks.column[entries].long()[which],
                queries,
                blocks_each * blocks.k_block - missing,
                ids[entries][which] if masked else None,
            )
        )
    return Calls(rule, blocks, tuple(calls), masks)


def _heads_of(blocks: Blocks, table: Int64[Tensor, " m"]) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """(head, index into table) for every head that uses one of these tables."""
    heads = torch.tensor(blocks.heads)
    return (heads[:, None] == table[None, :]).nonzero().unbind(1)


def _distinct_masks(rule: Rule, blocks: Blocks) -> tuple[Int64[Tensor, " E"], Tensor | None]:
    """(mask of each block, the distinct masks); mask 0 allows every pair."""
    partial = (~blocks.full).nonzero().squeeze(1)
    distinct = [torch.ones(1, blocks.q_block, blocks.k_block, dtype=torch.bool)]
    limit = _MASK_BYTES // distinct[0].nbytes
    known: dict[int, int] = {}
    codes: list[int] = []
    listed = (x[partial] for x in (blocks.table, blocks.row, blocks.column))
    for tiles in evaluate(rule, *listed, blocks.shape):
        found = _fingerprints(tiles).tolist()
        for index, code in enumerate(found):
            if code not in known:
                known[code] = len(distinct)
                distinct.append(tiles[index : index + 1])
        codes += found
        if len(distinct) > limit:
            return torch.zeros(len(blocks.full), dtype=torch.int64), None
    ids = torch.zeros(len(blocks.full), dtype=torch.int64)
    ids[partial] = torch.tensor([known[code] for code in codes], dtype=torch.int64)
    return ids, torch.cat(distinct)


def _fingerprints(tiles: Bool[Tensor, "n q_block k_block"]) -> Int64[Tensor, " n"]:
    """64-bit sums of one random number a cell: equal masks agree, others do but once in 2^64 pairs."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    numbers = torch.randint(bounds.min, bounds.max, tiles.shape[1:], generator=generator)
    return torch.where(tiles, numbers, 0).sum((1, 2))
