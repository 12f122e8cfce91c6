"""Block lists of a rule: build them, count their pairs, estimate their lengths from a sample, join them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from ._block_search import Leaves, Sides, SlotIntervals, find_leaves, leaves_everywhere
from ._rule import BlockPlaces, Rule, mask_classes

# T tables (one for each distinct head), E listed blocks

_PAIRS_AT_ONCE = 1 << 18  # pairs evaluated at once when blocks are settled: fits a cache
_SLOTS_AT_ONCE = 1 << 17  # small tables are built together: fewer, larger tensor operations
_LEAVES_AT_ONCE = 1 << 21  # leaves held at once: beyond, they are summed by block
_UNDECIDED_AT_ONCE = 1 << 17  # undecided leaves held at once: beyond, tables and rows are built in halves
_LISTED_AT_ONCE = 1 << 19  # listed blocks packed, or put into tables, at once
_SAMPLED_BLOCKS = 1 << 14  # blocks sampled in addition to the first rows
_FEW_PAIRS = 1 << 16  # pairs in all blocks and tables: up to this many are evaluated, faster than bounds
_FIRST_ROWS = 4  # always sampled: global tokens there may see all keys
UNKNOWN = -1
LISTED_BYTES = 17  # per block of `Blocks`: four int32 and a bool


@dataclass(frozen=True)
class Blocks:
    """Block list: the non-empty blocks of some tables, as coordinates (table, row, column) in sorted order.

    Row r covers the query slots from r * q_block on, column c the key slots from c * k_block on. A list that is built
    with settle=False may also have empty blocks, and full ones with `full` False.

    heads: index of the table of each head; heads can share one.
    full: True if all q_block * k_block pairs of slots exist and are allowed.
    pairs: number of allowed pairs of each block, or UNKNOWN (-1).
    """

    num_q_slots: int
    num_k_slots: int
    q_block: int
    k_block: int
    heads: tuple[int, ...]
    table: Int32[Tensor, " E"]
    row: Int32[Tensor, " E"]
    column: Int32[Tensor, " E"]
    full: Bool[Tensor, " E"]
    pairs: Int32[Tensor, " E"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (number of query slots, number of key slots, queries of a block, keys of a block)."""
        return self.num_q_slots, self.num_k_slots, self.q_block, self.k_block

    @property
    def num_rows(self) -> int:
        return -(-self.num_q_slots // self.q_block)

    @property
    def num_columns(self) -> int:
        return -(-self.num_k_slots // self.k_block)

    @property
    def num_tables(self) -> int:
        return max(self.heads) + 1

    def places(self, index: Int64[Tensor, " n"]) -> BlockPlaces:
        """Return table, row and column of the listed blocks at these indices."""
        return BlockPlaces(self.table[index], self.row[index], self.column[index])

    def portions(self) -> list[tuple[range, slice]]:
        """Return consecutive parts of the list as [(range of tables, slice of the list), ...].

        A part has whole tables, and at most 2**19 blocks unless it is a single table.
        """
        after = torch.arange(1, self.num_tables + 1, dtype=torch.int32)
        stops = torch.searchsorted(self.table.contiguous(), after).tolist()
        found, first, begin, end = [], 0, 0, 0
        for table, stop in enumerate(stops):
            if stop - begin > _LISTED_AT_ONCE and table > first:
                found.append((range(first, table), slice(begin, end)))
                first, begin = table, end
            end = stop
        return [*found, (range(first, self.num_tables), slice(begin, end))]

    def with_heads(self, heads: tuple[int, ...]) -> Blocks:
        """Return a copy in which head h has table heads[h]."""
        return replace(self, heads=heads)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.table, self.row, self.column, self.full, self.pairs))


def build_blocks(rule: Rule, *, q_block: int, k_block: int, settle: bool = True) -> Blocks:
    """Return the list of the non-empty blocks of a rule, with one head for each of the rule's tables.

    q_block, k_block: slots of a block.
    settle: True evaluates pairs if bounds do not decide whether a block is empty, partial or full. If False, a listed
        block may have no allowed pair, and a full one may be listed as partial.
    """
    at_once = max(1, _SLOTS_AT_ONCE // max(rule.num_slots))
    rows = range(rule.in_blocks(q_block, k_block)[0])
    tables = range(len(rule.heads))
    built = [
        part
        for begin in tables[::at_once]
        for part in _block_fields_in_parts(rule, tables[begin : begin + at_once], rows, (q_block, k_block), settle)
    ]
    columns = (torch.cat(parts) for parts in zip(*built, strict=True))
    return Blocks(*rule.num_slots, q_block, k_block, tuple(tables), *columns)


def _block_fields_in_parts(
    rule: Rule, tables: range, rows: range, sides: Sides, settle: bool
) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of the tensors (table, row, column, full, pairs) of `Blocks`, in the order of the list.

    While bounds leave too many blocks undecided, the range of tables is halved, then that of query blocks.
    """
    found = _bounded_blocks(rule, tables, rows, sides, settle)
    if found is not None:
        yield _block_fields(rule, found, sides, settle)
    elif len(tables) > 1:
        for half in _halves(tables):
            yield from _block_fields_in_parts(rule, half, rows, sides, settle)
    else:
        for half in _halves(rows):
            yield from _block_fields_in_parts(rule, tables, half, sides, settle)


def _halves(some: range) -> tuple[range, range]:
    middle = (len(some) + 1) // 2
    return some[:middle], some[middle:]


def _bounded_blocks(rule: Rule, tables: range, rows: range, sides: Sides, settle: bool) -> Leaves | None:
    """Return bounds on the allowed pairs of each possibly non-empty block in these tables and query blocks.

    With `settle`, the result is None if bounds leave more than 2**17 leaves (parts of blocks) undecided, unless there
    is only one table and one query block.
    """
    found, held, doubts, may_stop = [], 0, 0, settle and len(tables) * len(rows) > 1
    for leaves in find_leaves(rule, tables, rows, sides):
        doubts += int((leaves.low != leaves.high).sum())
        if may_stop and doubts > _UNDECIDED_AT_ONCE:
            return None
        found.append(leaves)
        held += len(leaves.row)
        if held > _LEAVES_AT_ONCE:
            found = [join_leaves(found, rule.in_blocks(*sides))]
            held = max(0, 2 * len(found[0].row) - _LEAVES_AT_ONCE)
    return join_leaves(found, rule.in_blocks(*sides))


def _block_fields(rule: Rule, found: Leaves, sides: Sides, settle: bool) -> tuple[Tensor, ...]:
    """Return the tensors (table, row, column, full, pairs) of `Blocks`, from bounds on the pairs of each block.

    settle: True evaluates the blocks whose bounds do not decide between empty, partial and full, writes their counts to
        `found` in place, and leaves out empty blocks.
    """
    (_, _, _, low, high), whole = found, sides[0] * sides[1]
    if settle:
        doubtful = ((low == 0) | ((low < whole) & (high >= whole))).nonzero().squeeze(1)
        places = BlockPlaces(*(x[doubtful] for x in found[:3]))
        low[doubtful] = high[doubtful] = count_pairs(rule, places, (*rule.num_slots, *sides))
        keep = high > 0
        found = Leaves(*(x[keep] for x in found))
    table, row, column, low, high = found
    return table.int(), row.int(), column.int(), low == whole, torch.where(low == high, low, UNKNOWN).int()


def count_pairs(rule: Rule, places: BlockPlaces, shape: tuple[int, int, int, int]) -> Int64[Tensor, " n"]:
    """Return the number of allowed pairs of each block; of blocks known to have equal masks, only one is evaluated.

    shape: (number of query slots, number of key slots, queries of a block, keys of a block).
    """
    number, one_of_each = mask_classes(rule, places, shape)
    # Into one tensor: small results kept between large temporaries would fragment the heap.
    counts, begin = torch.zeros(len(one_of_each), dtype=torch.int64), 0
    for mask in dense_masks(rule, BlockPlaces(*(each[one_of_each] for each in places)), shape):
        counts[begin : begin + len(mask)] = mask.sum((1, 2))
        begin += len(mask)
    return counts[number]


def dense_masks(
    rule: Rule, places: BlockPlaces, shape: tuple[int, int, int, int]
) -> Iterator[Bool[Tensor, "n q_block k_block"]]:
    """Yield the dense masks of these blocks, several blocks at a time: True if allowed, False beyond the last slot.

    shape: (number of query slots, number of key slots, queries of a block, keys of a block).
    """
    num_q, num_k, q_block, k_block = shape
    for part in torch.arange(len(places.table)).split(max(1, _PAIRS_AT_ONCE // (q_block * k_block))):
        q = (places.row[part, None].long() * q_block + torch.arange(q_block))[:, :, None]
        k = (places.column[part, None].long() * k_block + torch.arange(k_block))[:, None, :]
        inside = (q < num_q) & (k < num_k)
        tables = places.table[part, None, None].long()
        yield rule.allowed(tables, q.clamp(max=num_q - 1), k.clamp(max=num_k - 1)) & inside


def join_leaves(found: list[Leaves], shape: tuple[int, int]) -> Leaves:
    """Return one leaf for each block, sorted by coordinates, with the sums of the bounds of the block's leaves (parts).

    shape: (number of query blocks, number of key blocks).
    """
    table, row, column, low, high = map(torch.cat, zip(*found, strict=True))
    num_rows, num_columns = shape
    key, order = ((table * num_rows + row) * num_columns + column).sort()
    key, index = key.unique_consecutive(return_inverse=True)
    low, high = (torch.zeros_like(key).index_add_(0, index, bound[order]) for bound in (low, high))
    return Leaves(key // (num_rows * num_columns), key // num_columns % num_rows, key % num_columns, low, high)


class ListedBlocks(NamedTuple):
    """Numbers of listed blocks by kind of row of blocks; the speed of kernels depends on the kind.

    runs: blocks in rows whose listed columns are consecutive.
    plain: blocks in other rows, if all existing pairs in the listed blocks of the row are allowed.
    masked: blocks in the remaining rows.

    In `estimate_blocks` they are means over tables; `Term.listed_blocks` and its overrides say what they sum.
    """

    runs: float
    plain: float
    masked: float

    @property
    def blocks(self) -> float:
        return float(sum(self))


def estimate_blocks(rule: Rule, *, q_block: int, k_block: int) -> ListedBlocks:
    """Return estimates of the mean number of listed blocks of a table, by kind of row.

    q_block, k_block: sides of a block, in slots.

    They come from a sample of tables and rows, and are exact for small masks. Blocks that bounds leave undecided count
    as listed, so estimates tend to be too high.
    """
    (num_q, num_k), (rows, columns) = rule.num_slots, rule.in_blocks(q_block, k_block)
    if len(rule.heads) * rows * columns * q_block * k_block <= _FEW_PAIRS:
        tables, first, others = torch.arange(len(rule.heads)), rows, torch.arange(0)
        everywhere = torch.cartesian_prod(tables, torch.arange(rows), torch.arange(columns))
        tiles = dense_masks(rule, BlockPlaces(*everywhere.unbind(1)), (num_q, num_k, q_block, k_block))
        pairs = torch.cat([each.sum((1, 2)) for each in tiles])
        some = pairs.nonzero().squeeze(1)
        table, row, column = everywhere[some].unbind(1)
        found = Leaves(table, row, column, pairs[some], pairs[some])
    else:
        tables, first = _even_sample(len(rule.heads), 4), min(rows, _FIRST_ROWS)
        others = first + _even_sample(rows - first, max(8, _SAMPLED_BLOCKS // (columns * len(tables))))
        sampled = range(rows) if first + len(others) == rows else torch.cat([torch.arange(first), others])
        leaves = leaves_everywhere(rule, tables.tolist(), SlotIntervals.of_blocks(sampled, q_block), (q_block, k_block))
        # Sum the leaves of a block before the test for a full block.
        found = join_leaves(list(leaves), (rows, columns))
    height = (num_q - found.row * q_block).clamp(max=q_block)
    width = (num_k - found.column * k_block).clamp(max=k_block)
    # A block that ends after the last slot counts as full if all its existing pairs are allowed.
    flat_row, is_partial = found.table * rows + found.row, found.low < height * width
    listed_row, index, length = flat_row.unique_consecutive(return_inverse=True, return_counts=True)
    masked = torch.zeros(len(listed_row), dtype=torch.int64).index_add_(0, index, is_partial.long()) > 0
    last = length.cumsum(0) - 1
    run = found.column[last] - found.column[last - length + 1] == length - 1
    each = torch.where(listed_row % rows < first, 1.0, (rows - first) / max(len(others), 1)) * length / len(tables)
    return ListedBlocks(*(float(each[kind].sum()) for kind in (run, ~run & ~masked, ~run & masked)))


def _even_sample(size: int, number: int) -> Tensor:
    """Return ascending indices below `size`: all if these are at most `number`, else a sample of at most `number`.

    The sample has an index of each of `number` equal intervals, at aperiodic offsets. Neighbouring intervals may give
    the same index, which is returned once.
    """
    if size <= number:
        return torch.arange(size)
    stretch = torch.arange(number, dtype=torch.float64)
    return ((stretch + (stretch * 0.6180339887).frac()) * size / number).long().unique()


def repeat_blocks(blocks: Blocks, *, classes: int, times: int) -> Blocks:
    """Return the block list of a sequence that is `times` times as long: copies of `blocks` along the diagonal.

    The rule must repeat along the sequence, and allow no pair between repetitions. Each residue class of the order must
    fill whole blocks.

    classes: number of residue classes of a residue-major order, 1 for the order of positions. Copies are placed
        within each class.
    """

    # The longer order, too, has its classes one after the other.
    def spread(index: Tensor, total: int) -> Tensor:
        each = total // classes
        copies = torch.arange(times)[:, None] * each
        return (index // each * (each * times) + index % each + copies).flatten()

    row, column = spread(blocks.row.long(), blocks.num_rows), spread(blocks.column.long(), blocks.num_columns)
    table = blocks.table.long().repeat(times)
    rows, columns = blocks.num_rows * times, blocks.num_columns * times
    order = ((table * rows + row) * columns + column).argsort()
    return Blocks(
        blocks.num_q_slots * times,
        blocks.num_k_slots * times,
        blocks.q_block,
        blocks.k_block,
        blocks.heads,
        table[order].int(),
        row[order].int(),
        column[order].int(),
        blocks.full.repeat(times)[order],
        blocks.pairs.repeat(times)[order],
    )


def join_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Return block lists of equal shape as one list; a single part is returned unchanged.

    The heads of the result are those of the first part, then those of the second, and so on. But if every part has a
    single table, the result has one head for each part, whatever the parts' numbers of heads.
    """
    if len(parts) == 1:
        return parts[0]
    shared = all(part.num_tables == 1 for part in parts)
    firsts = [0, *accumulate(part.num_tables for part in parts)]
    heads = [first + table for first, part in zip(firsts, parts, strict=False) for table in part.heads]
    tables = [part.table + first for first, part in zip(firsts, parts, strict=False)]
    row, column, full, pairs = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("row", "column", "full", "pairs")
    )
    given = tuple(range(len(parts))) if shared else tuple(heads)
    return Blocks(*parts[0].shape, given, torch.cat(tables), row, column, full, pairs)
