"""The pairs of a table of single keys in a call, computed without block lists: by Triton, or by plain operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..._torch_private import has_triton
from ...masks.core import LARGEST, Every, Pattern, device_kind, outside_torch_modes, suspended_torch_modes
from ...masks.patterns import SelectedBlocks, TableSplit, names, require_row, require_tables
from ...masks.planning import KeyLists, tables_of_heads
from .._call import Call
from .._merge import sum_dtype
from .._ops import own_op
from .._tables import key_lists, require_batch, table_split_of, tensors_of
from ..kernels._key_lists import ListedPart, ListProblems, PaddedProblems, PaddedRows
from ..kernels._portable import Weighting, attention, gradients

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values
# b batch entries with lists of their own, T tables, R rows of a table, W entries of a row

_ENTRIES_AT_ONCE = 1 << 21  # table entries that are sorted at once, on an accelerator


@dataclass(frozen=True, eq=False)
class ListedKeys:
    """The pairs of a call's table of single keys; a FlexProgram has only the call's other pairs.

    source: the keys of each query, or the table that has them; in a graph, padded rows.
    first: (global index of the first head, position of the first query, position of the first key) of the call.
    place: index, in the call's pattern, of the branch with the table.
    places: for each branch of the pattern of other pairs, the index of the branch of the call's pattern that it is a
        part of.
    on_triton: True if Triton's kernels compute the pairs, False if plain operations do, None if Triton's kernels do for
        the tensors that they support. Plain operations always compute them with a score_mod or dropout, where a graph
        or autograd records the forward, and in the backward under deterministic algorithms.
    """

    source: KeyLists | KeyTable | PaddedRows
    first: tuple[int, int, int]
    place: int
    places: tuple[int, ...]
    on_triton: bool | None = None

    @classmethod
    def of(cls, call: Call, selection: TableSplit, bindings: Sequence[Tensor], q: Tensor) -> ListedKeys:
        """Return the pairs of a call's table.

        selection: split of the call's pattern, whose `leaf` lists single keys.
        bindings: the pattern's run-time tensors, sorted by name.

        Raises TypeError or ValueError for run-time tensors that do not fit the call.
        """
        source = KeyTable.of(call, selection, bindings, q)
        if source is None:
            source = key_lists(call, selection, bindings, len(q)).on(q.device)
        return cls(source, call.offsets, selection.place, selection.places)

    def attention(
        self,
        weighting: Weighting,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M E"],
        *,
        dtype: torch.dtype | None = None,
        recorded: bool = False,
    ) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
        """Return (out, natural lse) over the listed pairs; arguments are those of `kernels._portable.attention`."""
        if recorded or not self._takes_triton(weighting, q, k, v):
            return attention(self._problems(q, k, v), weighting, q, k, v, dtype=dtype, recorded=recorded)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=sum_dtype(q) if dtype is None else dtype)
        lse = q.new_empty(q.shape[:3], dtype=sum_dtype(q))
        q, k, v = (_with_contiguous_last_dim(x) for x in (q, k, v))
        if not q.is_meta:
            from ..kernels._gathered_keys import attend_part

            for part in self._parts():
                attend_part(part, weighting.scale, q, k, v, out, lse)
        return out, lse

    def gradients(
        self,
        weighting: Weighting,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M E"],
        lse: Float[Tensor, "B H N"],
        grad_out: Float[Tensor, "B H N E"],
        delta: Float[Tensor, "B H N"],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return (dq, dk, dv, [gradient of each learned tensor]) through the listed pairs.

        Arguments and dtypes are those of `kernels._portable.gradients`.
        """
        if torch.are_deterministic_algorithms_enabled() or not self._takes_triton(weighting, q, k, v):
            return gradients(self._problems(q, k, v), weighting, q, k, v, lse, grad_out, delta)
        dq = q.new_empty(q.shape)
        dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
        q, k, v, grad_out = (_with_contiguous_last_dim(x) for x in (q, k, v, grad_out.to(q.dtype)))
        if not q.is_meta:
            from ..kernels._gathered_keys import add_gradients_of_part

            for part in self._parts():
                add_gradients_of_part(part, weighting.scale, q, k, v, grad_out, lse, delta, dq, dk, dv)
        return dq, dk, dv, []

    def _takes_triton(self, weighting: Weighting, q: Tensor, k: Tensor, v: Tensor) -> bool:
        if weighting.score_mod is not None or weighting.shares is not None:
            return False
        if self.on_triton is not None:
            return self.on_triton
        if device_kind(q.device).engine != "flex" or q.is_meta or not has_triton():
            return False
        from ..kernels._gathered_keys import serves

        return serves(q, k, v)

    def _problems(self, q: Tensor, k: Tensor, v: Tensor) -> ListProblems | PaddedProblems:
        if isinstance(self.source, PaddedRows):
            return PaddedProblems.of(self.source, self.first, q, k, v)
        return ListProblems.of(self._lists, self.first, q, k, v)

    @cached_property
    def _lists(self) -> KeyLists:
        assert not isinstance(self.source, PaddedRows)
        return self.source if isinstance(self.source, KeyLists) else self.source.lists()

    def _parts(self) -> Iterator[ListedPart]:
        """Yield the lists for Triton's kernels: of all queries, or of some at a time."""
        assert not isinstance(self.source, PaddedRows)
        if isinstance(self.source, KeyLists):
            counts = self.source.counts
            yield ListedPart(self.source.keys, self.source.ends - counts, counts, self.source.shape)
        else:
            yield from self.source.parts()


def _with_contiguous_last_dim(x: Tensor) -> Tensor:
    """Return x, copied if the elements of its last dim are not adjacent."""
    return x if x.stride(3) == 1 else x.contiguous()


@dataclass(frozen=True, eq=False)
class KeyTable:
    """A run-time table of single keys on an accelerator; only `lists` copies its values to the host.

    selection, bindings: as in `ListedKeys.of`.
    batch: number of batch entries of the call.
    rows: keys of each query of the call, as positions, in any order; negative for none. A repeated key counts once, and
        a position outside the call's keys does not count.
    rule: mask that further restricts the table's pairs.
    groups: result of `tables_of_heads`: item i is the table that the i-th of t equal groups of consecutive heads reads.
    """

    call: Call
    selection: TableSplit
    bindings: Sequence[Tensor]
    batch: int
    rows: Int64[Tensor, "b T N W"]
    rule: Pattern
    groups: list[int]

    @classmethod
    def of(cls, call: Call, selection: TableSplit, bindings: Sequence[Tensor], q: Tensor) -> KeyTable | None:
        """Return the table of a call; None unless it has blocks of one query and one key, on the same accelerator as q.

        Arguments are those of `ListedKeys.of`.

        Raises TypeError or ValueError for a table whose shape or dtype does not fit the call, and ValueError unless the
        rule has 1 or q's number of batch entries.
        """
        leaf = selection.leaf
        if not isinstance(leaf, SelectedBlocks) or leaf.block != (1, 1) or device_kind(q.device).on_host or q.is_meta:
            return None
        if tensors_of(call, leaf, bindings)[0].device != q.device:
            return None
        table, first = _checked_table(call, selection, bindings, len(q))
        rows = (table if table.dim() == 4 else table[None])[:, :, call.q_offset - first :][:, :, : call.num_queries]
        rest = selection.rest
        rule = rest.resolve(dict(zip(names(rest), tensors_of(call, rest, bindings), strict=True)), call.extent)
        rule.require_entries(len(q))
        each = [tables_of_heads(call.bound(rule.entry(entry)), rows.shape[1]) for entry in range(rule.num_entries())]
        return cls(call, selection, bindings, len(q), rows, rule, max(each, key=len))

    def lists(self) -> KeyLists:
        """Return, for each query, the keys that the table lists and `rule` allows; copies the table to the host."""
        return key_lists(self.call, self.selection, self.bindings, self.batch).on(self.rows.device)

    @outside_torch_modes
    def parts(self) -> Iterator[ListedPart]:
        """Yield the lists of some consecutive queries at a time, to bound the table entries that are copied at once."""
        device, (_, tables, queries, width) = self.rows.device, self.rows.shape
        rows = self.rows if self.groups == list(range(tables)) else self.rows[:, self.groups]
        entries = max(len(rows), self.rule.num_entries())
        allowed = None
        if self.rule != Every():
            allowed = self.rule.mask_mod(num_heads=self.call.num_heads_global, device=device)
        head, query, key = self.call.offsets
        heads = torch.arange(len(self.groups), device=device) * (self.call.num_heads // len(self.groups)) + head
        entry, heads = torch.arange(entries, device=device)[:, None, None, None], heads[:, None, None]
        at_once = max(1, _ENTRIES_AT_ONCE // (entries * len(self.groups) * width))
        for begin in range(0, queries, at_once):
            some = rows[:, :, begin : begin + at_once].clamp(-1, LARGEST).to(torch.int32).sort(-1).values
            if allowed is not None:
                place = torch.arange(begin, begin + some.shape[2], device=device)[:, None] + query
                exists = some.clamp(0, self.call.extent.keys - 1)  # the rule may read a table of positions
                some = torch.where(allowed(entry, heads, place, exists), some, -1)
            shape = entries, len(self.groups), some.shape[2]
            keys = (some - key if key else some).expand(entries, -1, -1, -1).flatten()
            counts = keys.new_full((keys.numel() // width,), width, dtype=torch.int64)
            yield ListedPart(keys, torch.arange(0, keys.numel(), width, device=device), counts, shape, begin)


def _checked_table(
    call: Call, selection: TableSplit, bindings: Sequence[Tensor], batch: int
) -> tuple[Int64[Tensor, "*b T R W"], int]:
    """Return (table of a call, query block of its row 0).

    Raises TypeError or ValueError for a table whose shape or dtype does not fit the call. Its values are not checked.
    """
    leaf = selection.leaf
    (table,) = tensors_of(call, leaf, bindings)
    first = leaf.first_row(table, call.extent)
    require_tables(int(table.shape[-3]), call.num_heads_global)
    require_row(leaf.block[0], first, int(table.shape[-2]), call.q_offset)
    require_batch(int(table.shape[0]) if table.dim() == 4 else 1, batch)
    return table, first


@own_op("flexdilated::listed_rows")
def listed_rows(
    q: Tensor, k: Tensor, bindings: list[Tensor], constants: str, q_offset: int, k_offset: int, width: int
) -> Tensor:
    """Return the keys of each query in a table of single keys, as indices in the call: (b, t, N, width).

    Keys that the rule on the table's pairs does not allow are left out. Keys are in ascending order, padded with -1.
    `_shape_of_rows` gives the shape, which does not depend on the values of run-time tensors.

    bindings: the pattern's run-time tensors, sorted by name; the pattern must have no pairs outside the table.
    constants, q_offset, k_offset: `Call.arguments`.
    width: most keys of a query, as in `ListedParts`.
    """
    call = Call.of(q, k, constants, q_offset, k_offset)
    selection = table_split_of(call)
    assert selection is not None
    lists = key_lists(call, selection, bindings, len(q))
    rows = torch.full((len(lists.ends), width), -1)
    first = (lists.ends - lists.counts).repeat_interleave(lists.counts)
    row = torch.arange(len(lists.ends)).repeat_interleave(lists.counts)
    rows[row, torch.arange(len(lists.keys)) - first] = lists.keys
    entries, tables, *others = _shape_of_rows(call, selection, bindings, len(q), width)
    rows = rows.view(*lists.shape, width).repeat_interleave(tables // lists.num_tables, 1)
    return rows.expand(entries, tables, *others).to(q.device).contiguous()


@listed_rows.register_fake
def _(q, k, bindings, constants, q_offset, k_offset, width):
    call = Call.of(q, k, constants, q_offset, k_offset)
    with suspended_torch_modes():
        selection = table_split_of(call)
        assert selection is not None
        shape = _shape_of_rows(call, selection, bindings, int(q.shape[0]), width)
    return q.new_empty(shape, dtype=torch.int64)


def _shape_of_rows(
    call: Call, selection: TableSplit, bindings: Sequence[Tensor], batch: int, width: int
) -> tuple[int, int, int, int]:
    """Return (b, t, N, width), the shape of the result of `listed_rows`.

    If the rule that further restricts the table's pairs has run-time tensors, b is the batch and t the number of heads:
    values then decide which entries and heads have equal keys. Otherwise b is the number of batch entries of the table,
    and t the length of the result of `tables_of_heads`.

    Raises TypeError or ValueError for a table whose shape or dtype does not fit the call.
    """
    table, _ = _checked_table(call, selection, bindings, batch)
    if selection.rest.varies:
        return batch, call.num_heads, call.num_queries, width
    tables = len(tables_of_heads(call.bound(selection.rest), int(table.shape[-3])))
    return (int(table.shape[0]) if table.dim() == 4 else 1), tables, call.num_queries, width
