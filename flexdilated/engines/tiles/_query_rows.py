"""Queries that each name their own blocks of keys: gathered query by query, or grouped by the block they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ...masks.blocks import allowed_pairs
from .._distinct_masks import added
from .._merge import WholeRows, sum_dtype
from ..kernels._kernel import flash_backward, flash_forward
from ._selected_listed import Listed
from ._tile_blocks import GATHERED_BYTES

# H query heads, G key/value heads, T tables, N queries, M keys, D head dim, W entries of a row, C blocks of K keys
# X sets of g query heads, those that share a table and a key/value head
# n problems: Q queries, g rows each, over L blocks

_FEW_QUERIES = 16  # up to which, and of blocks with so few keys, nothing is gained by grouping
_FEW_KEYS = 8
_MOST_ROWS = 128  # of a problem
_PARTS_BYTES = 128 << 20  # of results that wait to be joined
_CELLS = 1 << 18  # pairs evaluated at once

_Blocks = tuple[Float[Tensor, "G C K D"], Float[Tensor, "G C K D"]]


@dataclass(frozen=True, eq=False)
class Problems:
    """Calls of one shape: queries of a set of heads over blocks of keys.

    place: where in the set's results each query's goes, counted over queries and entries; -1 where there is no query.
    shown: which query sees which key; None where each sees all.
    """

    set: Int64[Tensor, " n"]
    query: Int64[Tensor, "n Q"]
    block: Int64[Tensor, "n L"]
    place: Int64[Tensor, "n Q"]
    shown: Bool[Tensor, "n Q LK"] | None

    def rows(self, x: Shaped[Tensor, "X N g ..."]) -> Shaped[Tensor, "n 1 Qg ..."]:
        return x[self.set[:, None], self.query].flatten(1, 2).unsqueeze(1)

    def mask(self, groups: int, dtype: torch.dtype) -> Float[Tensor, "n 1 Qg LK"] | None:
        return None if self.shown is None else added(self.shown, dtype).repeat_interleave(groups, 1).unsqueeze(1)

    def clear_rows(self, x: Shaped[Tensor, "n 1 Qg ..."], groups: int, value: float) -> Tensor:
        """x with a value in rows that see nothing here, or are none."""
        blind = self.place < 0 if self.shown is None else (self.place < 0) | ~self.shown.any(2)
        return x.masked_fill(
            blind.repeat_interleave(groups, 1)[:, None].view(*x.shape[:3], *[1] * (x.dim() - 3)), value
        )

    def clear_keys(self, x: Float[Tensor, "n 1 LK D"]) -> Tensor:
        """x with 0 where no query of the problem sees the key."""
        return x if self.shown is None else x.masked_fill(~self.shown.any(1)[:, None, :, None], 0.0)


@dataclass(frozen=True, eq=False)
class QueryRows:
    """The listed blocks of a call, a row for each query."""

    listed: Listed

    def forward(
        self, q: Float[Tensor, "b H N D"], k: Float[Tensor, "b G M D"], v: Float[Tensor, "b G M D"], scale: float
    ) -> tuple[Float[Tensor, "b H N D"], Float[Tensor, "b H N"]]:
        """(out, natural lse) in float32 or wider; a query without keys has output 0 and lse -inf."""
        found = [self._forward(q[entry], k[entry], v[entry], scale) for entry in range(len(q))]
        out, lse = zip(*found, strict=True)
        return torch.stack(out), torch.stack(lse)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        rows, blocks, wide = self._by_set(q), (self._by_block(k), self._by_block(v)), sum_dtype(q)
        out = torch.empty_like(rows, dtype=wide, memory_format=torch.contiguous_format)
        lse = rows.new_empty(rows.shape[:3], dtype=wide)
        for sets, queries in self._portions(rows):
            entries = 1 if self._gathers else self._columns.shape[2]
            shape = (len(sets), len(queries), entries, rows.shape[2])
            parts, lses = (
                rows.new_zeros(*shape, rows.shape[3], dtype=wide),
                rows.new_full(shape, -torch.inf, dtype=wide),
            )
            for each in self._problems(sets, queries, rows):
                found, found_lse = self._attend(each, rows, blocks, scale)
                there = each.place >= 0
                place = (((each.set - sets.start)[:, None] * len(queries) * entries) + each.place)[there]
                parts.flatten(0, 2)[place] = found[there].to(wide)
                lses.flatten(0, 2)[place] = found_lse[there].to(wide)
            some = slice(queries.start, queries.stop)
            out[sets.start : sets.stop, some], lse[sets.start : sets.stop, some] = _joined(parts, lses)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _attend(self, each: Problems, rows: Tensor, blocks: _Blocks, scale: float) -> tuple[Tensor, Tensor]:
        groups = rows.shape[2]
        keys, values = (each.clear_keys(self._keys(each, x)) for x in blocks)
        own = each.clear_rows(each.rows(rows), groups, 0.0)
        out, lse = flash_forward(own, keys, values, scale=scale, mask=each.mask(groups, own.dtype))
        lse = each.clear_rows(lse, groups, -torch.inf)
        return out.view(*each.query.shape, groups, -1), lse.view(*each.query.shape, groups)

    def backward(
        self, q: Float[Tensor, "b H N D"], k: Float[Tensor, "b G M D"], v: Float[Tensor, "b G M D"], whole: WholeRows,
        scale: float,
    ) -> tuple[Float[Tensor, "b H N D"], Float[Tensor, "b G M D"], Float[Tensor, "b G M D"]]:  # fmt: skip
        """(dq, dk, dv) in float32 or wider, of rows whose out and lse over all their keys are `whole`."""
        (q, k, v), grad_out, out = whole.with_column(q, k, v)
        lse = whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf)
        found = [
            self._backward(q[entry], k[entry], v[entry], grad_out[entry], out[entry], lse[entry], scale)
            for entry in range(len(q))
        ]
        dq, dk, dv = (torch.stack(each)[..., : whole.out.shape[-1]] for each in zip(*found, strict=True))
        return dq, dk, dv

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, grads, outs, sums = (self._by_set(x) for x in (q, grad_out, out, lse))
        blocks = self._by_block(k), self._by_block(v)
        groups, wide = rows.shape[2], sum_dtype(q)
        dq = torch.zeros(rows.shape, dtype=wide)
        dk, dv = (torch.zeros(x.shape, dtype=wide) for x in blocks)
        for sets, queries in self._portions(rows):
            for each in self._problems(sets, queries, rows):
                keys, values = (each.clear_keys(self._keys(each, x)) for x in blocks)
                own, grad, result = (each.clear_rows(each.rows(x), groups, 0.0) for x in (rows, grads, outs))
                total = each.clear_rows(each.rows(sums), groups, torch.inf)
                mask = each.mask(groups, own.dtype)
                found = flash_backward(grad, own, keys, values, result, total, scale=scale, mask=mask)
                there = each.place >= 0
                place = (each.set[:, None] * rows.shape[1] + each.query)[there]
                of_rows = found[0].view(*each.query.shape, groups, -1)
                dq.flatten(0, 1).index_add_(0, place, of_rows[there].to(wide))
                at = (self._key_head(each.set)[:, None] * blocks[0].shape[1] + each.block).flatten()
                for total_grad, part in zip((dk, dv), found[1:], strict=True):
                    part = each.clear_keys(part).reshape(len(at), *blocks[0].shape[2:])
                    total_grad.flatten(0, 1).index_add_(0, at, part.to(wide))
        tokens = k.shape[1]
        dk, dv = (x.flatten(1, 2)[:, :tokens] for x in (dk, dv))
        return dq.transpose(1, 2).flatten(0, 1), dk, dv

    @property
    def _gathers(self) -> bool:
        """Whether keys are gathered query by query."""
        return self.listed.key.num_queries <= _FEW_QUERIES or self.listed.block[1] <= _FEW_KEYS

    @cached_property
    def _num_sets(self) -> int:
        return lcm(self.listed.num_tables, self.listed.key.num_kv_heads)

    def _key_head(self, sets: Tensor) -> Tensor:
        return sets * self.listed.key.num_kv_heads // self._num_sets

    def _keys(self, each: Problems, x: Float[Tensor, "G C K D"]) -> Float[Tensor, "n 1 LK D"]:
        return x[self._key_head(each.set)[:, None], each.block].flatten(1, 2).unsqueeze(1)

    def _by_set(self, x: Shaped[Tensor, "H N ..."]) -> Shaped[Tensor, "X N g ..."]:
        return x.unflatten(0, (self._num_sets, -1)).transpose(1, 2)

    def _by_block(self, x: Float[Tensor, "G M D"]) -> Float[Tensor, "G C K D"]:
        side = self.listed.block[1]
        missing = -x.shape[1] % side
        return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(1, (-1, side))

    @cached_property
    def _row_of_query(self) -> Int64[Tensor, " N"]:
        key, side = self.listed.key, self.listed.block[0]
        return (key.q_offset % side + torch.arange(key.num_queries)) // side

    @property
    def _columns(self) -> Int64[Tensor, "T R W"]:
        return self.listed.column

    @cached_property
    def _whole(self) -> Bool[Tensor, "T R W"]:
        """Whether the queries of a row see all keys of a block that is not cut off."""
        return self.listed.full & ((self._columns + 1) * self.listed.block[1] <= self.listed.key.num_keys)

    def _portions(self, rows: Float[Tensor, "X N g D"]) -> Iterator[tuple[range, range]]:
        """(sets that share a table, queries), so that what waits to be joined is bounded."""
        sets, queries = self._num_sets // self.listed.num_tables, rows.shape[1]
        entries = 1 if self._gathers else self._columns.shape[2]
        at_once = max(_MOST_ROWS, _PARTS_BYTES // (4 * sets * rows.shape[2] * rows.shape[3] * entries))
        for table in range(self.listed.num_tables):
            for begin in range(0, queries, at_once):
                yield range(table * sets, (table + 1) * sets), range(begin, min(begin + at_once, queries))

    def _problems(self, sets: range, queries: range, rows: Float[Tensor, "X N g D"]) -> Iterator[Problems]:
        """The calls of some queries of the sets that share a table."""
        table, row = sets.start // len(sets), self._row_of_query[queries.start : queries.stop]
        column, whole = self._columns[table, row], self._whole[table, row]
        make = self._one_by_one if self._gathers else self._grouped
        for query, block, place, seen in make(column, whole):
            bytes_each = block.shape[1] * self.listed.block[1] * (2 * rows.shape[3] + query.shape[1] * rows.shape[2])
            at_once = max(1, GATHERED_BYTES // (bytes_each * rows.element_size()))
            for begin in range(0, len(query), at_once):
                some = slice(begin, begin + at_once)
                own = query[some] + queries.start
                shown = None if seen is None else self._shown(table, own, block[some], seen[some])
                for each in sets:
                    owner = torch.full((len(own),), each)
                    yield Problems(owner, own, block[some], place[some], shown)

    def _one_by_one(self, column: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """(queries, blocks, places, 2 where a query sees a whole block, 1 where it may see some of it) of problems."""
        query = torch.arange(len(column))[:, None]
        seen = None if bool(whole.all()) else ((column >= 0).byte() + whole.byte())[:, None]
        yield query, column.clamp(min=0), query, seen

    def _grouped(self, column: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """The same: queries that see one block whole, and those that see it in part."""
        there = column >= 0
        for which, kind in ((there & whole, 2), (there & ~whole, 1)):
            pairs = which.flatten().nonzero().squeeze(1)
            if not len(pairs):
                continue
            blocks, order = column.flatten()[pairs].sort(stable=True)
            block, counts = blocks.unique_consecutive(return_counts=True)
            height = min(_MOST_ROWS, 1 << max(0, int(counts.float().mean().ceil()) - 1).bit_length())
            tiles = (counts + height - 1) // height
            before = (tiles.cumsum(0) - tiles).repeat_interleave(counts) * height
            inside = torch.arange(len(pairs)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
            place = torch.full((int(tiles.sum()) * height,), -1)
            place[before + inside] = pairs[order]
            place = place.view(-1, height)
            query = place.clamp(min=0) // column.shape[1]
            seen = None if kind == 2 else (place >= 0).byte()[..., None]
            yield query, block.repeat_interleave(tiles)[:, None], place, seen

    def _shown(
        self, table: int, query: Int64[Tensor, "n Q"], block: Int64[Tensor, "n L"], seen: Int64[Tensor, "n Q L"]
    ) -> Bool[Tensor, "n Q LK"]:
        key, side = self.listed.key, self.listed.block[1]
        shown = (seen == 2)[..., None].repeat(1, 1, 1, side)
        doubtful = (seen == 1).nonzero()
        head = torch.tensor(table * (key.num_heads // self.listed.num_tables) + key.head_offset)
        for problem, row, entry in (some.unbind(1) for some in doubtful.split(max(1, _CELLS // side))):
            keys = block[problem, entry][:, None] * side + torch.arange(side)
            inside = keys < key.num_keys
            at = query[problem, row][:, None] + key.q_offset, keys.clamp(max=key.num_keys - 1) + key.k_offset
            allowed = allowed_pairs(self.listed.rule, key.num_heads_global, head.expand(len(keys), 1), *at)
            shown[problem, row, entry] = allowed & inside
        return shown.flatten(2)


def _joined(
    parts: Float[Tensor, "X N W g D"], lses: Float[Tensor, "X N W g"]
) -> tuple[Float[Tensor, "X N g D"], Float[Tensor, "X N g"]]:
    """One softmax over the entries of each row."""
    if parts.shape[2] == 1:
        return parts[:, :, 0], lses[:, :, 0]
    top = lses.amax(2, keepdim=True).clamp(min=torch.finfo(lses.dtype).min)
    weights = (lses - top).exp_()
    total = weights.sum(2)
    out = parts.mul_(weights.unsqueeze(-1)).sum(2)
    return out.div_(total.clamp(min=torch.finfo(lses.dtype).tiny).unsqueeze(-1)), total.log() + top.squeeze(2)
