"""The keys of each query as lists of single keys, of any lengths, for kernels that gather keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import lcm

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...blocks import allowed_pairs
from ...core import Bound, Every, Pattern
from ...patterns import KeyRows, require_tables
from ._table import GATHERED_BYTES, TableWork, tables_of_heads

# b batch entries with lists of their own, T tables, N queries, M keys, E listed pairs

_PAIRS_AT_ONCE = 1 << 18  # evaluated together: bounds the memory
# Times relative to that of one pair in ATen's kernel under a dense mask, measured on CPU with head dim 64:
_GATHERED_KEY_COST = 24  # a key and its value that are gathered
_GATHERED_PAIR_COST = 1.5  # a pair of a query and a gathered key
_QUERIES_AT_ONCE = 256  # queries that are taken to be computed together under a dense mask


@dataclass(frozen=True, eq=False)
class KeyLists:
    """Lists of keys: list (e * T + t) * N + n has the keys of query n in batch entry e, for the heads of table t.

    keys: indices of keys in the call, list after list, ascending in each.
    ends: one past the last place of each list in `keys`.
    shape: (b, T, N); b is 1 or the number of batch entries, and heads share tables in consecutive groups of equal size.
    num_keys: number of the call's keys, M.
    q_lead: position of the first query minus that of the first key.
    """

    keys: Int64[Tensor, " E"]
    ends: Int64[Tensor, " bTN"]
    shape: tuple[int, int, int]
    num_keys: int
    q_lead: int

    @classmethod
    def of(cls, entries: Sequence[tuple[Bound, KeyRows]]) -> KeyLists:
        """Return, for each query of a call, the keys that the tables list and the rule of their pairs allows.

        entries: for each batch entry, or once for all, (the pattern without the table, bound to the call's sizes; the
            keys that the tables list).

        Raises ValueError if the number of tables does not divide the heads or the lists do not include the call's first
        query.
        """
        tables = [tables_of_heads(bound, rows.shape[0]) for bound, rows in entries]
        most = max(map(len, tables))
        found = [
            _allowed_keys(bound, rows, [table for table in own for _ in range(most // len(own))])
            for (bound, rows), own in zip(entries, tables, strict=True)
        ]
        counts = torch.cat([count for count, _ in found])
        bound = entries[0][0]
        shape, q_lead = (len(entries), most, bound.num_queries), bound.q_offset - bound.k_offset
        return cls(torch.cat([keys for _, keys in found]), counts.cumsum(0), shape, bound.num_keys, q_lead)

    @cached_property
    def counts(self) -> Int64[Tensor, " bTN"]:
        """Number of keys in each list."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    @property
    def num_tables(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.ends.nbytes

    def on(self, device: torch.device) -> KeyLists:
        return replace(self, keys=self.keys.to(device), ends=self.ends.to(device))

    def pairs_of_tables(self) -> Int64[Tensor, " T"]:
        """Return the number of pairs in each table for one head, summed over the b batch entries of `shape`."""
        return self.counts.view(self.shape).sum((0, 2))

    def full_and_other_blocks(self) -> tuple[int, int]:
        """Return (number of listed pairs, 0): each pair is a fully allowed block by itself, and there are no others."""
        return len(self.keys), 0

    @cached_property
    def is_causal(self) -> bool:
        """True if no query lists a key at a later position than its own."""
        query = torch.arange(len(self.ends), device=self.ends.device).repeat_interleave(self.counts) % self.shape[2]
        return not len(self.keys) or bool((self.keys - query).max() <= self.q_lead)

    def num_masked_keys(self, end: int) -> int:
        """Return n: under a dense mask, a chunk of queries up to query end - 1 reads keys 0 to n - 1.

        With causal lists, these are the keys up to the position of query end - 1, at least one; else all keys.
        """
        # No further property of the lists is used: otherwise later tokens could change the rounding of earlier results.
        return min(max(1, end + self.q_lead), self.num_keys) if self.is_causal else self.num_keys

    @cached_property
    def masked_pairs(self) -> int:
        """Number of pairs, of one head and the b entries of `shape`, that dense masks of 256 queries compute."""
        entries, _, queries = self.shape
        ends = [min(queries, begin + _QUERIES_AT_ONCE) for begin in range(0, queries, _QUERIES_AT_ONCE)]
        return entries * sum((end - begin) * self.num_masked_keys(end) for begin, end in pairwise([0, *ends]))

    def favours_gather(self, num_heads: int, num_kv_heads: int) -> bool:
        """True if ATen is predicted to take no longer for gathered keys than for a dense mask."""
        tables, sets = self.shape[1], lcm(self.shape[1], num_kv_heads)
        gathered = len(self.keys) * (_GATHERED_KEY_COST * sets + _GATHERED_PAIR_COST * num_heads) / tables
        return gathered <= self.masked_pairs * num_heads

    def work(
        self, bound: Bound, num_kv_heads: int, width: int, element_bytes: int, *, gathers: bool, copies: bool = True
    ) -> TableWork:
        """Return the work of the call, for keys and values of `width` channels of `element_bytes` bytes.

        gathers: True if only listed keys are computed, False for the first `num_masked_keys` keys under a dense mask.
        copies: True if listed keys are copied into blocks, False for one kernel that reads each in place.
        """
        entries, tables, queries = self.shape
        vectors = entries * queries * bound.num_heads
        if not gathers:
            return TableWork(self.masked_pairs * bound.num_heads, 0, 0, 1, 0)
        pairs, copied = (
            len(self.keys) * (bound.num_heads // tables),
            len(self.keys) * (lcm(tables, num_kv_heads) // tables),
        )
        if not copies:
            return TableWork(pairs, 0, 0, 1, 2 * copied)
        calls = -(-2 * copied * width * element_bytes // GATHERED_BYTES)
        return TableWork(pairs, copied, vectors, calls, 4 * copied + 5 * vectors)


def _allowed_keys(
    bound: Bound, rows: KeyRows, tables: Sequence[int]
) -> tuple[Int64[Tensor, " TN"], Int64[Tensor, " E"]]:
    """Return (number of keys of each query, the keys of all queries): first for tables[0], then for tables[1], ...

    The keys are those that the rule of `bound` allows, as indices in the call.

    rows: keys that the tables list.
    tables: index of the table of each group of heads; the heads form len(tables) consecutive groups of equal size.

    Raises ValueError as `KeyLists.of`.
    """
    number, queries = rows.shape
    require_tables(number, bound.num_heads_global)
    if bound.q_offset < rows.first:
        raise ValueError(
            "a pattern of chosen keys or blocks must have a row for each query; got rows from position "
            f"{rows.first} on, and queries from {bound.q_offset} on"
        )
    each, first = bound.num_heads // len(tables), bound.q_offset - rows.first
    counts, keys = [], []
    for place, table in enumerate(tables):
        begin = table * queries + first
        ends = torch.cat(
            [
                rows.ends[begin - 1 : begin] if begin else rows.ends.new_zeros(1),
                rows.ends[begin : begin + bound.num_queries],
            ]
        )
        key = rows.keys[int(ends[0]) : int(ends[-1])] - bound.k_offset
        query = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
        inside = (key >= 0) & (key < bound.num_keys)  # a block may extend past the last key
        query, key = query[inside], key[inside]
        kept = _mask_of_allowed_pairs(bound, bound.head_offset + place * each, query, key)
        if kept is not None:
            query, key = query[kept], key[kept]
        counts.append(query.bincount(minlength=bound.num_queries))
        keys.append(key)
    return torch.cat(counts), torch.cat(keys)


def _mask_of_allowed_pairs(
    bound: Bound, head: int, query: Int64[Tensor, " E"], key: Int64[Tensor, " E"]
) -> Bool[Tensor, " E"] | None:
    """Return a mask, True for each pair (query[e], key[e]) that the rule allows; None for the rule `every`.

    head: global index.
    query, key: indices in the call.
    """
    if isinstance(bound.pattern, Every):
        return None
    assert isinstance(bound.pattern, Pattern)
    heads = torch.full((1,), head)
    parts = zip(
        (query + bound.q_offset).split(_PAIRS_AT_ONCE), (key + bound.k_offset).split(_PAIRS_AT_ONCE), strict=True
    )
    return torch.cat([allowed_pairs(bound.pattern, bound.num_heads_global, heads, *part) for part in parts])
