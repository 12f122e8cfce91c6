"""Spread: what everyone has heard of as word goes round, one step at a time, and the news of the last step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ._packed_rows import Weights, add_pairs, first_column, holds, packed, pairs_of

# S members, who hear and are heard of; W bytes a row

_BYTES_A_PAIR = 100  # joined in the time that one pair takes by itself
_BYTES_A_STEP = 1 << 18


class Few(NamedTuple):
    """Pairs (who heard, of whom) one by one."""

    row: Tensor
    column: Tensor

    def any(self) -> bool:
        return len(self.row) > 0

    def first(self) -> tuple[int, int]:
        row = self.row.min()
        return int(row), int(self.column[self.row == row].min())

    def weighed(self, weights: Int64[Tensor, " S"]) -> int:
        """The sum of products of the weights of both."""
        return int((weights[self.row] * weights[self.column]).sum())


class Many(NamedTuple):
    """The same as packed rows."""

    rows: UInt8[Tensor, "S W"]

    def any(self) -> bool:
        return bool(self.rows.any())

    def first(self) -> tuple[int, int]:
        row = int(self.rows.any(1).nonzero()[0])
        return row, first_column(self.rows[row])

    def weighed(self, weights: Int64[Tensor, " S"]) -> int:
        return int((Weights(weights).of(self.rows) * weights).sum())


class Spread:
    """Who has heard of whom: of oneself, and with each step of all that those know whom one sees.

    `known` holds that as packed rows, `news` what the last step brought to it. `work` is about how many bytes were
    joined so far.
    """

    def __init__(self, row: Tensor, column: Tensor, size: int) -> None:
        """The pairs of which one sees the other, after the first step. Rows ascend, and each sees itself."""
        self.known = packed(row, column, size)
        others = row != column
        self.news: Few | Many = Few(row[others], column[others])
        self.work = 0
        self._size, self._pairs = size, (row, column)
        self._joined = _Joined(row, column, size)
        self._seen_by = row[column.argsort(stable=True)]
        self._degree = torch.bincount(column, minlength=size)
        self._begin = self._degree.cumsum(0) - self._degree

    def step(self) -> Bool[Tensor, " S"]:
        """Who has heard of another whose last news is of them."""
        dense = len(self._seen_by) * self.known.shape[1]
        self.work += _BYTES_A_STEP
        if isinstance(self.news, Few):
            sparse = _BYTES_A_PAIR * int(self._degree[self.news.row].sum())
            if sparse <= dense:
                self.work += sparse
                return self._spread_each(self.news)
        self.work += dense
        return self._spread_all()

    def _spread_each(self, news: Few) -> Bool[Tensor, " S"]:
        """To those who see whoever has the news, piece by piece."""
        degree = self._degree[news.row]
        each = torch.repeat_interleave(degree)
        nth = torch.arange(len(each)) - (degree.cumsum(0) - degree)[each]
        row, column = self._seen_by[self._begin[news.row][each] + nth], news.column[each]
        returned = torch.zeros(self._size, dtype=torch.bool)
        returned[row[row == column]] = True
        new = ~holds(self.known, row, column)
        key = (row[new] * self._size + column[new]).unique()
        self.news = Few(key // self._size, key % self._size)
        add_pairs(self.known, *self.news)
        return returned

    def _spread_all(self) -> Bool[Tensor, " S"]:
        """All that anyone knows to those who see them."""
        row, column = self._pairs
        back = (row != column) & holds(self.known, column, row)
        returned = torch.zeros(self._size, dtype=torch.bool)
        returned[row[back]] = True
        further = self._joined.rows(self.known)
        fresh = further & ~self.known
        self.known = further
        dense = len(row) * fresh.shape[1]
        few = int(fresh.count_nonzero()) * len(row) * _BYTES_A_PAIR <= dense * self._size
        self.news = Few(*pairs_of(fresh)) if few else Many(fresh)
        return returned


class _Joined:
    """Pairs (row, column): for each row, what all of its columns hold."""

    def __init__(self, row: Tensor, column: Tensor, size: int) -> None:
        """Rows ascend, and each has a pair."""
        degree = torch.bincount(row, minlength=size)
        self._order = degree.argsort(descending=True, stable=True)
        begin = degree.cumsum(0) - degree
        # The n-th pair of each row that has as many, rows with most pairs first: all rows are joined together.
        nth = torch.arange(len(row)) - begin[row]
        rank = torch.empty_like(self._order).scatter_(0, self._order, torch.arange(size))
        along = (nth * size + rank[row]).argsort()
        self._columns = column[along].split(torch.bincount(nth).tolist())

    def rows(self, known: UInt8[Tensor, "S W"]) -> UInt8[Tensor, "S W"]:
        words = known.view(torch.int64)
        first, *others = self._columns
        joined = words[first]
        for columns in others:
            joined[: len(columns)] |= words[columns]
        return torch.empty_like(words).index_copy_(0, self._order, joined).view(torch.uint8)
