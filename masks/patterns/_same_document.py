"""Packed cross-attention: queries and keys are packed separately, and each query sees the keys of its document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

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
    as_ranges,
    constructor,
    index_dtype,
    intersect,
    parameters,
    pattern_kind,
)
from ._run_time import RunTime, Table, Windows, as_tensor, integers, of_tensor
from ._token_values import PADDING, Runs, check_sorted, count_in_runs

# B batch entries (or one for all of them), L positions of queries, then those of keys


@pattern_kind("same_document")
class SameDocument(RunTime):
    """Pattern that allows a pair iff query and key have the same document id, and it is not negative.

    The run-time tensor `name` holds the ids of the query positions, followed by the ids of the key positions.
    """

    def table(self, tensor: Tensor, extent: Extent) -> SpanPairs:
        ids = torch.atleast_2d(integers("document ids", tensor, (1, 2)))
        if ids.shape[1] != sum(extent):
            raise ValueError(
                f"same_document needs an id for each of the {extent.queries} positions of queries and the "
                f"{extent.keys} of keys, offsets included; got {ids.shape[1]} ids in all"
            )
        for side in ids.split(list(extent), 1):
            begins = torch.ones_like(side, dtype=torch.bool)
            begins[:, 1:] = side.diff(dim=1) != 0
            check_sorted(side, begins)
        # Documents are numbered, so that the table does not depend on the choice of ids.
        numbers = torch.stack([row.unique(return_inverse=True)[1] - int((row < 0).any()) for row in ids.clamp(min=-1)])
        return SpanPairs.of(numbers, extent.queries)

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class SpanPairs(Table):
    """Table that allows a pair iff query and key have the same document number, other than PADDING.

    rows[b, i]: document number of query position i, or PADDING (-1); rows[b, queries + j]: that of key position j.
    """

    kind = "span pairs table"

    rows: Int64[Tensor, "B L"]
    queries: int = 0

    @classmethod
    def of(cls, rows: Tensor, queries: int = 0) -> Self:  # type: ignore[override]
        made = super().of(rows)
        return replace(made, digest=f"{queries} {made.digest}", queries=queries)

    def of_entry(self, batch: int) -> Self:
        if len(self.rows) == 1:
            return self
        return self.part(type(self).of(self.rows[batch, None], self.queries), "an entry")

    def described(self) -> str:
        if len(self.rows) != 1:
            return f"documents of {len(self.rows)} batch entries"
        return f"{len(self.sides[0].starts)} documents with queries and keys"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        held, step = self.on(device), self.batch_step(device)
        (queries,) = parameters(device, self.queries)

        def same_document(b, h, q, k):
            numbers, row = held.rows, b * step
            return numbers[row, q] == numbers[row, k + queries]

        return same_document

    def copied_to(self, device: torch.device) -> Int64[Tensor, "B L"] | Int32[Tensor, "B L"]:
        """Return the rows on a device, with padding of keys changed to -2, which differs from every query's number."""
        rows = self.rows.clone()
        keys = rows[:, self.queries :]
        keys[keys == PADDING] -= 1
        return rows.to(device, index_dtype(device, PADDING - 1, rows.shape[1]))

    @cached_property
    def sides(self) -> tuple[Runs, Runs]:
        """Return (runs of query positions, runs of key positions); run i of both belongs to one document.

        Documents without queries or without keys are left out. All batch entries must share one row.
        """
        q, k = self.only_row.tensor_split([self.queries])
        both = torch.arange(int(self.only_row.max()) + 1)
        both = both[torch.isin(both, q) & torch.isin(both, k)]
        return _runs_of(q, both), _runs_of(k, both)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return count_in_runs(*self.sides, box)

    def reason(self, pair: Pair) -> Reason:
        of_query, of_key = (pair.entry(self.only_row, place) for place in (pair.query, self.queries + pair.key))
        where = [
            f"{name} is {'padding' if number == PADDING else f'in document {number}'}"
            for name, number in ((pair.the_query, of_query), (pair.the_key, of_key))
        ]
        return Reason(self, of_query == of_key != PADDING, f"{where[0]}, {where[1]}")

    def row(self, query: int, keys: range) -> Ranges:
        number = int(self.only_row[query])
        seen = ((self.only_row[self.queries :] == number) & (number != PADDING)).nonzero().flatten()
        return as_ranges(intersect(keys, range(int(seen[0]), int(seen[-1]) + 1))) if len(seen) else ()

    def windows(self, num_positions: int) -> Windows:
        q, k = self.sides
        return Windows(q.starts, q.stops, k.starts, k.stops, torch.zeros_like(q.starts))


def _runs_of(row: Int64[Tensor, " L"], numbers: Int64[Tensor, " S"]) -> Runs:
    """Return the run of positions that each of the ascending `numbers` has in `row`."""
    found = row.unique_consecutive(return_counts=True)
    stops = found[1].cumsum(0)
    chosen = torch.isin(found[0], numbers)
    return Runs((stops - found[1])[chosen], stops[chosen])


@constructor
@advises(
    keywords=OF_PATTERNS
    | dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "q_lengths", "k_lengths"),
        "write q_ids=torch.arange(len(lengths)).repeat_interleave(lengths) with a tensor lengths, and k_ids alike",
    ),
    how="write masks.same_document(q_ids, k_ids), the document id of each query and of each key",
)
def same_document(q_ids: Any, k_ids: Any = None, *, name: str = "same_document") -> Pattern:
    """Pattern of packed cross-attention: each query sees the keys with its document id, possibly none.

    q_ids, k_ids: document ids, integers of shape (queries,) or (batch, queries), and (keys,) or (batch, keys). Ids grow
        from one document to the next; negative ids are padding. With offsets in the call, ids are for all positions
        from 0 to that of the last query or key. Alternatively q_ids is a string, and k_ids None: the name under which
        `attend(bindings=)` passes the tensor torch.cat([q_ids, k_ids], -1). New values do not recompile. Two tensors
        are copied into one here, so the pattern does not follow their later changes.
    name: name of the tensor in texts and errors, unless `q_ids` is a string. Names within a pattern must differ.

    For self-attention write `documents(ids)`. Raises TypeError for ids without `k_ids` and for a name with `k_ids`,
    ValueError for shapes other than these or unequal batches. When the ids are used, raises ValueError if they decrease
    or if there is not one id for each position.

    >>> masks.describe(masks.same_document([0, 0, 1], [0, 1, 1]), 3).useful_pairs  # 2 x 1 and 1 x 2
    4
    """
    if isinstance(q_ids, str):
        if k_ids is not None:
            raise TypeError("same_document takes one name, for the ids of queries and keys together; got k_ids too")
        return of_tensor(SameDocument, q_ids, name)
    if k_ids is None or isinstance(k_ids, str):
        raise TypeError(
            "same_document takes the ids of queries and those of keys, or one name for both together; for "
            f"self-attention write masks.documents(ids); got k_ids={k_ids!r}"
        )
    q, k = as_tensor("q_ids", q_ids), as_tensor("k_ids", k_ids)
    sizes = {len(ids) for ids in (q, k) if ids.dim() == 2}
    if {q.dim(), k.dim()} - {1, 2} or len(sizes) > 1:
        raise ValueError(
            "q_ids and k_ids must have shape (tokens,) or (batch, tokens), with one batch; got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    q, k = (ids.expand(*sizes, -1) for ids in (q, k.to(q.device)))
    return of_tensor(SameDocument, torch.cat([q, k], -1), name)
