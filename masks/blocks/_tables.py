"""Conversion of block lists to a torch BlockMask, and to compressed bytes and back."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..core import MaskMod, device_kind
from ._blocks import Blocks

_LEVEL = 1  # of zlib; higher levels take several times as long and save little

# B batch entries (1 if all have equal tables), H mask heads (1 if all heads share a table), L = B * H,
# R rows, C columns, W largest number of blocks in a row, T tables, E listed blocks


def to_block_mask(blocks: Blocks, mask_mod: MaskMod, device: torch.device, *, batch: int = 1) -> BlockMask:
    """Return a block list as a torch BlockMask, with index tables by query block and by key block.

    With batch > 1, the heads of `blocks` are those of batch entry 0, then those of entry 1, and so on; the index tables
    have shape (batch, heads, rows, width).

    On CPU each row of a table has an entry for every block along the other axis, as the compiled kernel requires. The
    rows overlap in memory: past a row's count come zeros or entries of later rows, all of them valid block indices. On
    other devices partial and full tables are as wide as the longest row of either.
    """
    rows, columns = blocks.num_rows, blocks.num_columns
    by_row = _index_tables(blocks, blocks.row, blocks.column, (rows, columns), device)
    by_column = _index_tables(blocks, blocks.column, blocks.row, (columns, rows), device)
    kv_num, kv, full_kv_num, full_kv = (_split_by_entry(table, batch) for table in by_row)
    q_num, q, full_q_num, full_q = (_split_by_entry(table, batch) for table in by_column)
    return BlockMask(
        seq_lengths=(blocks.num_q_slots, blocks.num_k_slots),
        kv_num_blocks=kv_num,
        kv_indices=kv,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv,
        q_num_blocks=q_num,
        q_indices=q,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q,
        BLOCK_SIZE=(blocks.q_block, blocks.k_block),
        mask_mod=mask_mod,
    )


def table_bytes(mask: BlockMask) -> int:
    """Return the bytes of memory that the index tables of a BlockMask occupy."""
    tables = (
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
    )  # fmt: skip
    return sum(table.untyped_storage().nbytes() for table in tables if table is not None)


def _index_tables(
    blocks: Blocks, major: Int32[Tensor, " E"], minor: Int32[Tensor, " E"], shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (partial counts, partial indices, full counts, full indices) of a BlockMask.

    Counts have shape (L, R), indices (L, R, W), on CPU (L, R, shape[1]). Row i lists the `minor` indices of the blocks
    with `major` index i.

    major, minor: row and column of each listed block for tables by query block, the reverse for tables by key block.
    shape: (number of major indices, number of minor indices).
    """
    counts = _block_counts(blocks, major, shape[0])
    widths = [max(1, int(count.max())) for count in counts]
    if device_kind(device).flex_trains:
        # torch 2.11's Triton kernels read the full table with the partial table's shape and strides.
        widths = [max(widths)] * 2
    result: list[Tensor] = []
    for full, (count, width) in enumerate(zip(counts, widths, strict=True)):
        indices = _minor_indices(blocks, bool(full), major, minor, count, width, shape)
        per_head = _tables_of_heads(blocks, indices)
        num = _tables_of_heads(blocks, count.int().unsqueeze(-1)).squeeze(-1)
        result += [
            num.to(device),
            per_head.to(device) if device_kind(device).flex_trains else _wide_view(per_head, shape[1]),
        ]
    return result[0], result[1], result[2], result[3]


def _block_counts(blocks: Blocks, major: Int32[Tensor, " E"], rows: int) -> list[Int64[Tensor, "T R"]]:
    """Return [numbers of partial blocks, numbers of full blocks] for every table and each of `rows` major indices."""
    counts = [torch.zeros(blocks.num_tables, rows, dtype=torch.int64) for _ in range(2)]
    for tables, part in blocks.portions():
        lines = (blocks.table[part].long() - tables.start) * rows + major[part]
        for count, kind in zip(counts, (~blocks.full[part], blocks.full[part]), strict=True):
            found = torch.bincount(lines[kind], minlength=len(tables) * rows)
            count[tables.start : tables.stop] = found.view(-1, rows)
    return counts


def _minor_indices(
    blocks: Blocks,
    full: bool,
    major: Int32[Tensor, " E"],
    minor: Int32[Tensor, " E"],
    count: Int64[Tensor, "T R"],
    width: int,
    shape: tuple[int, int],
) -> Int32[Tensor, "T R W"]:
    """Return, for each table and `major` index, the `minor` indices of its blocks, then zeros up to `width`.

    The storage has shape[1] - width further zeros after the result, so that `_wide_view` can extend each row.

    full: True for full blocks, False for partial ones.
    major, minor, shape: as for `_index_tables`.
    count: number of these blocks for each table and `major` index.
    width: entries of a row, at least the largest count.
    """
    storage = torch.zeros(count.numel() * width + shape[1] - width, dtype=torch.int32)
    table = storage[: count.numel() * width].view(*count.shape, width)
    for tables, part in blocks.portions():
        kind = blocks.full[part] == full
        lines = ((blocks.table[part].long() - tables.start) * shape[0] + major[part])[kind]
        entries, each = minor[part][kind], count[tables.start : tables.stop].flatten()
        if major is blocks.column:  # blocks are listed by row
            lines, order = lines.sort(stable=True)
            entries = entries[order]
        place = torch.arange(len(lines))
        place -= (each.cumsum(0) - each)[lines]
        place += lines * width
        table[tables.start : tables.stop].view(-1)[place] = entries
    return table


def _split_by_entry(table: Shaped[Tensor, "L ..."], batch: int) -> Shaped[Tensor, "B H ..."]:
    return table.unflatten(0, (batch, -1))


def _tables_of_heads(blocks: Blocks, tables: Shaped[Tensor, "T R W"]) -> Shaped[Tensor, "L R W"]:
    """Return the table of each head: of shape (heads, rows, width), or (1, rows, width) if all heads share one table.

    `tables` itself is returned if all heads share one table, or if head i has table i. Else the result is a copy, whose
    storage ends in blocks.num_rows + blocks.num_columns zeros, as `_wide_view` reads beyond the last row.
    """
    if blocks.num_tables == 1 or blocks.heads == tuple(range(blocks.num_tables)):
        return tables
    heads, (_, rows, width) = torch.tensor(blocks.heads), tables.shape
    storage = tables.new_zeros(len(heads) * rows * width + blocks.num_rows + blocks.num_columns)
    copied = storage[: len(heads) * rows * width].view(-1, rows, width)
    return torch.index_select(tables, 0, heads, out=copied)


def _wide_view(table: Int32[Tensor, "L R W"], columns: int) -> Int32[Tensor, "L R C"]:
    """Return a view of the table with rows of `columns` >= W entries.

    Entries of a row from index W on are those of later rows, of this head or the next, and then what the storage holds
    after the table. The storage must have at least `columns` - W entries there; they must be valid block indices.
    """
    lists, rows, width = table.shape
    return table.as_strided((lists, rows, columns), (rows * width, width, 1))


@dataclass(frozen=True)
class PackedBlocks:
    """`Blocks` compressed by zlib; `unpack` restores them exactly.

    shape, heads: as in `Blocks`.
    lengths: number of blocks in each part of the list, as cut by `Blocks.portions`.
    data: compressed bytes of each part, from `_to_bytes`.
    """

    shape: tuple[int, int, int, int]
    heads: tuple[int, ...]
    lengths: tuple[int, ...]
    data: tuple[bytes, ...]

    @classmethod
    def pack(cls, blocks: Blocks) -> PackedBlocks:
        parts = [part for _, part in blocks.portions()]
        data = tuple(zlib.compress(_to_bytes(blocks, part), _LEVEL) for part in parts)
        return cls(blocks.shape, blocks.heads, tuple(part.stop - part.start for part in parts), data)

    def unpack(self) -> Blocks:
        length, begin = sum(self.lengths), 0
        table, row, column, pairs = (torch.empty(length, dtype=torch.int32) for _ in range(4))
        blocks = Blocks(*self.shape, self.heads, table, row, column, torch.empty(length, dtype=torch.bool), pairs)
        for number, written in zip(self.lengths, self.data, strict=True):
            _unpack_into(written, blocks, slice(begin, begin + number))
            begin += number
        return blocks

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.data)) + 8 * len(self.heads)


def _to_bytes(blocks: Blocks, part: slice) -> bytes:
    """Return a slice of the block list as bytes: differences of successive block numbers, pair counts and `full`."""
    key = (blocks.table[part].long() * blocks.num_rows + blocks.row[part]) * blocks.num_columns + blocks.column[part]
    steps = key.diff(prepend=key.new_zeros(1))  # they repeat in regular patterns, and so compress well
    return b"".join(map(_bytes_of, (steps, blocks.pairs[part], blocks.full[part])))


def _unpack_into(written: bytes, blocks: Blocks, part: slice) -> None:
    """Decompress `written`, the compressed result of `_to_bytes`, into the slice `part` of `blocks`, in place."""
    data, length = bytearray(zlib.decompress(written)), part.stop - part.start
    line, column = _divmod(_tensor_of(data, torch.int64, 0, length).cumsum(0), blocks.num_columns)
    blocks.table[part], blocks.row[part] = _divmod(line, blocks.num_rows)
    blocks.column[part] = column
    blocks.pairs[part] = _tensor_of(data, torch.int32, 8 * length, length)
    blocks.full[part] = _tensor_of(data, torch.bool, 12 * length, length)


def _bytes_of(x: Tensor) -> bytes:
    """Return the bytes of a CPU tensor's elements in row-major order, without numpy."""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _tensor_of(data: bytearray, dtype: torch.dtype, begin: int, length: int) -> Tensor:
    if length == 0:  # torch.frombuffer refuses an empty buffer
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=length, offset=begin)


def _divmod(x: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    quotient = x // divisor
    return quotient, x - quotient * divisor
