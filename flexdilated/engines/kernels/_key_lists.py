"""Lists of single keys for the portable kernel, which gathers the keys, and for Triton's kernels.

In the portable kernel, query heads that share lists and a key/value head share a gather. Outside graphs, the kernel
computes lists in descending order of length, so that the lists of a chunk have similar lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int32, Int64, Shaped
from torch import Tensor

from ...masks.core import device_kind
from ...masks.planning import GATHERED_BYTES, KeyLists
from .._merge import sum_dtype
from .._score_mod import ScoreMod, apply_score_mod

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim
# X head sets of g query heads that share lists and a key/value head; x pairs of a batch entry and a head set
# t lists with L keys in a chunk; in a part, b batch entries with lists of their own, T tables and n queries

_BYTES_ON_DEVICE = 128 << 20  # of the keys and values that are gathered at once on an accelerator
_MOST_PADDING = 2  # longest over shortest list of a chunk
_BYTES_IN_GRAPHS = 64 << 20  # of the keys and values that a graph gathers at once
_MOST_CHUNKS = 32  # of a graph, which has the operations of each
META_CHUNKS = 2  # alike chunks that are run on the meta device: memory does not change after the second

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class ListChunk:
    """Attention problems that are computed at once: a problem is g query heads of a query over the keys of its list.

    t lists, padded to L keys, are each used by x problems.

    problem: (batch entry, query head, query) of each row, as indices of q; they broadcast to (x, t, g).
    block: indices of keys in the flattened (batch, key/value heads, keys).
    hidden: True for places after the end of a list, whose scores become -inf; None only if all lists of the call are
        equally long.
    key: index of each key of the lists.
    first: (global index of the first head, position of the first query, position of the first key) of the call.
    absent: the hidden places again, if made by `PaddedProblems`: `block` names key 0 there, which may hold NaN, so the
        gathered vectors are set to 0. None if made by `ListProblems`, where such places repeat their list's last key.
    query: index of each list's query for score_mod; None: that of `problem`. For an empty list, `query` and `key` have
        a pair of another list, if one has keys: score_mod may fail for pairs in no list.
    """

    problem: tuple[Int64[Tensor, "x _ 1"], Int64[Tensor, "x _ g"], Int64[Tensor, "1 t 1"]]
    block: Int64[Tensor, "x t L"]
    hidden: Bool[Tensor, "1 t 1 L"] | None
    key: Int64[Tensor, "t L"]
    first: tuple[int, int, int]
    absent: Bool[Tensor, "t L"] | None = None
    query: Int64[Tensor, "t 1"] | None = None

    @property
    def _places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch entries (x, t, 1), global heads (x, t, g), and positions of the queries (t, 1) and the keys (t, L)."""
        entry, head, query = torch.broadcast_tensors(*self.problem)
        query = query[0, :, :1] if self.query is None else self.query
        return entry[..., :1], head + self.first[0], query + self.first[1], self.key + self.first[2]

    def with_score_mod(self, score_mod: ScoreMod, scores: Float[Tensor, "x t g L"]) -> Float[Tensor, "x t g L"]:
        entry, head, query, key = self._places
        x, _, g = head.shape
        heads = head.transpose(1, 2).flatten(0, 1)
        of_heads = scores.transpose(1, 2).flatten(0, 1).unsqueeze(2)
        entries = entry.squeeze(2).repeat_interleave(g, 0)
        found = apply_score_mod(score_mod, of_heads, entries, heads, query, key, self.hidden)
        return found.squeeze(2).unflatten(0, (x, g)).transpose(1, 2)

    def shares_of_pairs(self, shares: ScoreMod) -> Shaped[Tensor, "x t g L"]:
        entry, head, query, key = self._places
        query = query[..., None]
        # The function reads no score: query takes its place.
        return shares(query, entry[..., None], head[..., None], query, key[:, None])


def _problems_per_list(sizes: tuple[int, int, int, int, int], entries: int, tables: int) -> int:
    """Return the number of problems, pairs of a batch entry and a head set, that share a list.

    sizes: (B, H, G, N, M).
    entries, tables: numbers of batch entries and of tables that have lists of their own.
    """
    return sizes[0] // entries * (lcm(tables, sizes[2]) // tables)


def _problems_of_lists(
    at: Int64[Tensor, " t"], sizes: tuple[int, int, int, int, int], entries: int, tables: int
) -> tuple[tuple[Int64[Tensor, "x _ 1"], Int64[Tensor, "x _ g"], Int64[Tensor, "1 t 1"]], Int64[Tensor, "x _ 1"]]:
    """Return (`ListChunk.problem` of the x problems that share each list, index of the first key of each problem).

    The index is that in the flattened (batch, key/value heads, keys).

    at: indices of the lists in the flattened (entries, tables, queries).
    sizes, entries, tables: as in `_problems_per_list`.
    """
    batch, heads, groups, queries, keys = sizes
    sets, device = lcm(tables, groups), at.device
    of_table, of_entry = sets // tables, batch // entries  # head sets and batch entries that share a list
    entry = torch.arange(of_entry, device=device).repeat_interleave(of_table)[:, None]
    head_set = torch.arange(of_table, device=device).repeat(of_entry)[:, None]
    query = at
    if entries * tables > 1:
        query = at % queries
        entry = entry + at // (queries * tables) * of_entry
        head_set = head_set + at // queries % tables * of_table
    head = (head_set * (heads // sets))[..., None] + torch.arange(heads // sets, device=device)
    first_key = (entry * groups + head_set * groups // sets) * keys
    return (entry[..., None], head, query[None, :, None]), first_key[..., None]


@dataclass(frozen=True, eq=False)
class ListProblems:
    """Attention of q (B, H, N, D) over lists of single keys of k (B, G, M, D).

    sizes: (B, H, G, N, M).
    first: (global index of the first head, position of the first query, position of the first key) of the call.
    row_bytes: bytes of a key and its value, of one head, in float32 or wider.
    is_meta: True for meta tensors, which are run only to find the peak memory.
    """

    lists: KeyLists
    sizes: tuple[int, int, int, int, int]
    first: tuple[int, int, int]
    row_bytes: int
    is_meta: bool = False

    @classmethod
    def of(
        cls,
        lists: KeyLists,
        first: tuple[int, int, int],
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M E"],
    ) -> ListProblems:
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        row_bytes = (k.shape[3] + v.shape[3]) * sum_dtype(k).itemsize
        return cls(lists, sizes, first, row_bytes, is_meta=q.is_meta)

    @cached_property
    def _order(self) -> Int64[Tensor, " n"] | None:
        """Indices of the lists in descending order of their lengths; None if all lengths are equal."""
        counts = self.lists.counts
        return None if bool((counts == counts[:1]).all()) else counts.argsort(descending=True, stable=True)

    @cached_property
    def _list_ranges(self) -> list[tuple[int, int, int]]:
        """Ranges of the lists in descending order of length: (begin, end, length of the longest list) of each range.

        A range is computed in one or more chunks. Each has all lists of the range, for some of the problems that share
        them. Lists without keys are in no range. For meta tensors, only the first few ranges of similar length are
        kept.
        """
        counts = self.lists.counts if self._order is None else self.lists.counts[self._order]
        rising = -counts.cpu()  # read once: on an accelerator, each read waits for it
        total, found, begin = int((rising < 0).sum()), [], 0
        while begin < total:
            length = -int(rising[begin])
            alike = int(torch.searchsorted(rising, -(length // _MOST_PADDING), right=True))
            lists = max(1, self._keys_at_once // (length * self._problems_per_list))
            end = min(total, max(alike, begin + 1), begin + lists)
            found.append((begin, end, length))
            begin = end
        return few_of_each_kind(found, lambda span: span[2].bit_length()) if self.is_meta else found

    @property
    def _problems_per_list(self) -> int:
        entries, tables, _ = self.lists.shape
        return _problems_per_list(self.sizes, entries, tables)

    @property
    def _keys_at_once(self) -> int:
        on_host = device_kind(self.lists.keys.device).on_host
        return max(1, (GATHERED_BYTES if on_host else _BYTES_ON_DEVICE) // self.row_bytes)

    def by_query_block(self, x: Float[Tensor, "B H N ..."], value: float = 0.0) -> Float[Tensor, "B H N ..."]:
        return x

    def by_key_block(self, x: Float[Tensor, "B G M ..."]) -> Float[Tensor, "BGM 1 ..."]:
        return x.flatten(0, 2).unsqueeze(1)

    def queries(self, x: Float[Tensor, "B H N ..."]) -> Float[Tensor, "B H N ..."]:
        return x

    def keys(self, x: Float[Tensor, "BGM 1 ..."]) -> Float[Tensor, "B G M ..."]:
        return x.unflatten(0, (self.sizes[0], self.sizes[2], -1)).squeeze(3)

    def chunks(self) -> Iterator[ListChunk]:
        """Yield chunks that together have all non-empty lists, of all heads and batch entries; the longest come first.

        For meta tensors, yield only the first few chunks of each kind.
        """
        entries, tables, _ = self.lists.shape
        for begin, end, length in self._list_ranges:
            span = torch.arange(begin, end, device=self.lists.keys.device)
            at = span if self._order is None else self._order[begin:end]
            (entry, head, query), first_key = _problems_of_lists(at, self.sizes, entries, tables)
            key, hidden = self._keys_of(at, begin, end, length)
            together = max(1, self._keys_at_once // (length * (end - begin)))
            for some in range(0, self._problems_per_list, together)[: META_CHUNKS if self.is_meta else None]:
                part = slice(some, some + together)
                yield ListChunk((entry[part], head[part], query), first_key[part] + key, hidden, key, self.first)

    def _keys_of(
        self, at: Int64[Tensor, " t"], begin: int, end: int, length: int
    ) -> tuple[Int64[Tensor, "t L"], Bool[Tensor, "1 t 1 L"] | None]:
        """Return (keys of the lists `at`, as indices in the call; mask of the places after the end of a list).

        After its end, a list's last key is repeated. The mask is None if all lists of the call are equally long.

        The lists are those from `begin` to `end` in the order of `_list_ranges`; the longest has `length` keys.
        """
        if self._order is None:
            return self.lists.keys[begin * length : end * length].view(-1, length), None
        count, place = self.lists.counts[at, None], torch.arange(length, device=at.device)
        # A shorter list reads its last key again: other keys may hold NaN that no query sees.
        key = self.lists.keys[self.lists.ends[at, None] - count + torch.minimum(place, count - 1)]
        return key, (place >= count)[None, :, None]


@dataclass(frozen=True, eq=False)
class ListedPart:
    """Lists of the keys of n consecutive queries, as Triton's kernels read them.

    keys: indices of keys in the call. In each list equal indices are adjacent and count once; an index that is not of a
        key of the call is ignored.
    begins, counts: index in `keys` at which each list begins, and its length. Item (e * T + t) * n + i is for query
        `first` + i in table t of batch entry e.
    shape: (b, T, n).
    first: index of the first query.
    """

    keys: Int32[Tensor, " L"] | Int64[Tensor, " L"]
    begins: Int64[Tensor, " bTn"]
    counts: Int64[Tensor, " bTn"]
    shape: tuple[int, int, int]
    first: int = 0


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Lists of keys, padded to equal length: for graphs, whose shapes do not depend on the lists' values.

    rows: keys of each query, as indices in the call; negative for none.
    """

    rows: Int64[Tensor, "b T N W"]


@dataclass(frozen=True, eq=False)
class PaddedProblems:
    """Attention of q (B, H, N, D) over padded lists of single keys of k (B, G, M, D).

    sizes, first, row_bytes: as in `ListProblems`.
    """

    lists: PaddedRows
    sizes: tuple[int, int, int, int, int]
    first: tuple[int, int, int]
    row_bytes: int

    @classmethod
    def of(
        cls,
        lists: PaddedRows,
        first: tuple[int, int, int],
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M E"],
    ) -> PaddedProblems:
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        return cls(lists, sizes, first, (k.shape[3] + v.shape[3]) * sum_dtype(k).itemsize)

    by_query_block, by_key_block = ListProblems.by_query_block, ListProblems.by_key_block
    queries, keys = ListProblems.queries, ListProblems.keys

    def chunks(self) -> Iterator[ListChunk]:
        """Yield chunks that together have all queries, each query once for each batch entry and query head."""
        entries, tables, queries, width = self.lists.rows.shape
        rows, total = self.lists.rows.flatten(0, 2), entries * tables * queries
        listed = (rows >= 0).flatten().to(torch.int8).argmax(0, keepdim=True)  # a place with a key
        other = listed // width % queries, rows.flatten().index_select(0, listed).clamp(min=0)
        list_bytes = self.row_bytes * width * _problems_per_list(self.sizes, entries, tables)
        at_once = max(1, _BYTES_IN_GRAPHS // list_bytes, -(-total // _MOST_CHUNKS))
        for begin in range(0, total, at_once):
            at = torch.arange(begin, min(total, begin + at_once), device=rows.device)
            problem, first_key = _problems_of_lists(at, self.sizes, entries, tables)
            none = rows[begin : begin + at_once] < 0
            key, empty = rows[begin : begin + at_once].clamp(min=0), none.all(1, keepdim=True)
            block = first_key + key
            query = torch.where(empty, other[0], problem[2][0])
            key = torch.where(empty, other[1], key)
            yield ListChunk(problem, block, none[None, :, None], key, self.first, none, query)


def few_of_each_kind(items: Sequence[Item], kind: Callable[[Item], Hashable]) -> list[Item]:
    """Return the first `META_CHUNKS` items of each kind, in order."""
    alike: Counter[Hashable] = Counter()
    found = []
    for item in items:
        alike[kind(item)] += 1
        if alike[kind(item)] <= META_CHUNKS:
            found.append(item)
    return found
