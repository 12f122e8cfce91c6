"""Execution of engine aten for tables of single keys: keys are gathered, or all pairs computed under a dense mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ...masks.core import device_kind
from ...masks.planning import KeyLists
from .._merge import WholeRows, sum_dtype
from ..kernels._kernel import flash_backward, flash_forward
from ..kernels._key_lists import META_CHUNKS, ListProblems
from ..kernels._portable import Weighting, attention, gradients

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim
# b batch entries with lists of their own, T tables, S head sets: query heads that share a table and a key/value head

_MASK_BYTES = 32 << 20  # of the mask of queries that are computed at once


@dataclass(frozen=True, eq=False)
class SingleKeys:
    """Attention over lists of single keys.

    offsets: (global index of the first head, position of the first query, position of the first key) of the call.
    """

    lists: KeyLists
    offsets: tuple[int, int, int]

    def forward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"], scale: float
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """Return (out, natural lse) in float32 or wider; a query without keys has output 0 and lse -inf."""
        wide = sum_dtype(q)
        if self._gathers(q, k):
            return attention(ListProblems.of(self.lists, self.offsets, q, k, v), Weighting(scale), q, k, v)
        masked = _DenseMask(self.lists, q.shape[1], k.shape[1], k.shape[2])
        q, k, v = masked.clear_queries(q), masked.clear_keys(k), masked.clear_keys(v)
        out, lse = torch.empty_like(q, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
        for some, keys, mask in masked.chunks(q):
            few_k, few_v = k[:, :, keys], v[:, :, keys]
            out[:, :, some], lse[:, :, some] = flash_forward(q[:, :, some], few_k, few_v, scale=scale, mask=mask)
        return masked.clear_queries(out), masked.clear_queries(lse, -torch.inf)

    def backward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"], whole: WholeRows,
        scale: float,
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:  # fmt: skip
        """Return (dq, dk, dv) in float32 or wider.

        whole: out, lse and their gradients, of rows that may have more keys than the lists.
        """
        wide, lse = sum_dtype(q), whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf)
        if self._gathers(q, k):
            problems = ListProblems.of(self.lists, self.offsets, q, k, v)
            dq, dk, dv, _ = gradients(problems, Weighting(scale), q, k, v, lse, whole.grad_out, whole.delta())
            return dq.to(wide), dk, dv
        width, masked = v.shape[3], _DenseMask(self.lists, q.shape[1], k.shape[1], k.shape[2])
        (q, k, v), grad_out, out = whole.with_lse_channel(q, k, v)
        q, grad_out, out = (masked.clear_queries(x) for x in (q, grad_out, out))
        lse, k, v = masked.clear_queries(lse, torch.inf), masked.clear_keys(k), masked.clear_keys(v)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for some, keys, mask in masked.chunks(q):
            few_grads, few_q, few_out, few_lse = (x[:, :, some] for x in (grad_out, q, out, lse))
            few_k, few_v = k[:, :, keys], v[:, :, keys]
            found = flash_backward(few_grads, few_q, few_k, few_v, few_out, few_lse, scale=scale, mask=mask)
            dq[:, :, some] = found[0]
            dk[:, :, keys] += found[1]
            dv[:, :, keys] += found[2]
        dk, dv = masked.key_gradients(dk), masked.key_gradients(dv)
        return dq[..., :width], dk[..., :width], dv[..., :width]

    def _gathers(self, q: Tensor, k: Tensor) -> bool:
        masks = device_kind(q.device).on_host or q.is_meta
        return not masks or self.lists.favours_gather(q.shape[1], k.shape[1])


@dataclass(frozen=True, eq=False)
class _DenseMask:
    """The listed pairs as a dense mask, for some queries at a time."""

    lists: KeyLists
    num_heads: int
    num_kv_heads: int
    num_keys: int

    @cached_property
    def _num_sets(self) -> int:
        return lcm(self.lists.shape[1], self.num_kv_heads)

    @cached_property
    def _list_of_pair(self) -> Tensor:
        """Index of the list that each of the listed keys is in."""
        return torch.arange(len(self.lists.ends)).repeat_interleave(self.lists.counts)

    @cached_property
    def _blind_queries(self) -> Bool[Tensor, "b H N 1"] | None:
        """True for queries without keys; None if there are none."""
        blind = (self.lists.counts == 0).view(self.lists.shape)
        if not bool(blind.any()):
            return None
        return blind.repeat_interleave(self.num_heads // self.lists.shape[1], 1).unsqueeze(-1)

    @cached_property
    def _unseen_keys(self) -> Bool[Tensor, "b S M 1"] | None:
        """True for keys that no query of the head set sees; None if there are none."""
        entries, tables, queries = self.lists.shape
        unseen = torch.ones(entries * tables, self.num_keys, dtype=torch.bool)
        unseen[self._list_of_pair // queries, self.lists.keys] = False
        if not bool(unseen.any()):
            return None
        return unseen.view(entries, tables, -1).repeat_interleave(self._num_sets // tables, 1).unsqueeze(-1)

    def clear_queries(self, x: Shaped[Tensor, "B H N ..."], value: float = 0.0) -> Shaped[Tensor, "B H N ..."]:
        """Return x with `value` at queries without keys, which may hold NaN."""
        if self._blind_queries is None or x.is_meta:
            return x
        return x.masked_fill(self._blind_queries if x.dim() == 4 else self._blind_queries.squeeze(-1), value)

    def clear_keys(self, x: Float[Tensor, "B G M D"]) -> Float[Tensor, "B S M D"]:
        """Return x (keys or values) for each of the S head sets, with 0 at keys that no query of the head set sees.

        If every head set sees all keys, the result is x itself, with its G heads.
        """
        if self._unseen_keys is None:
            return x
        x = x.repeat_interleave(self._num_sets // self.num_kv_heads, 1)
        return x if x.is_meta else x.masked_fill(self._unseen_keys, 0.0)

    def key_gradients(self, x: Float[Tensor, "B S M D"]) -> Float[Tensor, "B G M D"]:
        return x if x.shape[1] == self.num_kv_heads else x.unflatten(1, (self.num_kv_heads, -1)).sum(2)

    def chunks(self, q: Float[Tensor, "B H N D"]) -> Iterator[tuple[slice, slice, Float[Tensor, "#B #H n m"]]]:
        """Yield (slice of queries, slice of keys, additive mask of their pairs); together they have all queries.

        A slice of queries that stops at `end` gets the first `KeyLists.num_masked_keys(end)` keys. For meta tensors,
        only the first `META_CHUNKS` slices of queries are yielded, with all keys and a mask that hides all pairs.
        """
        entries, tables, queries = self.lists.shape
        heads = 1 if tables == 1 else self.num_heads
        at_once = max(16, _MASK_BYTES // (entries * heads * self.num_keys * q.element_size()))
        for begin in range(0, queries, at_once)[: META_CHUNKS if q.is_meta else None]:
            end = min(queries, begin + at_once)
            parts = [] if q.is_meta else [self._listed_pairs(matrix, begin, end) for matrix in range(entries * tables)]
            keys = slice(0, self.lists.num_masked_keys(end) if parts else self.num_keys)
            mask = q.new_full((entries, tables, end - begin, keys.stop), -torch.inf)
            for matrix, (row, key) in enumerate(parts):
                mask[matrix // tables, matrix % tables][row, key] = 0.0
            yield slice(begin, end), keys, mask.repeat_interleave(heads // tables, 1)

    def _listed_pairs(self, matrix: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return (query - begin, key) of the pairs that a table lists for the queries from `begin` to end - 1.

        matrix: batch entry * number of tables + index of the table.
        """
        first_list = matrix * self.lists.shape[2] + begin
        first_key = int(self.lists.ends[first_list - 1]) if first_list else 0
        own = slice(first_key, int(self.lists.ends[first_list + end - begin - 1]))
        return self._list_of_pair[own] - first_list, self.lists.keys[own]
