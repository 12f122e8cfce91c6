"""Attention over tables of selected key blocks, where each row lists the key blocks of one query block.

Keys are gathered for each row of the table, or queries are grouped by key block. This runs directly on the table,
without a plan; nothing that depends on its values is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor
from torch.nn.functional import pad

from ...masks.blocks import allowed_pairs
from ...masks.core import Pattern
from ...masks.planning import TableProblems
from .._merge import WholeRows, shares_of, sum_dtype
from .._operands import additive_mask
from ..kernels._kernel import flash_backward, flash_forward

# H query heads, G key/value heads, N queries, M keys, D head dim, C blocks of K keys
# X sets of g query heads that share a table and a key/value head
# n problems: Q queries, g rows each, over L blocks

_CELLS = 1 << 18  # pairs evaluated at once

_KeyValues = tuple[Tensor, Tensor]  # keys and values: (G, C, K, D) in blocks, or (G, M, D) where few are read


@dataclass(frozen=True, eq=False)
class Problems:
    """n attention problems of equal shape: Q queries, of g heads each, over L key blocks of K keys.

    set: index of the head set of each problem.
    query: index of each query in the call; for padding, the index of some query.
    block: index of each key block; for a table entry without a block it is 0, and `shown` is False.
    place: index of each query's result among the results of its head set that are held at once; -1 for padding. These
        are one for each query or, if results of blocks are merged later, one for each query and table entry.
    shown: True for allowed (query, key) pairs; None if every query, apart from padding, sees every key.
    """

    set: Int64[Tensor, " n"]
    query: Int64[Tensor, "n Q"]
    block: Int64[Tensor, "n L"]
    place: Int64[Tensor, "n Q"]
    shown: Bool[Tensor, "n Q LK"] | None

    @cached_property
    def padded(self) -> bool:
        return int(self.place.min()) < 0

    @cached_property
    def blind(self) -> Bool[Tensor, "n Q"] | None:
        """True for padding and for queries that see no key; None if `shown` is None and there is no padding."""
        if self.shown is None:
            return self.place < 0 if self.padded else None
        sightless = ~self.shown.any(2)
        return sightless | (self.place < 0) if self.padded else sightless

    @cached_property
    def unseen(self) -> Bool[Tensor, "n 1 LK 1"] | None:
        """True for keys that none of a problem's queries sees; None if `shown` is None."""
        return None if self.shown is None else ~self.shown.any(1)[:, None, :, None]

    def rows(self, num_queries: int) -> Int64[Tensor, "n Q"]:
        """Return the index of each query in the flattened (head sets, num_queries)."""
        return self.set[:, None] * num_queries + self.query

    def without_padding(self, index: Int64[Tensor, "n Q"]) -> tuple[Tensor, Tensor | slice]:
        """Return (`index`, flattened, without padding; places of its items among the n * Q queries).

        If there is no padding, the places are slice(None).

        index: where the result of each query is to be written.
        """
        if not self.padded:
            return index.flatten(), slice(None)
        there = (self.place >= 0).flatten().nonzero().squeeze(1)
        return index.flatten()[there], there

    def mask(self, groups: int, dtype: torch.dtype) -> Float[Tensor, "n 1 Qg LK"] | None:
        if self.shown is None:
            return None
        mask = additive_mask(self.shown, dtype)
        return (mask if groups == 1 else mask.repeat_interleave(groups, 1)).unsqueeze(1)

    def clear_rows_(self, x: Shaped[Tensor, "n 1 Qg ..."], groups: int, value: float) -> Tensor:
        """Write `value`, in place, to rows of x that belong to padding or to queries that see no key; return x.

        groups: g, the number of heads, and so of rows of x, for each query.
        """
        if self.blind is None:
            return x
        blind = self.blind if groups == 1 else self.blind.repeat_interleave(groups, 1)
        return x.masked_fill_(blind[:, None].view(*x.shape[:3], *[1] * (x.dim() - 3)), value)

    def clear_keys_(self, x: Float[Tensor, "n 1 LK D"]) -> Tensor:
        """Write zeros to x (keys, values or gradients) where none of a problem's queries sees the key; return x."""
        return x if self.unseen is None else x.masked_fill_(self.unseen, 0.0)


@dataclass(frozen=True, eq=False)
class QueryRows:
    """Attention over a table of selected blocks, for batch entries with equal tables and rules.

    table: the table's problems, equal for all these batch entries.
    """

    table: TableProblems

    def forward(
        self, q: Float[Tensor, "b H N D"], k: Float[Tensor, "b G M D"], v: Float[Tensor, "b G M D"], scale: float
    ) -> tuple[Float[Tensor, "b H N D"], Float[Tensor, "b H N"]]:
        """Return (out, natural lse) in float32 or wider; a query without keys has output 0 and lse -inf."""
        found = [self._forward_of_entry(q[entry], k[entry], v[entry], scale) for entry in range(len(q))]
        out, lse = zip(*found, strict=True)
        return _stack_entries(out), _stack_entries(lse)

    def _forward_of_entry(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        rows, wide = self._by_set(q), sum_dtype(q)
        blocks = (k, v) if self.table.lists_few_keys else (self._by_block(k), self._by_block(v))
        out = torch.empty_like(rows, dtype=wide, memory_format=torch.contiguous_format)
        lse = rows.new_empty(rows.shape[:3], dtype=wide)
        for sets, queries in self.table.portions(rows.shape[3]):
            entries = 1 if self.table.gathers else self.table.column.shape[2]
            shape = (len(sets), len(queries), entries, rows.shape[2])
            parts, lses = (
                rows.new_zeros(*shape, rows.shape[3], dtype=wide),
                rows.new_full(shape, -torch.inf, dtype=wide),
            )
            for each in self._problems(sets, queries, rows):  # `_attend` frees its tensors after each batch
                begin = (each.set - sets.start) * len(queries) * entries
                self._attend(each, rows, blocks, scale, parts.flatten(0, 2), lses.flatten(0, 2), begin)
            at = slice(sets.start, sets.stop), slice(queries.start, queries.stop)
            if entries == 1:
                out[at], lse[at] = parts[:, :, 0], lses[:, :, 0]
            else:
                shares, lse[at] = shares_of(lses, 2)
                out[at] = parts.mul_(shares.unsqueeze(-1)).sum(2)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _attend(
        self, each: Problems, rows: Tensor, blocks: _KeyValues, scale: float, parts: Tensor, lses: Tensor, begin: Tensor
    ) -> None:
        """Write out and lse of each query of a batch of problems to parts and lses, at index begin + each.place.

        Padding is left out.

        rows: all queries by head set, as `_by_set` returns them.
        parts, lses: out and lse, of shapes (results, g, D) and (results, g).
        begin: for each problem, the index of the first result of its head set.
        """
        groups = rows.shape[2]
        found = (
            (self._blocks_from_tokens(each, x) for x in blocks)
            if self.table.lists_few_keys
            else self._keys_and_values(each, blocks)
        )
        keys, values = (each.clear_keys_(x) for x in found)
        own = each.clear_rows_(gather_for_problems(rows, each.rows(rows.shape[1])), groups, 0.0)
        out, lse = flash_forward(own, keys, values, scale=scale, mask=each.mask(groups, own.dtype))
        lse = each.clear_rows_(lse, groups, -torch.inf)
        place, there = each.without_padding(begin[:, None] + each.place)
        parts[place] = out.view(-1, groups, out.shape[-1])[there].to(parts.dtype)
        lses[place] = lse.view(-1, groups)[there].to(parts.dtype)

    def backward(
        self, q: Float[Tensor, "b H N D"], k: Float[Tensor, "b G M D"], v: Float[Tensor, "b G M D"], whole: WholeRows,
        scale: float,
    ) -> tuple[Float[Tensor, "b H N D"], Float[Tensor, "b G M D"], Float[Tensor, "b G M D"]]:  # fmt: skip
        """Return (dq, dk, dv) in float32 or wider.

        whole: out, lse and their gradients, of rows that may have more keys than the table selects.
        """
        (q, k, v), grad_out, out = whole.with_lse_channel(q, k, v)
        lse = whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf)
        found = [
            self._backward_of_entry(q[entry], k[entry], v[entry], grad_out[entry], out[entry], lse[entry], scale)
            for entry in range(len(q))
        ]
        dq, dk, dv = (_stack_entries(each)[..., : whole.out.shape[-1]] for each in zip(*found, strict=True))
        return dq, dk, dv

    def _backward_of_entry(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, grads, outs, sums = (self._by_set(x) for x in (q, grad_out, out, lse))
        blocks = self._by_block(k), self._by_block(v)
        dq, dk, dv = (torch.zeros_like(x, dtype=sum_dtype(q)) for x in (rows, *blocks))
        for sets, queries in self.table.portions(rows.shape[3]):
            for each in self._problems(sets, queries, rows):
                self._add_grads(each, blocks, (rows, grads, outs, sums), scale, (dq, dk, dv))
        tokens = k.shape[1]
        dk, dv = (x.flatten(1, 2)[:, :tokens] for x in (dk, dv))
        return dq.transpose(1, 2).flatten(0, 1), dk, dv

    def _add_grads(
        self, each: Problems, blocks: _KeyValues, whole: Sequence[Tensor], scale: float, totals: Sequence[Tensor]
    ) -> None:
        """Add the gradients of a batch of problems to `totals`, (dq by head set, dk and dv by block), in place.

        whole: (q, gradient of out, out, lse) of all queries, by head set, as `_by_set` returns them.
        """
        groups, dtype = whole[0].shape[2], totals[0].dtype
        keys, values = (each.clear_keys_(x) for x in self._keys_and_values(each, blocks))
        at = each.rows(whole[0].shape[1])
        own, grad, result, lse = (gather_for_problems(x, at) for x in whole)
        own, grad, result = (each.clear_rows_(x, groups, 0.0) for x in (own, grad, result))
        lse, mask = each.clear_rows_(lse, groups, torch.inf), each.mask(groups, own.dtype)
        found = flash_backward(grad, own, keys, values, result, lse, scale=scale, mask=mask)
        place, there = each.without_padding(at)
        of_rows = found[0].view(each.query.numel(), groups, -1)
        totals[0].flatten(0, 1).index_add_(0, place, of_rows[there].to(dtype))
        at = self._block_index(each, blocks[0].shape[1]).flatten()
        for total, part in zip(totals[1:], found[1:], strict=True):
            part = each.clear_keys_(part).reshape(len(at), *blocks[0].shape[2:])
            total.flatten(0, 1).index_add_(0, at, part.to(dtype))

    def _keys_and_values(self, each: Problems, blocks: _KeyValues) -> list[Float[Tensor, "n 1 LK D"]]:
        at = self._block_index(each, blocks[0].shape[1])
        return [gather_for_problems(x, at) for x in blocks]

    def _block_index(self, each: Problems, num_blocks: int) -> Int64[Tensor, "n L"]:
        """Return the index of each key block in the flattened (key/value heads, num_blocks)."""
        return self.table.key_head(each.set)[:, None] * num_blocks + each.block

    def _blocks_from_tokens(self, each: Problems, x: Float[Tensor, "G M D"]) -> Float[Tensor, "n 1 LK D"]:
        """Return the key blocks of each problem from x (keys or values); x's last token fills an incomplete block."""
        side = self.table.block[1]
        at = (each.block[..., None] * side + torch.arange(side)).flatten(1).clamp(max=x.shape[1] - 1)
        x = x if x.stride(2) == 1 and x.stride(1) else x.contiguous()
        # A 2-D view with one row every `unit` elements, over all heads: index_select copies each row at once.
        unit = gcd(*x.stride()[:2])
        last = sum((size - 1) * stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
        rows = x.as_strided((last // unit + 1, x.shape[2]), (unit, 1))
        at = (self.table.key_head(each.set)[:, None] * x.stride(0) + at * x.stride(1)) // unit
        return rows.index_select(0, at.flatten()).view(len(at), 1, -1, x.shape[2])

    def _by_set(self, x: Shaped[Tensor, "H N ..."]) -> Shaped[Tensor, "X N g ..."]:
        return x.unflatten(0, (self.table.num_sets, -1)).transpose(1, 2).contiguous()

    def _by_block(self, x: Float[Tensor, "G M D"]) -> Float[Tensor, "G C K D"]:
        side = self.table.block[1]
        missing = -x.shape[1] % side
        return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(1, (-1, side)).contiguous()

    def _problems(self, sets: range, queries: range, rows: Float[Tensor, "X N g D"]) -> Iterator[Problems]:
        for owners, query, block, place, seen in self.table.batches(sets, queries, rows.shape[3], rows.element_size()):
            shown = None if seen is None else self._shown_pairs(owners[0], query, block, seen)
            for owner in owners:
                yield Problems(owner, query, block, place, shown)

    def _shown_pairs(
        self,
        owner: Int64[Tensor, " n"],
        query: Int64[Tensor, "n Q"],
        block: Int64[Tensor, "n L"],
        seen: UInt8[Tensor, "n Q L"],
    ) -> Bool[Tensor, "n Q LK"]:
        bound, side = self.table.bound, self.table.block[1]
        shown = (seen == 2)[..., None].repeat(1, 1, 1, side)
        heads = self.table.first_head(owner)
        assert isinstance(bound.pattern, Pattern)
        for some in (seen == 1).nonzero().split(max(1, _CELLS // side)):
            problem, row, entry = some.unbind(1)
            keys = block[problem, entry][:, None] * side + torch.arange(side)
            at = query[problem, row][:, None] + bound.q_offset, keys.clamp(max=bound.num_keys - 1) + bound.k_offset
            allowed = allowed_pairs(bound.pattern, bound.num_heads_global, heads[problem][:, None], *at)
            shown[problem, row, entry] = allowed & (keys < bound.num_keys)
        return shown.flatten(2)


def _stack_entries(entries: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(entries)) if len(entries) > 1 else entries[0].unsqueeze(0)  # without a copy


def gather_for_problems(x: Shaped[Tensor, "X S ..."], index: Int64[Tensor, "n L"]) -> Shaped[Tensor, "n 1 ..."]:
    """Return, for each problem i, the items index[i] of x.flatten(0, 1), concatenated along their first dim."""
    return x.flatten(0, 1).index_select(0, index.flatten()).view(len(index), 1, -1, *x.shape[3:])
