"""Attention over tables of selected key blocks, where each row lists the key blocks of one block of queries.

Keys are gathered for each row of the table, or queries are grouped by key block. This runs directly on the table,
without a plan; nothing that depends on its values is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm

import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor
from torch.nn.functional import pad

from ...masks.blocks import allowed_pairs
from ...masks.core import Box, Pattern, Progression, plans
from ...masks.patterns import Selection, names, require_row, require_tables
from .._call import Call, tensors_of
from .._merge import WholeRows, shares_of, sum_dtype
from .._operands import added
from ..kernels._kernel import flash_backward, flash_forward
from ._tile_blocks import GATHERED_BYTES

# H query heads, G key/value heads, T tables, N queries, M keys, D head dim, W entries of a row, C blocks of K keys
# X sets of g query heads that share a table and a key/value head
# n problems: Q queries, g rows each, over L blocks

_MANY_QUERIES = 16  # query block side from which a row of the table is one problem
_FEW_QUERIES = 16  # number of queries up to which grouping by key block gains nothing
_FEW_KEYS = 8  # key block side up to which grouping by key block gains nothing
_READS_OF_A_COPY = 2  # memory accesses per key that is copied into blocks: a read and a write
_MOST_ROWS = 128  # query rows of a problem
_PARTS_BYTES = 128 << 20  # of the partial outputs that are held until they are merged
_CELLS = 1 << 18  # pairs evaluated at once

_Blocks = tuple[Tensor, Tensor]  # keys and values: (G, C, K, D) in blocks, or (G, M, D) where few are read
# Problems of equal shape before their masks are evaluated: (index of the head set of each problem, one tensor for each
# set that shares the other entries; query, block and place as in Problems; for each query and block, 2 if all pairs are
# visible, 1 if the rule decides, 0 if the query does not select the block; None: all pairs of every block).
_Calls = tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor | None]


@plans
def selected_rows(key: Call, selection: Selection, bindings: Sequence[Tensor], batch: int) -> list[QueryRows]:
    """Prepare a call with a table of selected key blocks: return one QueryRows for each batch entry.

    A QueryRows computes attention over such a table. A single one is returned, for all entries, if neither tables nor
    rules differ between entries. key: sizes of the call. selection: the call's pattern, split into the table and the
    rule that further restricts its pairs. bindings: run-time tensors of the pattern, sorted by name. batch: number of
    batch entries. Raises ValueError unless the number of entries in the table, and in the rule, is 1 or `batch`.
    """
    leaf, rest = selection.leaf, selection.rest
    (table,) = tensors_of(key, leaf, bindings)
    rows, first = leaf.rows(table, key.extent)
    rule = rest.resolve(dict(zip(names(rest), tensors_of(key, rest, bindings), strict=True)), key.extent)
    rule.require_entries(batch)
    if len(rows) not in (1, batch):
        raise ValueError(
            f"selected blocks must have one table, or one for each of {batch} batch entries; got {len(rows)}"
        )
    entries = range(max(len(rows), rule.num_entries()))
    return [QueryRows.of(key, rule.entry(each), rows[each % len(rows)], leaf.block, first) for each in entries]


@dataclass(frozen=True, eq=False)
class Problems:
    """n attention problems of equal shape: Q queries, of g heads each, over L key blocks of K keys.

    set: index of the head set of each problem; a head set is the g query heads that share a table and a key/value head.
    query: index of each query in the call. block: index of each key block. place: index of each query's result among
    the results of its head set before their merge, which has one for each query or one for each query and selected
    block; -1 for padding. shown: True for visible (query, key) pairs; None if every query sees every key.
    """

    set: Int64[Tensor, " n"]
    query: Int64[Tensor, "n Q"]
    block: Int64[Tensor, "n L"]
    place: Int64[Tensor, "n Q"]
    shown: Bool[Tensor, "n Q LK"] | None

    def rows(self, x: Shaped[Tensor, "X N g ..."]) -> Shaped[Tensor, "n 1 Qg ..."]:
        return picked(x, self.set[:, None] * x.shape[1] + self.query)

    def places(self, begin: Int64[Tensor, " n"], index: Int64[Tensor, "n Q"]) -> tuple[Tensor, Tensor | slice]:
        """Return (places, selector), to scatter the results of all queries except padding.

        The selector chooses the queries that are not padding among the n * Q flattened queries; it is slice(None) if
        none is padding. places: begin[:, None] + index, flattened, for the chosen queries.
        """
        place = (begin[:, None] + index).flatten()
        if int(self.place.min()) >= 0:
            return place, slice(None)
        there = (self.place >= 0).flatten()
        return place[there], there

    def mask(self, groups: int, dtype: torch.dtype) -> Float[Tensor, "n 1 Qg LK"] | None:
        return None if self.shown is None else added(self.shown, dtype).repeat_interleave(groups, 1).unsqueeze(1)

    def clear_rows(self, x: Shaped[Tensor, "n 1 Qg ..."], groups: int, value: float) -> Tensor:
        """Return x with `value` in the rows of padding and of queries that see no key.

        groups: g, the number of heads, and so of rows of x, for each query.
        """
        if self.shown is None and int(self.place.min()) >= 0:
            return x
        blind = self.place < 0 if self.shown is None else (self.place < 0) | ~self.shown.any(2)
        return x.masked_fill(
            blind.repeat_interleave(groups, 1)[:, None].view(*x.shape[:3], *[1] * (x.dim() - 3)), value
        )

    def clear_keys(self, x: Float[Tensor, "n 1 LK D"]) -> Tensor:
        """Return x, the keys or values of each problem, with zeros for keys that none of the problem's queries sees."""
        return x if self.shown is None else x.masked_fill(~self.shown.any(1)[:, None, :, None], 0.0)


@dataclass(frozen=True, eq=False)
class QueryRows:
    """Attention in which a table lists the key blocks of each block of queries; for batch entries with equal masks.

    A pair is allowed if the table lists its key block and `rule`, the pattern without the table, allows the pair.
    key: sizes of the call. block: tokens of (a query block, a key block). column[t, r, w]: entry w of row r of table t,
    a key block, or -1 for none or where `rule` allows no pair; full[t, r, w]: True if `rule` allows all its pairs. Row
    0 is the block of the call's first query, key block 0 begins with the call's first key. Heads share a table in
    consecutive groups of equal size.
    """

    key: Call
    rule: Pattern
    block: tuple[int, int]
    column: Int64[Tensor, "T R W"]
    full: Bool[Tensor, "T R W"]

    @classmethod
    def of(
        cls, key: Call, rule: Pattern, rows: Int64[Tensor, "T R W"], block: tuple[int, int], first: int
    ) -> QueryRows:
        """Make QueryRows from the tables of selected blocks of one batch entry, for the heads and tokens of a call.

        rows: key blocks of each query block, ascending, padded with a large number; row 0 is query block `first`.
        Numbers of blocks count from position 0. block: tokens of (a query block, a key block). Raises ValueError if the
        number of tables does not divide the heads or the rows do not include the call's first query.
        """
        q_block, k_block = block
        require_tables(len(rows), key.num_heads_global)
        require_row(q_block, first, rows.shape[1], key.q_offset)
        rows = _of_heads(key, rule, rows)[:, key.q_offset // q_block - first :]
        shape, row = rows.shape, (key.q_offset // q_block + torch.arange(rows.shape[1]))[None, :, None]
        head = torch.arange(shape[0])[:, None, None] * (key.num_heads // shape[0]) + key.head_offset
        q = _within(row * q_block, q_block, key.q_offset, key.num_queries)
        k = _within(rows * k_block, k_block, key.k_offset, key.num_keys)
        head, *sides = (x.expand(shape).reshape(-1).contiguous() for x in (head, *q, *k))
        box = Box(head, Progression(sides[0], 1, sides[1]), Progression(sides[2], 1, sides[3]))
        bounds = rule.count(box, num_heads=key.num_heads_global)
        there = ((bounds.high > 0) & (box.area > 0)).view(shape)
        column = torch.where(there, rows - key.k_offset // k_block, -1)
        return cls(key, rule, block, column, (bounds.low == box.area).view(shape) & there)

    def forward(
        self, q: Float[Tensor, "b H N D"], k: Float[Tensor, "b G M D"], v: Float[Tensor, "b G M D"], scale: float
    ) -> tuple[Float[Tensor, "b H N D"], Float[Tensor, "b H N"]]:
        """(out, natural lse) of b batch entries, in float32 or wider; a query without keys has output 0, lse -inf."""
        found = [self._forward(q[entry], k[entry], v[entry], scale) for entry in range(len(q))]
        out, lse = zip(*found, strict=True)
        return torch.stack(out), torch.stack(lse)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        rows, wide = self._by_set(q), sum_dtype(q)
        blocks = (k, v) if self._reads_few else (self._by_block(k), self._by_block(v))
        out = torch.empty_like(rows, dtype=wide, memory_format=torch.contiguous_format)
        lse = rows.new_empty(rows.shape[:3], dtype=wide)
        for sets, queries in self._portions(rows):
            entries = 1 if self._gathers else self.column.shape[2]
            shape = (len(sets), len(queries), entries, rows.shape[2])
            parts, lses = (
                rows.new_zeros(*shape, rows.shape[3], dtype=wide),
                rows.new_full(shape, -torch.inf, dtype=wide),
            )
            for each in self._problems(sets, queries, rows):
                found, found_lse = self._attend(each, rows, blocks, scale)
                place, there = each.places((each.set - sets.start) * len(queries) * entries, each.place)
                parts.flatten(0, 2)[place] = found.flatten(0, 1)[there].to(wide)
                lses.flatten(0, 2)[place] = found_lse.flatten(0, 1)[there].to(wide)
            at = slice(sets.start, sets.stop), slice(queries.start, queries.stop)
            if entries == 1:
                out[at], lse[at] = parts[:, :, 0], lses[:, :, 0]
            else:
                shares, lse[at] = shares_of(lses, 2)
                out[at] = parts.mul_(shares.unsqueeze(-1)).sum(2)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _attend(self, each: Problems, rows: Tensor, blocks: _Blocks, scale: float) -> tuple[Tensor, Tensor]:
        groups, read = rows.shape[2], self._few_keys if self._reads_few else self._keys
        keys, values = (each.clear_keys(read(each, x)) for x in blocks)
        own = each.clear_rows(each.rows(rows), groups, 0.0)
        out, lse = flash_forward(own, keys, values, scale=scale, mask=each.mask(groups, own.dtype))
        lse = each.clear_rows(lse, groups, -torch.inf)
        return out.view(*each.query.shape, groups, -1), lse.view(*each.query.shape, groups)

    def backward(
        self, q: Float[Tensor, "b H N D"], k: Float[Tensor, "b G M D"], v: Float[Tensor, "b G M D"], whole: WholeRows,
        scale: float,
    ) -> tuple[Float[Tensor, "b H N D"], Float[Tensor, "b G M D"], Float[Tensor, "b G M D"]]:  # fmt: skip
        """(dq, dk, dv) of b batch entries, in float32 or wider.

        whole: out, lse and their gradients, of rows that may have more keys than the table selects.
        """
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
                place, there = each.places(each.set * rows.shape[1], each.query)
                of_rows = found[0].view(*each.query.shape, groups, -1)
                dq.flatten(0, 1).index_add_(0, place, of_rows.flatten(0, 1)[there].to(wide))
                at = (self._key_head(each.set)[:, None] * blocks[0].shape[1] + each.block).flatten()
                for total_grad, part in zip((dk, dv), found[1:], strict=True):
                    part = each.clear_keys(part).reshape(len(at), *blocks[0].shape[2:])
                    total_grad.flatten(0, 1).index_add_(0, at, part.to(wide))
        tokens = k.shape[1]
        dk, dv = (x.flatten(1, 2)[:, :tokens] for x in (dk, dv))
        return dq.transpose(1, 2).flatten(0, 1), dk, dv

    @cached_property
    def _unit(self) -> int:
        """Number of consecutive queries in a problem whose keys are gathered: those of a query block, or 1."""
        side = self.block[0]
        return side if side >= _MANY_QUERIES and self.key.q_offset % side == 0 else 1

    @cached_property
    def _gathers(self) -> bool:
        """True to gather the keys for each row of the table; False to group queries by key block."""
        few = self.key.num_queries <= _FEW_QUERIES or self.block[1] <= _FEW_KEYS
        return few or self._unit > 1

    @cached_property
    def _reads_few(self) -> bool:
        """True if copying all keys into blocks would cost more than reading the listed ones, as in a decoding step."""
        key, (_, rows, entries) = self.key, self.column.shape
        read = self._num_sets * rows * entries * self.block[1]
        return self._gathers and _READS_OF_A_COPY * read <= key.num_kv_heads * key.num_keys

    @cached_property
    def _num_sets(self) -> int:
        return lcm(self._num_tables, self.key.num_kv_heads)

    def _key_head(self, sets: Tensor) -> Tensor:
        return sets * self.key.num_kv_heads // self._num_sets

    def _keys(self, each: Problems, x: Float[Tensor, "G C K D"]) -> Float[Tensor, "n 1 LK D"]:
        return picked(x, self._key_head(each.set)[:, None] * x.shape[1] + each.block)

    def _few_keys(self, each: Problems, x: Float[Tensor, "G M D"]) -> Float[Tensor, "n 1 LK D"]:
        """Gather the key blocks of each problem from x (keys or values); its last token fills an incomplete block."""
        side = self.block[1]
        at = (each.block[..., None] * side + torch.arange(side)).flatten(1).clamp(max=x.shape[1] - 1)
        x = x if x.stride(2) == 1 and x.stride(1) else x.contiguous()
        # A 2-D view with one row every `unit` elements, over all heads: index_select copies each row at once.
        unit = gcd(*x.stride()[:2])
        last = sum((size - 1) * stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
        rows = x.as_strided((last // unit + 1, x.shape[2]), (unit, 1))
        at = (self._key_head(each.set)[:, None] * x.stride(0) + at * x.stride(1)) // unit
        return rows.index_select(0, at.flatten()).view(len(at), 1, -1, x.shape[2])

    def _by_set(self, x: Shaped[Tensor, "H N ..."]) -> Shaped[Tensor, "X N g ..."]:
        return x.unflatten(0, (self._num_sets, -1)).transpose(1, 2).contiguous()

    def _by_block(self, x: Float[Tensor, "G M D"]) -> Float[Tensor, "G C K D"]:
        side = self.block[1]
        missing = -x.shape[1] % side
        return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(1, (-1, side)).contiguous()

    @cached_property
    def _row_of_query(self) -> Int64[Tensor, " N"]:
        key, side = self.key, self.block[0]
        return (key.q_offset % side + torch.arange(key.num_queries)) // side

    @property
    def _num_tables(self) -> int:
        return len(self.column)

    @cached_property
    def _whole(self) -> Bool[Tensor, "T R W"]:
        """True for table entries whose key block has all its tokens and allows every pair with the query block."""
        return self.full & ((self.column + 1) * self.block[1] <= self.key.num_keys)

    def _portions(self, rows: Float[Tensor, "X N g D"]) -> Iterator[tuple[range, range]]:
        """Yield (range of head sets, range of queries): parts of the call that are computed in turn.

        Together they cover all head sets and queries; computing in parts bounds the memory of unmerged outputs. A head
        set is the g query heads that share a table and a key/value head. If queries are grouped by key block, the sets
        of a range share a table.
        """
        queries = rows.shape[1]
        if self._gathers:
            yield range(self._num_sets), range(queries)
            return
        sets = self._num_sets // self._num_tables
        numbers = sets * rows.shape[2] * rows.shape[3] * self.column.shape[2]
        at_once = max(_MOST_ROWS, _PARTS_BYTES // (4 * numbers))
        for first in range(0, self._num_sets, sets):
            for begin in range(0, queries, at_once):
                yield range(first, first + sets), range(begin, min(begin + at_once, queries))

    def _problems(self, sets: range, queries: range, rows: Float[Tensor, "X N g D"]) -> Iterator[Problems]:
        """Yield the attention problems of these head sets and queries, batched by shape.

        The gathered keys, values and masks of a batch take at most GATHERED_BYTES, unless a single problem takes more.
        """
        for owners, query, block, place, seen in self._gathered() if self._gathers else self._grouped(sets, queries):
            bytes_each = block.shape[1] * self.block[1] * (2 * rows.shape[3] + query.shape[1] * rows.shape[2])
            at_once = max(1, GATHERED_BYTES // (bytes_each * rows.element_size()))
            for begin in range(0, len(query), at_once):
                some = slice(begin, begin + at_once)
                shown = None if seen is None else self._shown(owners[0][some], query[some], block[some], seen[some])
                for owner in owners:
                    yield Problems(owner[some], query[some], block[some], place[some], shown)

    def _gathered(self) -> Iterator[_Calls]:
        """Yield groups of problems whose keys are gathered: a query, or query block, over all its key blocks.

        First come problems of which every pair is allowed, then all others.
        """
        tables = torch.arange(self._num_sets) * self._num_tables // self._num_sets
        row = self._row_of_query[:: self._unit]
        query = torch.arange(len(row))[:, None] * self._unit + torch.arange(self._unit)
        place = torch.where(query < self.key.num_queries, query, -1)
        plain = self._whole.all(2)[tables][:, row]
        for which in (plain, ~plain):
            owner, at = which.nonzero().unbind(1)
            if not len(owner):
                continue
            column, whole = (x[tables[owner], row[at]] for x in (self.column, self._whole))
            seen = None if which is plain else ((column >= 0).byte() + whole.byte())[:, None].expand(-1, self._unit, -1)
            yield [owner], place[at].clamp(min=0), column.clamp(min=0), place[at], seen

    def _grouped(self, sets: range, queries: range) -> Iterator[_Calls]:
        """Yield groups of problems, each of one key block and up to _MOST_ROWS queries that select it.

        sets, queries: the head sets, which share a table, and the queries to compute. First come blocks of which every
        pair is allowed, then partly allowed ones.
        """
        table, row = sets.start // len(sets), self._row_of_query[queries.start : queries.stop]
        column, whole = self.column[table, row], self._whole[table, row]
        there = column >= 0
        for which in (there & whole, there & ~whole):
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
            query = queries.start + place.clamp(min=0) // column.shape[1]
            seen = None if bool(whole.flatten()[pairs[0]]) else (place >= 0).byte()[..., None]
            owners = [torch.full((len(query),), each) for each in sets]
            yield owners, query, block.repeat_interleave(tiles)[:, None], place, seen

    def _shown(
        self,
        owner: Int64[Tensor, " n"],
        query: Int64[Tensor, "n Q"],
        block: Int64[Tensor, "n L"],
        seen: UInt8[Tensor, "n Q L"],
    ) -> Bool[Tensor, "n Q LK"]:
        key, side = self.key, self.block[1]
        shown = (seen == 2)[..., None].repeat(1, 1, 1, side)
        heads = owner * self._num_tables // self._num_sets * (key.num_heads // self._num_tables)
        for some in (seen == 1).nonzero().split(max(1, _CELLS // side)):
            problem, row, entry = some.unbind(1)
            keys = block[problem, entry][:, None] * side + torch.arange(side)
            at = query[problem, row][:, None] + key.q_offset, keys.clamp(max=key.num_keys - 1) + key.k_offset
            head = heads[problem][:, None] + key.head_offset
            allowed = allowed_pairs(self.rule, key.num_heads_global, head, *at)
            shown[problem, row, entry] = allowed & (keys < key.num_keys)
        return shown.flatten(2)


def picked(x: Shaped[Tensor, "X S ..."], index: Int64[Tensor, "n L"]) -> Shaped[Tensor, "n 1 ..."]:
    """Gather the entries index[i] of x.flatten(0, 1) for each problem i, concatenated along their first dim."""
    found = x.flatten(0, 1).index_select(0, index.flatten())
    return found.unflatten(0, index.shape).flatten(1, 2).unsqueeze(1)


def _within(begin: Tensor, length: int, first: int, number: int) -> tuple[Tensor, Tensor]:
    """(start, length) of the intersection of [begin, begin + length) and [first, first + number); length 0 if empty."""
    start, stop = begin.clamp(min=first), (begin + length).clamp(max=first + number)
    return start, (stop - start).clamp(min=0)


def _of_heads(key: Call, rule: Pattern, rows: Int64[Tensor, "T R W"]) -> Int64[Tensor, "t R W"]:
    """Select the tables of this device's heads from the T tables of all heads.

    The result has t tables, each for num_heads / t consecutive heads: one for each distinct table if all are used by
    equally many heads and `rule` is equal for all heads; else t = num_heads, with copies.
    """
    heads = range(key.head_offset, key.head_offset + key.num_heads)
    tables = [head * len(rows) // key.num_heads_global for head in heads]
    used = range(tables[0], tables[-1] + 1)
    each = key.num_heads // len(used)
    even = all(tables.count(table) == each for table in used)
    if even and (each == 1 or len({rule.for_head(head, key.num_heads_global) for head in heads}) == 1):
        return rows[used.start : used.stop]
    return rows[tables]
