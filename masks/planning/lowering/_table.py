"""Attention over a table of selected key blocks: the problems that compute it, and their pairs.

Each row of a table lists the key blocks of one query block. Keys are gathered for each row, or queries are grouped by
key block. The table itself is read; no block list is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ...blocks import ListedBlocks, allowed_pairs
from ...core import Bound, Box, Every, Pattern, Progression
from ...orders import Layout
from ...patterns import require_row, require_tables
from ._term import Term

if TYPE_CHECKING:
    from ._key_lists import KeyLists

# T tables, R query blocks (rows), W entries of a row
# n problems: Q queries of g heads each, over L key blocks of K keys

GATHERED_BYTES = 8 << 20  # keys, values, masks or their gradients of a kernel call: these stay in a CPU cache
_MANY_QUERIES = 16  # query block side from which a row of the table is one problem
_FEW_QUERIES = 16  # number of queries up to which grouping by key block gains nothing
_KEYS_PER_LISTED_KEY = 2  # all keys are copied into blocks unless they are at least this many times the listed ones
_MOST_ROWS = 128  # query rows of a problem
_PARTS_BYTES = 128 << 20  # of the partial outputs that are held until they are merged
_PAIRS_AT_ONCE = 1 << 18  # evaluated together: bounds the memory


class Batch(NamedTuple):
    """n attention problems of equal shape. Each tensor in `sets` has its own kernel call; the other fields are shared.

    sets: for each kernel call, the index of the head set of each problem.
    query: index of each query in the call; for padding, that of some query.
    block: number of each key block, from the call's first key on; 0 for an entry that names no block.
    place: index of each query's result among the unmerged results of its head set; -1 for padding. If keys are
        gathered, each query has one result. Otherwise it has one for each of the W entries of its row: entry w of query
        i has index i * W + w, where i counts from the first query of the range that `TableProblems.portions` yields.
    seen: for each query and block, 2 if all pairs are allowed, 1 if the rule has to be evaluated, 0 if the query does
        not select the block; None if all pairs of every problem are allowed, apart from padding.
    """

    sets: list[Int64[Tensor, " n"]]
    query: Int64[Tensor, "n Q"]
    block: Int64[Tensor, "n L"]
    place: Int64[Tensor, "n Q"]
    seen: UInt8[Tensor, "n Q L"] | None

    def part(self, some: slice) -> Batch:
        seen = None if self.seen is None else self.seen[some]
        return Batch([each[some] for each in self.sets], self.query[some], self.block[some], self.place[some], seen)


class TableWork(NamedTuple):
    """Work of attention over a table, for all heads.

    computed_pairs: pairs that kernels compute, allowed or not.
    copied_keys: keys that are copied for the kernels, each with its value.
    moved_vectors: vectors read and written to gather q, k and v, and to merge outputs.
    """

    computed_pairs: int
    copied_keys: int
    copied_queries: int
    calls: int
    moved_vectors: int = 0


@dataclass(frozen=True, eq=False)
class TableProblems:
    """The attention problems of one batch entry, for tables that list the key blocks of each query block.

    A pair is allowed if the table lists its key block and bound.pattern, the pattern without the table, allows it. Row
    0 of a table is the block of the call's first query, key block 0 begins with the call's first key. Heads share a
    table in consecutive groups of equal size.

    bound: the call's sizes.
    block: tokens of (a query block, a key block).
    column: key block of entry w of row r of table t at [t, r, w]; -1 for none, or if by bounds none of
        its pairs is allowed.
    full: True where, by bounds, all pairs that the call has in the entry are allowed.
    low, high: bounds on the number of allowed pairs of each entry, for one head.
    """

    bound: Bound
    num_kv_heads: int
    block: tuple[int, int]
    column: Int64[Tensor, "T R W"]
    full: Bool[Tensor, "T R W"]
    low: Int64[Tensor, "T R W"]
    high: Int64[Tensor, "T R W"]

    @classmethod
    def of(
        cls, bound: Bound, num_kv_heads: int, rows: Int64[Tensor, "T R W"], block: tuple[int, int], first: int
    ) -> TableProblems:
        """Return the problems of one batch entry's tables of selected blocks, for the heads and tokens of a call.

        bound: the pattern without the table, with the call's sizes; the first key must begin a key block.
        rows: key blocks of each query block, ascending, padded with a large number; row 0 is query block `first`.
            Numbers of blocks count from position 0.
        block: tokens of (a query block, a key block).

        Raises ValueError if the number of tables does not divide the heads or the rows do not include the call's first
        query.
        """
        q_block, k_block = block
        require_tables(len(rows), bound.num_heads_global)
        require_row(q_block, first, rows.shape[1], bound.q_offset)
        rows = rows[tables_of_heads(bound, len(rows)), bound.q_offset // q_block - first :]
        shape, row = rows.shape, (bound.q_offset // q_block + torch.arange(rows.shape[1]))[None, :, None]
        q = _overlap(row * q_block, q_block, bound.q_offset, bound.num_queries)
        k = _overlap(rows * k_block, k_block, bound.k_offset, bound.num_keys)
        area = q[1] * k[1]
        assert isinstance(bound.pattern, Pattern)
        if isinstance(bound.pattern, Every):
            low = high = area
        else:
            head = torch.arange(shape[0])[:, None, None] * (bound.num_heads // shape[0]) + bound.head_offset
            head, *sides = (x.expand(shape).reshape(-1).contiguous() for x in (head, *q, *k))
            held = (area > 0).reshape(-1).nonzero().squeeze(1)
            box = Box(head, Progression(sides[0], 1, sides[1]), Progression(sides[2], 1, sides[3])).select(held)
            counted = bound.pattern.count(box, num_heads=bound.num_heads_global)
            low, high = (
                x.new_zeros(area.numel()).index_copy(0, held, x).view(shape) for x in (counted.low, counted.high)
            )
        there = (high > 0) & (area > 0)
        column = torch.where(there, rows - bound.k_offset // k_block, -1)
        return cls(bound, num_kv_heads, block, column, (low == area) & there, low, high)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.column, self.full, self.low, self.high))

    @cached_property
    def queries_per_problem(self) -> int:
        """Number of consecutive queries in a problem whose keys are gathered: those of a query block, or 1."""
        side = self.block[0]
        return side if side >= _MANY_QUERIES and self.bound.q_offset % side == 0 else 1

    @cached_property
    def gathers(self) -> bool:
        """True to gather the keys for each row of the table; False to group queries by key block."""
        return self.bound.num_queries <= _FEW_QUERIES or self.queries_per_problem > 1

    @cached_property
    def lists_few_keys(self) -> bool:
        """True if a forward gathers keys token by token, as in decoding, instead of copying all keys into blocks.

        It needs `gathers`, and at most half as many places for keys in the tables of all head sets as the call has keys
        over all key/value heads; unused places count. A backward copies all keys into blocks in any case.
        """
        _, rows, entries = self.column.shape
        read = self.num_sets * rows * entries * self.block[1]
        return self.gathers and _KEYS_PER_LISTED_KEY * read <= self.num_kv_heads * self.bound.num_keys

    @property
    def num_tables(self) -> int:
        return len(self.column)

    @cached_property
    def num_sets(self) -> int:
        return lcm(self.num_tables, self.num_kv_heads)

    @property
    def groups(self) -> int:
        """Number of query heads of a head set."""
        return self.bound.num_heads // self.num_sets

    def key_head(self, sets: Tensor) -> Tensor:
        return sets * self.num_kv_heads // self.num_sets

    def first_head(self, sets: Tensor) -> Tensor:
        """Return, for each of these head sets, the global index of this device's first head with the same table."""
        tables = sets * self.num_tables // self.num_sets
        return tables * (self.bound.num_heads // self.num_tables) + self.bound.head_offset

    @cached_property
    def row_of_query(self) -> Int64[Tensor, " N"]:
        bound, side = self.bound, self.block[0]
        return (bound.q_offset % side + torch.arange(bound.num_queries)) // side

    @cached_property
    def whole(self) -> Bool[Tensor, "T R W"]:
        """True for table entries that are `full` and whose key block has all its tokens."""
        return self.full & (self.column < self.bound.num_keys // self.block[1])

    def portions(self, width: int) -> Iterator[tuple[range, range]]:
        """Yield (range of head sets, range of queries): parts of the call that are computed in turn.

        If `gathers`, the whole call is one part. Otherwise the head sets of a part share a table, and its number of
        queries is limited, to bound the memory of unmerged outputs of `width` channels.
        """
        queries = self.bound.num_queries
        if self.gathers:
            yield range(self.num_sets), range(queries)
            return
        sets = self.num_sets // self.num_tables
        numbers = sets * self.groups * width * self.column.shape[2]
        at_once = max(_MOST_ROWS, _PARTS_BYTES // (4 * numbers))
        for first in range(0, self.num_sets, sets):
            for begin in range(0, queries, at_once):
                yield range(first, first + sets), range(begin, min(begin + at_once, queries))

    def batches(self, sets: range, queries: range, width: int, element_bytes: int) -> Iterator[Batch]:
        """Yield the attention problems of these head sets and queries, batched by shape.

        For one kernel call, the gathered keys, values and masks of a batch take at most GATHERED_BYTES, unless a single
        problem takes more.

        sets, queries: two ranges that `portions` yields.
        width, element_bytes: channels of keys and values, and bytes of each.
        """
        for kind in self._kinds_of_problems(sets, queries):
            step = self._problems_at_once(kind, width, element_bytes)
            for begin in range(0, len(kind.query), step):
                yield kind.part(slice(begin, begin + step))

    def of_largest_batch(self, width: int, element_bytes: int) -> TableProblems:
        """Return problems whose `batches` yields at most one batch of each portion, for a dry run of little work.

        `_kinds_of_problems` yields up to two kinds for a portion: problems without a mask, and problems with one. The
        kind that takes most memory in the first portion with problems is chosen; of each portion the first batch of
        this kind is kept, if it has one.
        """

        def taken(kind: Batch) -> int:  # keys and values, a mask and its sum, and the lists of all problems, twice
            (number, queries), keys = kind.query.shape, kind.block.shape[1] * self.block[1]
            mask = 0 if kind.seen is None else queries * (1 + self.groups * element_bytes)
            number = min(number, self._problems_at_once(kind, width, element_bytes))
            return number * keys * (2 * width * element_bytes + mask) + 2 * kind.block.nbytes

        portions = ([*self._kinds_of_problems(*each)] for each in self.portions(width))
        kinds = next(filter(None, portions), [])
        if not kinds:
            return self
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return _LargestBatches(**own, are_masked=max(kinds, key=taken).seen is not None)

    def _kinds_of_problems(self, sets: range, queries: range) -> Iterator[Batch]:
        return self._gathered_problems() if self.gathers else self._grouped_problems(sets, queries)

    def _problems_at_once(self, kind: Batch, width: int, element_bytes: int) -> int:
        numbers = kind.block.shape[1] * self.block[1] * (2 * width + kind.query.shape[1] * self.groups)
        return max(1, GATHERED_BYTES // (numbers * element_bytes))

    def pairs_of_tables(self) -> Int64[Tensor, " T"]:
        """Return the number of allowed pairs in each table, for one head."""
        return self.pairs_of_entries.sum((1, 2))

    def full_and_other_blocks(self) -> tuple[int, int]:
        """Return (number of fully allowed blocks, number of other blocks) in the tables.

        Listed blocks that by bounds have no allowed pair are not counted. Fully allowed blocks have all their keys (see
        `whole`), but may be of a query block that the call has only in part.
        """
        whole = int(self.whole.sum())
        return whole, int((self.column >= 0).sum()) - whole

    def work(self, width: int, element_bytes: int) -> TableWork:
        """Return the work of the call, for keys and values of `width` channels of `element_bytes` bytes."""
        total = TableWork(0, 0, 0, 0)
        for portion in self.portions(width):
            for each in self.batches(*portion, width, element_bytes):
                calls, queries = len(each.sets), self.groups * each.query.numel()
                keys = each.block.numel() * self.block[1]
                pairs = queries * each.block.shape[1] * self.block[1]
                found = TableWork(calls * pairs, calls * keys, calls * queries, calls)
                total = TableWork(*map(sum, zip(total, found, strict=True)))
        entries = 1 if self.gathers else self.column.shape[2]
        of_outputs = (entries + 2) * self.bound.num_heads * self.bound.num_queries
        return total._replace(moved_vectors=4 * total.copied_keys + 2 * total.copied_queries + of_outputs)

    @cached_property
    def pairs_of_entries(self) -> Int64[Tensor, "T R W"]:
        """Number of allowed pairs of each table entry, for one head; entries that bounds leave open are evaluated."""
        pairs = torch.where(self.column >= 0, self.low, 0)
        (q_block, k_block), bound = self.block, self.bound
        for some in (
            ((self.column >= 0) & (self.low != self.high))
            .nonzero()
            .split(max(1, _PAIRS_AT_ONCE // (q_block * k_block)))
        ):
            table, row, entry = some.unbind(1)
            q = (row * q_block - bound.q_offset % q_block)[:, None, None] + torch.arange(q_block)[:, None]
            k = (self.column[table, row, entry] * k_block)[:, None, None] + torch.arange(k_block)
            inside = (q >= 0) & (q < bound.num_queries) & (k < bound.num_keys)
            at = q.clamp(0, bound.num_queries - 1) + bound.q_offset, k.clamp(max=bound.num_keys - 1) + bound.k_offset
            head = (table * (bound.num_heads // self.num_tables) + bound.head_offset)[:, None, None]
            assert isinstance(bound.pattern, Pattern)
            seen = allowed_pairs(bound.pattern, bound.num_heads_global, head, *at) & inside
            pairs[table, row, entry] = seen.sum((1, 2))
        return pairs

    def _gathered_problems(self) -> Iterator[Batch]:
        """Yield up to two batches; a problem is a query, or a query block, and all its key blocks, which are gathered.

        One batch has the problems of rows whose entries are all `whole`; another has all others.
        """
        tables = torch.arange(self.num_sets) * self.num_tables // self.num_sets
        row = self.row_of_query[:: self.queries_per_problem]
        query = torch.arange(len(row))[:, None] * self.queries_per_problem + torch.arange(self.queries_per_problem)
        place = torch.where(query < self.bound.num_queries, query, -1)
        plain = self.whole.all(2)[tables[:, None], row]
        for is_plain in (True, False):
            owner, at = (plain == is_plain).nonzero().unbind(1)
            if not len(owner):
                continue
            listed = tables[owner], row[at]
            column = self.column[listed]
            seen = None
            if not is_plain:
                seen = ((column >= 0).byte() + self.whole[listed].byte())[:, None].expand(
                    -1, self.queries_per_problem, -1
                )
            yield Batch([owner], place[at].clamp(min=0), column.clamp(min=0), place[at], seen)

    def _grouped_problems(self, sets: range, queries: range) -> Iterator[Batch]:
        """Yield up to two batches; a problem is one key block and up to _MOST_ROWS queries that select it.

        sets, queries: the head sets, which share a table, and the queries to compute.

        One batch has the table entries that are `whole`; another has all others that list a block. A key block may be
        in both.
        """
        table, row = sets.start // len(sets), self.row_of_query[queries.start : queries.stop]
        column, whole = self.column[table, row], self.whole[table, row]
        there = column >= 0
        for which, all_seen in ((there & whole, True), (there & ~whole, False)):
            pairs = which.flatten().nonzero().squeeze(1)
            if not len(pairs):
                continue
            blocks, order = column.flatten()[pairs].sort(stable=True)
            block, counts = blocks.unique_consecutive(return_counts=True)
            height = min(_MOST_ROWS, 1 << max(0, int(counts.float().mean().ceil()) - 1).bit_length())
            # Pairs sorted by key block; those of a block fill whole problems of `height` places, the rest is -1.
            tiles = (counts + height - 1) // height
            before = (tiles.cumsum(0) - tiles).repeat_interleave(counts) * height
            inside = torch.arange(len(pairs)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
            place = torch.full((int(tiles.sum()) * height,), -1)
            place[before + inside] = pairs[order]
            place = place.view(-1, height)
            query = queries.start + place.clamp(min=0) // column.shape[1]
            seen = None if all_seen else (place >= 0).byte()[..., None]
            owners = [torch.full((len(query),), each) for each in sets]
            yield Batch(owners, query, block.repeat_interleave(tiles)[:, None], place, seen)


@dataclass(frozen=True, eq=False)
class _LargestBatches(TableProblems):
    """Table problems whose `batches` yields at most one batch of a portion.

    are_masked: True to yield the first batch with a mask, False to yield the first one without.
    """

    are_masked: bool

    def batches(self, sets: range, queries: range, width: int, element_bytes: int) -> Iterator[Batch]:
        for kind in self._kinds_of_problems(sets, queries):
            if (kind.seen is not None) == self.are_masked:
                yield kind.part(slice(self._problems_at_once(kind, width, element_bytes)))


@dataclass(frozen=True, eq=False, kw_only=True)
class TableTerm(Term):
    """Term of a plan that is computed from a table of keys or blocks, without block lists.

    problems: `KeyLists` for a table that `lists_keys` accepts; else `TableProblems`, only for engine "aten".
    """

    problems: TableProblems | KeyLists
    work: TableWork

    @classmethod
    def of_problems(cls, bound: Bound, rule: Pattern, problems: TableProblems | KeyLists, work: TableWork) -> TableTerm:
        """Return the term of all heads, queries and keys of a call, in natural order.

        rule: the pattern of the term's pairs, the table included.
        """
        return cls(
            rule=rule, shape="table", multiplicity=1, heads=tuple(range(bound.num_heads)),
            head_offset=bound.head_offset, num_heads_global=bound.num_heads_global,
            q=Layout(bound.num_queries), k=Layout(bound.num_keys), q_offset=bound.q_offset, k_offset=bound.k_offset,
            block_side=1, problems=problems, work=work,
        )  # fmt: skip

    @property
    def listed_blocks(self) -> ListedBlocks:  # type: ignore[override]
        """Number of computed pairs, as `plain` blocks of one pair; 0 blocks of other kinds."""
        return ListedBlocks(0, self.work.computed_pairs, 0)

    def counted_pairs(self) -> int:
        return int(self.pairs_of_heads().sum())

    def pairs_of_heads(self) -> Int64[Tensor, " H"]:
        """Return the number of allowed pairs of each head; of `KeyLists`, summed over the batch entries of `shape`."""
        each = self.problems.pairs_of_tables()
        return each.repeat_interleave(len(self.heads) // len(each))

    def block_counts(self) -> tuple[int, int]:
        """Return (number of full blocks, number of other listed blocks) over all heads, in blocks of the table."""
        users = len(self.heads) // self.problems.num_tables
        full, others = self.problems.full_and_other_blocks()
        return full * users, others * users


def _overlap(begin: Tensor, length: int, first: int, number: int) -> tuple[Tensor, Tensor]:
    """Return (start, length) of the part of [begin, begin + length) in [first, first + number); length 0 if empty."""
    start, stop = begin.clamp(min=first), (begin + length).clamp(max=first + number)
    return start, (stop - start).clamp(min=0)


def tables_of_heads(bound: Bound, num_tables: int) -> list[int]:
    """Return t table indices for this device's heads: item i is for the i-th of t equal groups of consecutive heads.

    If each table in use serves equally many heads, and all heads have one rule, t is the number of tables in use, each
    listed once. Else t is the number of this device's heads, and tables may repeat.

    bound: the rule of the pairs, with the heads of this device.
    num_tables: number of tables over the heads of all devices.
    """
    heads, num_heads = range(bound.head_offset, bound.head_offset + bound.num_heads), bound.num_heads_global
    tables = [head * num_tables // num_heads for head in heads]
    used = range(tables[0], tables[-1] + 1)
    each = bound.num_heads // len(used)
    even = all(tables.count(table) == each for table in used)
    assert isinstance(bound.pattern, Pattern)
    if even and (each == 1 or len({bound.pattern.for_head(head, num_heads) for head in heads}) == 1):
        return list(used)
    return tables
