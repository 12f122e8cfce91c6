"""Packed rows: Boolean matrices of which each pair is a bit, so that many pairs are joined at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

# S rows and columns, W bytes a row, R some of the rows

_WORD = 8  # bytes joined at once
_BYTES_AT_ONCE = 1 << 16  # what is made of them stays in a core's cache


def width_of(columns: int) -> int:
    """Bytes a row: whole words."""
    return -(-columns // (8 * _WORD)) * _WORD


def packed(row: Tensor, column: Tensor, size: int) -> UInt8[Tensor, "S W"]:
    """The matrix that holds these pairs, each given once, of `size` rows and columns."""
    rows = torch.zeros(size, width_of(size), dtype=torch.uint8)
    add_pairs(rows, row, column)
    return rows


def packed_bits(held: Bool[Tensor, " n"]) -> UInt8[Tensor, " W"]:
    """Bits in whole words, each first one the lowest of its byte."""
    column = held.nonzero().squeeze(1)
    rows = torch.zeros(1, width_of(len(held)), dtype=torch.uint8)
    add_pairs(rows, torch.zeros_like(column), column)
    return rows[0]


def pairs_of(rows: UInt8[Tensor, "S W"]) -> tuple[Tensor, Tensor]:
    """(row, column) of all pairs that a matrix holds."""
    row, byte = rows.nonzero().unbind(1)
    which, bit = (rows[row, byte, None] >> torch.arange(8, dtype=torch.uint8) & 1).nonzero().unbind(1)
    return row[which], 8 * byte[which] + bit


def add_pairs(rows: UInt8[Tensor, "S W"], row: Tensor, column: Tensor) -> None:
    """Let a matrix hold these pairs too: none of them twice, and none that it holds already."""
    # One bit of a byte is of one pair: no two additions carry.
    bits = torch.ones_like(column, dtype=torch.uint8) << (column % 8).byte()
    rows.view(-1).index_add_(0, row * rows.shape[1] + column // 8, bits)


def holds(rows: UInt8[Tensor, "S W"], row: Tensor, column: Tensor) -> Bool[Tensor, " n"]:
    """Which of these pairs a matrix holds."""
    return rows[row, column // 8].bitwise_right_shift((column % 8).byte()).bitwise_and(1).bool()


def columns_from(start: Tensor, stop: Tensor, width: int) -> UInt8[Tensor, "R W"]:
    """Rows that hold the columns start to stop - 1, each its own."""
    return _columns_below(stop, width) & ~_columns_below(start, width)


def _columns_below(stop: Tensor, width: int) -> UInt8[Tensor, "R W"]:
    full = (stop[:, None] - 8 * torch.arange(width)).clamp(0, 8)
    return torch.tensor([(1 << bits) - 1 for bits in range(9)], dtype=torch.uint8)[full]


def first_column(row: UInt8[Tensor, " W"]) -> int:
    """The first column of a row that holds any."""
    byte = int(row.nonzero()[0])
    held = int(row[byte])
    return 8 * byte + (held & -held).bit_length() - 1


def some_at_once(rows: int, width: int) -> Iterator[slice]:
    """Rows that are looked at together."""
    step = max(1, _BYTES_AT_ONCE // width)
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


class Weights:
    """Weights of columns, and the sums of those that rows hold."""

    def __init__(self, weights: Int64[Tensor, " S"]) -> None:
        width = width_of(len(weights))
        by_byte = torch.nn.functional.pad(weights, (0, 8 * width - len(weights))).view(width, 8)
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        self._sums = (by_byte @ bits.T).flatten()  # of all values of each byte
        self._begin = 256 * torch.arange(width, dtype=torch.int32)

    def of(self, rows: UInt8[Tensor, "R W"]) -> Int64[Tensor, " R"]:
        found = torch.empty(len(rows), dtype=torch.int64)
        for some in some_at_once(*rows.shape):
            place = (rows[some] + self._begin).flatten()
            found[some] = self._sums.index_select(0, place).view(-1, rows.shape[1]).sum(1)
        return found
