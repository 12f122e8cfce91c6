"""Boolean masks of (query, key) pairs as a run-time pattern, which may differ between batch entries and heads."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn.functional import pad

from ..core import (
    OF_PATTERNS,
    Bounds,
    Box,
    Counts,
    Extent,
    MaskMod,
    Pair,
    Pattern,
    Progression,
    Ranges,
    Reason,
    advises,
    constructor,
    parameters,
    pattern_kind,
    ranges_of,
    renamed,
)
from ._run_time import RunTime, Table, booleans, of_tensor
from ._sparse import is_sparse

# B batch entries (or one for all of them), T heads (or one for all of them), Q queries, K keys (or one for all of them)

_CELL = 16  # queries and keys of a square whose pairs are counted together


@pattern_kind("mask")
class Mask(RunTime):
    """Pattern that allows the pairs that the run-time tensor `name`, a mask of pairs as `mask` takes it, allows."""

    num_dims = 3

    def table(self, tensor: Tensor, extent: Extent) -> MaskTable:
        rows = booleans("a mask of pairs", tensor, ("b", "h", "q_idx", "k_idx"))
        fits = tensor.dim() in (2, 4) and all(
            size in (1, positions) for size, positions in zip(tensor.shape[-2:], extent, strict=True)
        )
        if not fits or 0 in tensor.shape:
            raise ValueError(
                f"a mask of pairs must have shape ({extent.queries}, {extent.keys}) or (batch, heads, "
                f"{extent.queries}, {extent.keys}), for the positions from 0 to that of the last query and key, "
                f"offsets included; each dim may be 1; got {tuple(tensor.shape)}"
            )
        return MaskTable.of(rows if rows.dim() == 4 else rows[None, None])

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)


class MaskTable(Table):
    """Table that allows a pair iff rows[b, h, q, k] is True; a dim of size 1 serves all entries, heads or positions."""

    kind = "mask table"

    rows: Bool[Tensor, "B T Q K"]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return (queries, keys), indices of the True elements of the first batch entry and head.

        They are all pairs allowed there, unless a dim of queries or keys has size 1, which serves further positions.
        """
        queries, keys = self.rows[0, 0].nonzero().unbind(1)
        return queries, keys

    def for_head(self, head: int, num_heads: int) -> Self:
        if self.rows.shape[1] == 1:
            return self
        # Heads with equal values remain distinct: the number of block lists in a graph must not depend on values.
        return replace(self, rows=self.rows[:, head, None], digest=f"head {head} of {self.digest}", held={})

    def check_heads(self, num_heads: int) -> None:
        if self.rows.shape[1] not in (1, num_heads):
            raise ValueError(
                f"a mask of pairs must have 1 head or as many as the call; got {self.rows.shape[1]} for {num_heads}"
            )

    def described(self) -> str:
        return f"{int(self.rows.sum())} of {self.rows.numel()} pairs"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        held = self.on(device)
        entry, head, query, key = parameters(device, *(int(size > 1) for size in self.rows.shape))
        return lambda b, h, q, k: held.rows[b * entry, h * head, q * query, k * key]

    @cached_property
    def _cell_sums(self) -> tuple[Int64[Tensor, "T q k"], tuple[int, int]]:
        """Return (sums, sides): cumulative numbers of True elements of the mask by cell, and (queries, keys) of a cell.

        sums[t, i, j] counts the True elements of the mask's head t (0 if one serves all heads) in the first i rows and
        the first j columns of cells. A dim of the mask that serves all positions is one cell of size 1, of which an
        element stands for a pair with each position. All batch entries must share one mask.
        """
        rows = self.only_row
        sides = tuple(_CELL if size > 1 else 1 for size in rows.shape[1:])
        # Keys are padded even if the mask has one, as eight bytes are read at once; its other cells are cut off below.
        rows = pad(rows, (0, -rows.shape[2] % _CELL, 0, -rows.shape[1] % sides[0]))
        # Adds eight bytes, which are eight keys (_CELL is a multiple of 8), in one int64. No byte overflows, as a cell
        # has fewer than 256 queries.
        by_key = rows.view(torch.int64).unflatten(1, (-1, sides[0])).sum(2).view(torch.uint8)
        cells = by_key.unflatten(2, (-1, sides[1])).sum(3, dtype=torch.int64)
        cells = cells[:, :, : -(-self.rows.shape[3] // sides[1])]
        return pad(cells.cumsum(1).cumsum(2), (1, 0, 1, 0)), (sides[0], sides[1])

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        sums, sides = self._cell_sums
        table = box.head if len(sums) > 1 else torch.zeros_like(box.head)
        q = _CellRanges.of(box.q, sides[0], self.rows.shape[2])
        k = _CellRanges.of(box.k, sides[1], self.rows.shape[3])
        times = q.times * k.times
        outer = times * _pairs_in_cells(sums, table, q.outer, k.outer)
        inner = times * _pairs_in_cells(sums, table, q.inner, k.inner)
        missing = times * q.positions * k.positions - outer
        return Bounds(torch.maximum(inner, box.area - missing).clamp(min=0), torch.minimum(outer, box.area))

    def reason(self, pair: Pair) -> Reason:
        allowed = pair.allowed_by(self)
        return Reason(self, allowed, f"the mask is {allowed} for {pair.the_query} and {pair.the_key}")

    def row(self, query: int, keys: range) -> Ranges | None:
        if self.rows.shape[1] > 1:
            return None
        seen = self.only_row[0, query if self.rows.shape[2] > 1 else 0]
        seen = seen if len(seen) > 1 else seen.expand(keys.stop)
        return ranges_of(torch.arange(keys.start, keys.stop)[seen[keys.start : keys.stop]])


class _CellRanges(NamedTuple):
    """Ranges of the cells of `MaskTable._cell_sums` along one axis of each of n boxes.

    outer: (first, stop) of the cells that cover the box.
    inner: (first, stop) of the cells inside the box; there are none if stop <= first.
    positions: number of the mask's elements in the outer cells along this axis.
    times: number of positions of the box that an element serves: 1, or all if the mask's axis has size 1.
    """

    outer: tuple[Counts, Counts]
    inner: tuple[Counts, Counts]
    positions: Counts
    times: Counts

    @classmethod
    def of(cls, progression: Progression, side: int, size: int) -> _CellRanges:
        """Return the cell ranges of n progressions of positions.

        side: positions of a cell.
        size: positions of the axis, 1 if a single value serves all positions.
        """
        first, stop, count = progression.first, progression.last + 1, progression.count
        none = torch.zeros_like(first)
        if size == 1:
            one = (none, none + 1)
            return cls(one, one, none + 1, count)
        outer = first // side, -(-stop // side)
        # The last cell of an axis may be incomplete.
        end = torch.where(stop == size, outer[1], stop // side)
        inner = (-(-first // side), end) if progression.step == 1 else (none, none)
        return cls(outer, inner, (outer[1] * side).clamp(max=size) - outer[0] * side, none + 1)


def _pairs_in_cells(sums: Tensor, table: Counts, q: tuple[Counts, Counts], k: tuple[Counts, Counts]) -> Counts:
    """Return the number of True elements in a rectangle of cells for each of n boxes; 0 for a box without cells.

    sums: as in `MaskTable._cell_sums`.
    table: first index into `sums` for each box.
    q, k: (first, stop) of the cells of queries and of keys for each box.
    """
    (q_first, q_stop), (k_first, k_stop) = ((first, torch.maximum(first, stop)) for first, stop in (q, k))
    by_stop, by_first = (sums[table, q_edge, k_stop] - sums[table, q_edge, k_first] for q_edge in (q_stop, q_first))
    return by_stop - by_first


@constructor
@advises(
    keywords=OF_PATTERNS | renamed(allowed="mask attn_mask attention_mask dense_mask"),
    how="write masks.mask(allowed), True for each pair that takes part",
)
def mask(allowed: Any, *, name: str = "mask") -> Pattern:
    """Pattern that allows the pairs for which a boolean tensor is True, such as SDPA's `attn_mask`.

    allowed: booleans of shape (queries, keys) or (batch, heads, queries, keys), or floats with 0 for True and -inf for
        False; or a string, the name under which `attend(bindings=)` passes the tensor. A dim of size 1 broadcasts:
        (batch, 1, queries, 1) marks queries that see every key. With offsets in the call, rows and columns are
        positions, from 0 to that of the last query and key.
    name: name of the tensor in texts and errors, unless `allowed` is a string. Names within a pattern must differ.

    New values do not recompile, but their block lists are built in time linear in the size of the tensor. A pattern
    with a formula, such as `local_window`, needs neither the tensor nor that time.
    Raises ValueError for a sparse matrix; when the tensor is used, raises TypeError or ValueError if its dtype, values
    or shape do not fit.

    >>> masks.describe(masks.mask([[True, False], [True, True]]), 2).useful_pairs
    3
    """
    if is_sparse(allowed):
        got = allowed.layout if isinstance(allowed, Tensor) else type(allowed).__name__
        raise ValueError(f"mask takes a dense tensor; for a sparse matrix write masks.sparse(matrix); got {got}")
    return of_tensor(Mask, allowed, name)
