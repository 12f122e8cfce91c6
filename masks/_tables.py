"""Block lists as the tables of a torch BlockMask, kept in compact storage."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ._blocks import Blocks
from ._pattern import MaskMod

# H mask heads (1 if all heads share a table), R rows, C columns, W most blocks in a row


def to_block_mask(blocks: Blocks, mask_mod: MaskMod, device: torch.device) -> BlockMask:
    """A BlockMask with both tables, key side and query side, built without a dense table in between.

    On CPU an index table has full width, as the compiled kernel there demands, but its rows overlap in
    memory: entries past a row's count are the next rows' and hold valid block numbers. Elsewhere tables
    end at the longest row.
    """
    row_major = torch.arange(len(blocks.row))
    column_major = (blocks.table.long() * blocks.num_columns + blocks.column).argsort(stable=True)
    by_row = _side(blocks, row_major, blocks.row, blocks.column, (blocks.num_rows, blocks.num_columns), device)
    by_column = _side(blocks, column_major, blocks.column, blocks.row, (blocks.num_columns, blocks.num_rows), device)
    kv_num, kv, full_kv_num, full_kv = by_row
    q_num, q, full_q_num, full_q = by_column
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
    """Bytes of storage behind a BlockMask's tables."""
    tables = (
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
    )  # fmt: skip
    return sum(table.untyped_storage().nbytes() for table in tables if table is not None)


def _side(
    blocks: Blocks, order: Tensor, major: Tensor, minor: Tensor, shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(partial counts, partial indices, full counts, full indices) with lists along `major`."""
    major, minor, full = blocks.table.long()[order] * shape[0] + major[order], minor[order], blocks.full[order]
    lists = blocks.num_tables * shape[0]
    kinds = [(major[kind], minor[kind]) for kind in (~full, full)]
    counts = [torch.bincount(lines, minlength=lists) for lines, _ in kinds]
    widths = [max(1, int(count.max())) for count in counts]
    if device.type != "cpu":
        # torch 2.11's Triton kernels read the full table with the partial table's shape and strides.
        widths = [max(widths)] * 2
    heads = torch.tensor(blocks.heads if blocks.num_tables > 1 else (0,))
    result: list[Tensor] = []
    for (lines, entries), count, width in zip(kinds, counts, widths, strict=True):
        place = torch.arange(len(lines)) - (count.cumsum(0) - count)[lines]
        table = torch.zeros(lists, width, dtype=torch.int32)
        table[lines, place] = entries
        per_head = table.view(-1, shape[0], width)[heads]
        num = count.int().view(-1, shape[0])[heads]
        result += [num[None].to(device), _full_width(per_head, shape[1], device)]
    return result[0], result[1], result[2], result[3]


def _full_width(table: Int32[Tensor, "H R W"], columns: int, device: torch.device) -> Int32[Tensor, "1 H R C"]:
    heads, rows, width = table.shape
    if device.type != "cpu":
        return table[None].to(device)
    storage = torch.zeros(heads * rows * width + columns - width, dtype=torch.int32)
    storage[: table.numel()] = table.flatten()
    return storage.as_strided((1, heads, rows, columns), (heads * rows * width, rows * width, width, 1))
