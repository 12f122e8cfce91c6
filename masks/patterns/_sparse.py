"""Sparse matrices as patterns: a run-time tensor with the (query, key) pairs of a graph, in compressed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, Self

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ... import _torch_private
from ..core import (
    OF_PATTERNS,
    Bounds,
    Box,
    Extent,
    MaskMod,
    Pair,
    Pattern,
    Ranges,
    Reason,
    advises,
    clip,
    constructor,
    index_dtype,
    listing,
    parameters,
    pattern_kind,
    ranges_of,
    renamed,
)
from ._block_list import CellSums
from ._key_rows import KeyRows, require_tables
from ._run_time import CarriedTensor, RunTime, Table

# B batch entries (or one for all of them), T matrices of a batch entry, N queries, E pairs
# S numbers of a packed matrix: N; the number of keys; the N + 1 numbers of torch's crow_indices; the keys; then -1

_CROW = 2  # index of the first number of crow_indices
_EXACT_ROWS = 8  # a box over more rows than this is bounded by cells
_ADVICE = {
    **OF_PATTERNS,
    **renamed(matrix="adj adjacency adj_t sparse_mask attn_mask edges graph"),
    "edge_index": "write masks.sparse(torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(edges), (nodes, nodes)))",
}


@pattern_kind("sparse")
class Sparse(RunTime):
    """Pattern that allows a pair iff the run-time sparse matrix `name` has a nonzero entry at [query, key].

    places: for a matrix given to `sparse`, the index of each pair's value among the matrix's values; pairs are ordered
        by batch entry, matrix, query and key. None if the matrix repeats an index, or if `sparse` got only a name.
    num_values: number of values of a matrix given to `sparse`, zeros and repetitions included; 0 if it got only a name.
    """

    num_dims = 2

    places: CarriedTensor | None = field(default=None, compare=False, metadata={"stored": False})
    num_values: int = field(default=0, compare=False, metadata={"stored": False})

    def transported(self, value: Any) -> Tensor:
        return packed(self.name, value)[0] if is_sparse(value) else super().transported(value)

    def table(self, tensor: Tensor, extent: Extent) -> SparseTable:
        return SparseTable.of(self._checked_copy(tensor, extent))

    def key_rows(self, tensor: Tensor, extent: Extent) -> list[KeyRows]:
        """Return the keys of each query in each matrix: one item for each batch entry, or a single one for all entries.

        Raises ValueError for a tensor of no packed sparse matrices, or of matrices of another size than `extent`.
        """
        return [_key_rows(matrices) for matrices in self._checked_copy(tensor, extent)]

    def _checked_copy(self, tensor: Tensor, extent: Extent) -> Int64[Tensor, "B T S"]:
        """Return a copy on the CPU. Raises ValueError unless the tensor has packed matrices of the size `extent`."""
        if tensor.dim() != 3 or tensor.dtype != torch.int64 or tensor.shape[-1] < _CROW + 1 or 0 in tensor.shape:
            self._refuse(tensor)
        rows = tensor.detach().to("cpu", copy=True)
        num_queries, num_keys = rows[0, 0, :_CROW].tolist()
        crow, keys = rows[..., _CROW : _CROW + 1 + num_queries], rows[..., _CROW + 1 + num_queries :]
        if (
            num_queries < 0
            or crow.shape[-1] != num_queries + 1
            or bool((rows[..., :_CROW] != rows[0, 0, :_CROW]).any())
        ):
            self._refuse(tensor)
        if int(crow[..., 0].max()) or int(crow[..., -1].max()) > keys.shape[-1] or bool((crow.diff() < 0).any()):
            self._refuse(tensor)
        if (num_queries, num_keys) != tuple(extent):
            raise ValueError(
                f"a sparse matrix must have shape ({extent.queries}, {extent.keys}), for the positions from 0 to that "
                f"of the last query and key, offsets included; got ({num_queries}, {num_keys})"
            )
        return rows

    def _refuse(self, tensor: Tensor) -> NoReturn:
        raise ValueError(
            f"the run-time tensor {self.name!r} must be a sparse matrix, of torch or SciPy; got a tensor of "
            f"{tensor.dtype} and shape {tuple(tensor.shape)}: a dense one is masks.mask(matrix), or matrix.to_sparse()"
        )

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """Return packed matrices, a tensor of this shape, in which every row has the keys 0, 1, ..., as many as fit."""
        queries, keys = extent
        entries = shape[-1] - _CROW - 1 - queries
        if len(shape) != 3 or entries < 0:
            self._refuse(torch.empty(shape, dtype=torch.int64, device="meta"))
        each, first = min(keys, entries // max(1, queries)), _CROW + 1 + queries
        matrices = torch.full(shape, -1)
        matrices[..., :_CROW] = torch.tensor([queries, keys])
        matrices[..., _CROW:first] = torch.arange(queries + 1) * each
        matrices[..., first : first + queries * each] = torch.arange(each).repeat(queries)
        return matrices


@dataclass(frozen=True, eq=False)
class SparseTable(Table):
    """Table of `Sparse`: matrix t of batch entry b, packed in rows[b, t], lists the keys of each query, ascending.

    Each of the T matrices serves num_heads / T consecutive heads.
    """

    kind = "sparse table"

    rows: Int64[Tensor, "B T S"]

    @property
    def num_queries(self) -> int:
        return int(self.rows[0, 0, 0])

    @property
    def num_keys(self) -> int:
        return int(self.rows[0, 0, 1])

    def pairs(self) -> tuple[Int64[Tensor, " E"], Int64[Tensor, " E"]]:
        """Return (queries, keys) of all pairs of the first matrix of the first batch entry."""
        crow = self.rows[0, 0, _CROW : _CROW + 1 + self.num_queries]
        first = _CROW + 1 + self.num_queries
        queries = torch.arange(self.num_queries).repeat_interleave(crow.diff())
        return queries, self.rows[0, 0, first : first + len(queries)]

    def for_head(self, head: int, num_heads: int) -> Self:
        tables = self.rows.shape[1]
        if tables == 1:
            return self
        table = head * tables // num_heads
        return self.part(type(self).of(self.rows[:, table, None]), f"table {table}")

    def check_heads(self, num_heads: int) -> None:
        require_tables(self.rows.shape[1], num_heads)

    def described(self) -> str:
        entries = int(self.rows[..., _CROW + self.num_queries].sum())
        return f"{entries:,} entries of {self.num_queries:,} x {self.num_keys:,}"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        find = self.finder(num_heads=num_heads, device=device)
        return lambda b, h, q, k: find(b, h, q, k)[1]

    def finder(self, *, num_heads: int, device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return a function (b, h, q, k) -> (index, found) that looks up pairs in the matrix of entry b and head h.

        found: True if the matrix has the pair.
        index: index of the pair's key in the numbers of all matrices, flattened; of another number if not found.
        """
        held, step = self.on(device), self.batch_step(device)
        tables, size = self.rows.shape[1:]
        longest = min(self.num_keys, size - _CROW - 1 - self.num_queries)
        if self.known:  # a placeholder stands for rows of any length
            longest = int(self.rows[..., _CROW : _CROW + 1 + self.num_queries].diff().max()) if self.num_queries else 0
        halves = parameters(device, *(1 << bit for bit in reversed(range(longest.bit_length()))))
        numbers = (num_heads // tables, tables, size, size - 1, _CROW, _CROW + 1 + self.num_queries)
        per_table, tables, size, last, crow, keys = parameters(device, *numbers)
        last_query, one = parameters(device, self.num_queries - 1, 1)

        def find(b, h, q, k):
            matrix = (b * step * tables + h // per_table) * size  # place of its first number
            row = torch.minimum(q, last_query)
            place, end = held.rows[matrix + crow + row], held.rows[matrix + crow + row + one]
            for half in halves:  # all entries of the row before `place` are below k, after each step
                probe = place + half - one
                below = held.rows[matrix + torch.minimum(keys + probe, last)] < k
                place = place + torch.where((probe < end) & below, half, 0)
            at = matrix + torch.minimum(keys + place, last)
            return at, (place < end) & (held.rows[at] == k) & (q <= last_query)

        return find

    def copied_to(self, device: torch.device) -> Tensor:
        """Return the numbers of all matrices on a device, flattened."""
        numbers = self.rows.flatten()
        return numbers.to(device, index_dtype(device, -1, max(numbers.numel(), self.num_keys)), copy=True)

    def is_key(self) -> Bool[Tensor, "B S"]:
        """Return a mask of the packed numbers, True for keys; there must be one matrix for each batch entry."""
        rows, first = self.rows[:, 0], _CROW + 1 + self.num_queries
        place = torch.arange(rows.shape[1]) - first
        return (place >= 0) & (place < rows[:, first - 1, None])

    def key_rows(self) -> KeyRows:
        return _key_rows(self.only_row)

    @cached_property
    def _pairs(self) -> Int64[Tensor, " E"]:
        """Return the number (t * num_queries + query) * num_keys + key of each pair of each matrix t, ascending.

        All batch entries must have equal matrices.
        """
        rows = self._cached_key_rows
        return rows.list_indices() * self.num_keys + rows.keys

    @cached_property
    def _cached_key_rows(self) -> KeyRows:
        return self.key_rows()

    @cached_property
    def _cells(self) -> CellSums:
        rows, tables, queries = self._cached_key_rows, self.rows.shape[1], max(1, self.num_queries)
        line = rows.list_indices()
        return CellSums.of(tables, (queries, max(1, self.num_keys)), line // queries, line % queries, rows.keys)

    def _table_index(self, head: Any, num_heads: int) -> Any:
        return head * self.rows.shape[1] // num_heads

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        table = self._table_index(box.head, num_heads)
        box = Box(table, clip(box.q, 0, self.num_queries), clip(box.k, 0, self.num_keys))
        height = torch.where(box.q.count > 0, box.q.last - box.q.first + 1, 0)
        found = self._cells.bounds(table, box, 1, 1)
        few = (height <= _EXACT_ROWS).nonzero().squeeze(1)
        if box.k.step == 1 and len(few):
            found.low[few] = found.high[few] = self._exact_counts(box.select(few))
        return found

    def _exact_counts(self, box: Box) -> Int64[Tensor, " n"]:
        """Return the number of pairs in each box, for boxes of few queries and consecutive keys.

        box: its heads are indices of matrices.
        """
        pairs = torch.zeros_like(box.area)
        for step in range(int(box.q.count.max())):
            line = (box.head * self.num_queries + box.q.first + step * box.q.step) * self.num_keys
            edges = (torch.searchsorted(self._pairs, line + edge) for edge in (box.k.first, box.k.first + box.k.count))
            since, until = edges
            pairs += torch.where(step < box.q.count, until - since, 0)
        return pairs

    def _keys_of_query(self, table: int, query: int) -> Int64[Tensor, " n"]:
        rows, line = self._cached_key_rows, table * self.num_queries + query
        begin, end = (0 if line == 0 else int(rows.ends[line - 1])), int(rows.ends[line])
        return rows.keys[begin:end]

    def reason(self, pair: Pair) -> Reason:
        table = int(self._table_index(pair.head, pair.num_heads))
        keys = self._keys_of_query(table, pair.query).tolist()
        whose = f" of matrix {table}" if self.rows.shape[1] > 1 else ""
        listed = pair.key in keys
        text = (
            f"{pair.the_query} has a row{whose} with entries at keys {listing(keys)}; "
            f"{pair.the_key} is {'among them' if listed else 'no such key'}"
        )
        return Reason(self, listed, text)

    def row(self, query: int, keys: range) -> Ranges | None:
        if self.rows.shape[1] > 1:
            return None
        if query >= self.num_queries:
            return ()
        found = self._keys_of_query(0, query)
        return ranges_of(found[(found >= keys.start) & (found < keys.stop)])

    def keys_of(self, queries: Bool[Tensor, " N"]) -> Bool[Tensor, " N"] | None:
        if self.rows.shape[1] > 1:
            return None
        seen = torch.zeros(max(len(queries), self.num_keys), dtype=torch.bool)
        rows = self._cached_key_rows
        asked = torch.zeros(max(len(queries), self.num_queries), dtype=torch.bool)
        asked[: len(queries)] = queries
        seen[rows.keys[asked[rows.list_indices()]]] = True
        return seen[: len(queries)]


def is_sparse(value: Any) -> bool:
    """Return True for a sparse tensor of torch in any layout, and for a sparse matrix or array of SciPy."""
    return (
        value.layout != torch.strided and not value.is_nested if isinstance(value, Tensor) else hasattr(value, "tocoo")
    )


def packed(name: str, matrix: Any) -> tuple[Int64[Tensor, "B T S"], Int64[Tensor, " E"] | None, int]:
    """Return (packed matrices, places, number of values) of a sparse matrix.

    Each 2-D matrix becomes S numbers, as listed at the top of this module. Pairs are ordered by batch entry, matrix,
    query and key; places[e] is the index of pair e among the values that `matrix` holds. `places` is None if `matrix`
    repeats an index. The number of values includes zeros and repetitions.

    matrix: (queries, keys), (batch, queries, keys) or (batch, matrices, queries, keys).
    name: for errors.

    Raises ValueError for other numbers of dims, for dims of length 0, for dense dims, for indices outside of the shape
    and for NaN.
    """
    indices, values, size = _entries(name, matrix)
    batch, tables = size[0] if len(size) > 2 else 1, size[1] if len(size) > 3 else 1
    queries, keys = list(size)[-2:]
    pair = torch.zeros(indices.shape[1], dtype=torch.int64)
    for length, index in zip(size, indices, strict=True):
        pair = pair * length + index
    pair, entry = pair.unique(return_inverse=True)
    total = torch.zeros(len(pair), dtype=values.dtype).index_add_(0, entry, values)
    place = None if len(pair) < len(entry) else torch.empty_like(entry).scatter_(0, entry, torch.arange(len(entry)))
    if bool((total == 0).any()):
        pair, place = pair[total != 0], None if place is None else place[total != 0]
    line, key = pair // keys, pair % keys
    ends = line.bincount(minlength=batch * tables * queries).view(-1, queries).cumsum(1)
    before = ends[:, -1].cumsum(0) - ends[:, -1]
    first = _CROW + 1 + queries
    found = torch.full((batch * tables, first + int(ends[:, -1].max())), -1)
    found[:, 0], found[:, 1], found[:, _CROW], found[:, _CROW + 1 : first] = queries, keys, 0, ends
    index = line // queries  # of the pair's matrix
    found[index, first + torch.arange(len(pair)) - before[index]] = key
    return found.view(batch, tables, -1), place, len(values)


def _entries(name: str, matrix: Any) -> tuple[Int64[Tensor, "dims E"], Tensor, tuple[int, ...]]:
    """Return (indices, values, shape) of a sparse matrix, with entries in stored order. Raises as `packed` does."""
    if not isinstance(matrix, Tensor):
        coo = matrix.tocoo()
        row, column, values = (torch.as_tensor(x.copy()) for x in (coo.row, coo.col, coo.data))
        indices, size, dense = torch.stack([row.long(), column.long()]), tuple(coo.shape), 0
    else:
        size, dense, matrix = tuple(matrix.shape), matrix.dense_dim(), matrix.detach().cpu()
        if matrix.layout != torch.sparse_coo:
            matrix = matrix.to_sparse_coo()
        indices, values = _torch_private.sparse_indices(matrix), _torch_private.sparse_values(matrix)
    if dense or len(size) not in (2, 3, 4) or 0 in size:
        raise ValueError(
            f"{name} must be a sparse matrix (queries, keys), (batch, queries, keys) or (batch, matrices, queries, "
            f"keys), without dense dims; got shape {size} with {dense} dense dims"
        )
    outside = ((indices < 0) | (indices >= torch.tensor(size)[:, None])).any(0)
    values = values.to(torch.int32) if values.dtype == torch.bool else values
    for wrong, why in ((outside, "an index outside of its shape"), (values.isnan(), "NaN")):
        if bool(wrong.any()):
            place = tuple(indices[:, wrong][:, 0].tolist())
            raise ValueError(f"{name} of shape {size} must have no entry with {why}; got one at {place}")
    return indices, values, size


def _key_rows(matrices: Int64[Tensor, "T S"]) -> KeyRows:
    queries = int(matrices[0, 0])
    ends, keys = matrices[:, _CROW + 1 : _CROW + 1 + queries], matrices[:, _CROW + 1 + queries :]
    own = torch.arange(keys.shape[1]) < ends[:, -1:]
    before = (ends[:, -1].cumsum(0) - ends[:, -1])[:, None]
    return KeyRows(keys[own], (ends + before).flatten(), (len(matrices), queries))


@constructor
@advises(keywords=_ADVICE, how="write masks.sparse(matrix), a sparse tensor of torch or a sparse matrix of SciPy")
def sparse(matrix: Any, *, name: str = "sparse") -> Pattern:
    """Pattern that allows the pairs at the nonzero entries of a sparse matrix: the edges of a graph, or a mesh.

    On CPU, `attend` by default gathers the keys of each query, so work and memory follow the number of entries; with
    many entries it uses a dense mask, for some queries at a time, if that is faster. On accelerators with Triton,
    kernels read the keys of each query in place. Rows may have very different lengths, and the matrix may be new in
    each call.

    matrix: a sparse tensor of torch, COO, CSR or another layout, or a sparse matrix of SciPy, of shape (queries, keys),
        (batch, queries, keys) or (batch, matrices, queries, keys), where the number of matrices divides the number of
        heads. A row is the query that sees, a column the key that it sees. The entries are copied: later changes of the
        matrix have no effect. Repeated entries are summed, entries of value 0 do not count. Or a string, the name under
        which `attend(bindings=)` passes the matrix.
    name: name of the matrix in texts and errors, unless `matrix` is a string. Names within a pattern must differ.

    With offsets in the call, rows and columns are positions, from 0 to that of the last query and key.

    Raises TypeError for a matrix that is not sparse, and ValueError for one with another number of dims, a dim of
    length 0, dense dims, an index outside of its shape or NaN; `attend` and `bind` raise ValueError for a matrix of
    another shape than the call's.

    >>> edges = torch.tensor([[0, 1, 1, 2, 2], [0, 0, 1, 1, 2]])  # (query, key) of each pair
    >>> graph = torch.sparse_coo_tensor(edges, torch.ones(5), (3, 3), check_invariants=True)
    >>> masks.describe(masks.sparse(graph), 3).useful_pairs
    5
    """
    if isinstance(matrix, str):
        return Sparse(matrix)
    if not is_sparse(matrix):
        shape = f"a dense tensor of shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else repr(matrix)[:80]
        raise TypeError(
            "sparse takes a sparse matrix of torch or SciPy; for a dense one write masks.mask(matrix), or "
            f"masks.sparse(matrix.to_sparse()); got {shape}"
        )
    found, places, number = packed(name, matrix)
    return Sparse(name, CarriedTensor(found), None if places is None else CarriedTensor(places), number)
