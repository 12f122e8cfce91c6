"""Block lists in a small space: what repeats along them is stored once."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ._blocks import Blocks

_LEVEL = 1  # higher levels take several times as long and save little


@dataclass(frozen=True)
class PackedBlocks:
    """Block lists as compressed bytes; `unpack` gives them back as they were.

    A block is stored as its distance from the one before it, in the order of the lists. Patterns repeat along
    the sequence, and so do these distances: zlib finds that. Lists drawn at random shrink least.
    """

    shape: tuple[int, int, int, int]
    heads: tuple[int, ...]
    length: int
    data: bytes

    @classmethod
    def pack(cls, blocks: Blocks) -> PackedBlocks:
        key = (blocks.table.long() * blocks.num_rows + blocks.row) * blocks.num_columns + blocks.column
        steps = key.diff(prepend=key.new_zeros(1))
        data = b"".join(map(_bytes_of, (steps, blocks.pairs, blocks.full)))
        return cls(blocks.shape, blocks.heads, len(key), zlib.compress(data, _LEVEL))

    def unpack(self) -> Blocks:
        data = bytearray(zlib.decompress(self.data))
        steps = _tensor(data, torch.int64, 0, self.length)
        pairs = _tensor(data, torch.int32, 8 * self.length, self.length)
        full = _tensor(data, torch.bool, 12 * self.length, self.length)
        num_q, num_k, q_block, k_block = self.shape
        rows, columns = -(-num_q // q_block), -(-num_k // k_block)
        line, column = _divmod(steps.cumsum(0), columns)
        table, row = _divmod(line, rows)
        return Blocks(*self.shape, self.heads, table.int(), row.int(), column.int(), full, pairs)

    @property
    def nbytes(self) -> int:
        return len(self.data) + 8 * len(self.heads)


def _bytes_of(x: Tensor) -> bytes:
    """The bytes of a tensor, without asking for numpy."""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _tensor(data: bytearray, dtype: torch.dtype, begin: int, length: int) -> Tensor:
    if length == 0:  # torch.frombuffer refuses an empty stretch
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=length, offset=begin)


def _divmod(x: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    quotient = x // divisor
    return quotient, x - quotient * divisor
