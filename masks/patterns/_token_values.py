"""Documents, padding and visible keys: run-time patterns with a value for each position or each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from ..core import (
    OF_PATTERNS,
    TILE,
    Bounds,
    Box,
    Counts,
    Extent,
    MaskMod,
    Pair,
    Pattern,
    Progression,
    Reason,
    advises,
    at_least,
    clip,
    constructor,
    count_runs,
    index_dtype,
    parameters,
    pattern_kind,
    renamed,
    require_choice,
)
from ._run_time import RunTime, Table, Windows, booleans, integers, of_tensor

# B batch entries, L positions, S spans

PADDING = -1
SIDES = ("right", "left")
_MAX_WINDOWS = 32  # more runs of keys than this are slower one by one than as one block list
_MOST_EMPTY = 0.25  # share of empty blocks: above, skipping them by block lists saves more than masks cost


@dataclass(frozen=True)
class Runs:
    """S ascending, disjoint runs of positions: run i is the positions starts[i] to stops[i] - 1."""

    starts: Int64[Tensor, " S"]
    stops: Int64[Tensor, " S"]

    def reached(self, progression: Progression) -> tuple[Counts, Counts]:
        """Return (first, last): each progression meets at most the runs first to last, and none if first > last.

        With a step above 1 it may step over some or all of these runs.
        """
        first = torch.searchsorted(self.stops, progression.first, right=True)
        return first, torch.searchsorted(self.starts, progression.last, right=True) - 1

    def within(self, progression: Progression, index: Counts) -> Progression:
        """Return each progression i cut to the positions in run index[i]; empty for indices beyond the last run."""
        if not len(self.starts):
            return Progression(progression.first, progression.step, torch.zeros_like(progression.count))
        known = index.clamp(max=len(self.starts) - 1)
        inside = clip(progression, self.starts[known], self.stops[known])
        return Progression(inside.first, inside.step, torch.where(index == known, inside.count, 0))


def common_runs(q_runs: Runs, k_runs: Runs, box: Box) -> tuple[Counts, Counts]:
    """Return (first index, number) of the runs that both the queries and the keys of each box may meet.

    q_runs, k_runs: equally many runs of query positions and of key positions; run i of both is one document.
    """
    (q_first, q_last), (k_first, k_last) = q_runs.reached(box.q), k_runs.reached(box.k)
    first = torch.maximum(q_first, k_first)
    return first, (torch.minimum(q_last, k_last) + 1 - first).clamp(min=0)


def count_in_runs(q_runs: Runs, k_runs: Runs, box: Box) -> Bounds:
    """Return bounds on the pairs of each box whose query and key are in runs of equal index. See `common_runs`."""
    first, number = common_runs(q_runs, k_runs, box)

    def pairs_in(index: int) -> Counts:
        return q_runs.within(box.q, first + index).count * k_runs.within(box.k, first + index).count

    return count_runs(number, box.area, pairs_in)


class Spans(Table):
    """Table that allows a pair iff both positions are in one span, such as a document or the real tokens.

    rows[b, t]: first position of the span that holds position t in batch entry b, or PADDING (-1).
    """

    kind = "spans table"

    rows: Int64[Tensor, "B L"]

    def described(self) -> str:
        if len(self.rows) != 1:
            return f"documents of {len(self.rows)} batch entries"
        return "1 document" if len(self.runs.starts) == 1 else f"{len(self.runs.starts)} documents"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        held, step = self.on(device), self.batch_step(device)
        (length,) = parameters(device, self.rows.shape[1])

        def same_span(b, h, q, k):
            spans, row = held.rows, b * step
            return spans[row, q] == spans[row, k + length]

        return same_span

    def copied_to(self, device: torch.device) -> Int64[Tensor, "B 2*L"] | Int32[Tensor, "B 2*L"]:
        """Return the start of each position's span, on a device: columns 0 to L - 1 for queries, L to 2L - 1 for keys.

        Padding has different values in the two halves.
        """
        # A mask_mod then needs one comparison for each pair, and few registers.
        rows = torch.cat([self.rows, self.rows.masked_fill(self.rows == PADDING, PADDING - 1)], dim=1)
        return rows.to(device, index_dtype(device, PADDING - 1, rows.shape[1]), copy=True)

    @cached_property
    def runs(self) -> Runs:
        """Return the spans in ascending order, without padding; all batch entries must share one row."""
        starts, sizes = self.only_row.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0)
        real = starts != PADDING
        return Runs((ends - sizes)[real], ends[real])

    @cached_property
    def _span_numbers(self) -> Int64[Tensor, " L"]:
        """Index of the span of each position, or PADDING (-1); all batch entries must share one row."""
        is_start = self.only_row == torch.arange(self.rows.shape[1])
        return (is_start.cumsum(0) - 1).masked_fill(self.only_row == PADDING, PADDING)

    @cached_property
    def longest(self) -> int:
        length = torch.arange(self.rows.shape[1]) + 1 - self.rows
        return int(length.masked_fill(self.rows == PADDING, 0).max())

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return count_in_runs(self.runs, self.runs, box)

    def reason(self, pair: Pair) -> Reason:
        if padding := pair.those(lambda position: pair.entry(self._span_numbers, position) == PADDING, "padding"):
            return Reason(self, False, padding)
        of_query, of_key = (pair.entry(self._span_numbers, position) for position in (pair.query, pair.key))

        def edges(number: int) -> tuple[int, int]:
            return pair.entry(self.runs.starts, number), pair.entry(self.runs.stops, number)

        where = pair.in_runs("document", of_query, of_key, edges)
        return Reason(self, of_query == of_key, where)

    def start_of(self, pair: Pair, position: int) -> int:
        """Return the first position of the span that holds `position`.

        position: position of the pair's query or key, which must not be padding.
        """
        return pair.entry(self.runs.starts, pair.entry(self._span_numbers, position))

    def windows(self, num_positions: int) -> Windows:
        return Windows.squares(self.runs.starts, self.runs.stops)


@pattern_kind("documents")
class Documents(RunTime):
    """Pattern that allows a pair iff query and key are in one document; a run-time tensor has each position's id.

    A document is a run of positions with equal ids, and ids grow from one document to the next. A negative id marks
    padding, which sees no key and is seen by no query. `longest`: declared maximum of tokens in a document, or None.
    """

    longest: int | None = at_least(1, default=None)

    def table(self, tensor: Tensor, extent: Extent) -> Spans:
        num_positions = extent.tokens
        ids = torch.atleast_2d(integers("document ids", tensor, (1, 2)))
        if ids.shape[1] != num_positions:
            raise ValueError(
                f"document ids must hold one id for each of the {num_positions} positions; got shape "
                f"{tuple(tensor.shape)}"
            )
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        check_sorted(ids, begins)
        positions = torch.arange(num_positions).expand_as(ids)
        starts = torch.where(begins, positions, 0).cummax(1).values
        starts = starts.masked_fill(ids < 0, PADDING)
        if self.longest is None:
            return Spans.of(starts)
        _check_longest(starts, self.longest)
        return Spans.of(starts, reach=self.longest - 1)

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """Return document ids of this shape: documents of `longest` tokens, or one document if `longest` is None."""
        position = torch.ones(shape, dtype=torch.int64).cumsum(-1) - 1
        return position // (self.longest or extent.tokens)


@pattern_kind("lengths")
class Lengths(RunTime):
    """Pattern that allows a pair iff query and key are both real tokens.

    The run-time tensor `name` has the number of real tokens of each batch entry. Real tokens are at the entry's first
    positions, or with padding="left" at its last positions.
    """

    num_dims = 0

    padding: str = "right"

    def check(self) -> None:
        require_choice("padding", self.padding, SIDES)
        super().check()

    def table(self, tensor: Tensor, extent: Extent) -> Spans:
        num_positions = extent.tokens
        meant = ": for a mask of tokens write masks.visible_keys(mask.bool())" if tensor.dim() == 2 else ""
        lengths = torch.atleast_1d(integers("lengths", tensor, (0, 1), meant=meant))[:, None]
        wrong = ((lengths < 0) | (lengths > num_positions)).nonzero()
        if len(wrong):
            batch = int(wrong[0, 0])
            raise ValueError(
                f"lengths must be at least 0 and at most the number of positions, {num_positions}; "
                f"got {int(lengths[batch, 0])} in batch entry {batch}"
            )
        positions = torch.arange(num_positions)
        start = num_positions - lengths if self.padding == "left" else torch.zeros_like(lengths)
        real = (positions >= start) & (positions < start + lengths)
        return Spans.of(torch.where(real, start, PADDING))

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        return torch.full(shape, extent.tokens)


@constructor
@advises(
    keywords={
        **OF_PATTERNS,
        **renamed(ids="document_ids doc_ids seq_ids segment_ids documents"),
        **dict.fromkeys(
            ("lengths", "cu_seqlens", "seqlens"),
            "write masks.documents(torch.arange(len(lengths)).repeat_interleave(lengths)) with a tensor lengths",
        ),
    },
    how="write masks.documents(ids), the document id of each token",
)
def documents(ids: Any, *, longest: int | None = None, name: str = "documents") -> Pattern:
    """Pattern in which each token sees all tokens of its own document.

    ids: integers of shape (tokens,) or (batch, tokens), the document id of each position. Ids grow from one document to
        the next; negative ids are padding. Or a string, the name under which `attend(bindings=)` passes the tensor. New
        values do not recompile.
    longest: maximum number of tokens in a document, which keeps the block tables of compiled graphs narrow; a longer
        document raises ValueError. None for no maximum.
    name: name of the tensor in texts and errors, unless `ids` is a string. Names within a pattern must differ.

    `p & documents(ids)` removes the pairs of p between documents; `p.per_document(ids)` also counts positions from the
    start of each document. When the ids are used, raises TypeError if they are no integers, and ValueError if there is
    not one for each position or if, padding aside, those of a document are not adjacent and above all earlier ones.

    >>> masks.describe(masks.documents([0, 0, 1, 1]), 4).useful_pairs  # 2 documents of 2 x 2
    8
    """
    return of_tensor(Documents, ids, name, longest=longest)


@constructor
@advises(
    keywords=OF_PATTERNS | {"key_padding_mask": "write masks.visible_keys(~key_padding_mask)"},
    how="write masks.lengths(lengths), the number of real tokens of each batch entry",
)
def lengths(lengths: Any, *, padding: str = "right", name: str = "lengths") -> Pattern:
    """Pattern in which all real tokens see each other; padding sees no key and is seen by no query.

    lengths: integers of shape (batch,) or (), the number of real tokens of each batch entry, from 0 to the number of
        positions. Or a string, the name under which `attend(bindings=)` passes the tensor.
    padding: the side of the padding, "right" or "left". For padding on the left, `p.per_document(lengths(n,
        padding="left"))` counts positions from the first real token, as without padding.
    name: name of the tensor in texts and errors, unless `lengths` is a string. Names within a pattern must differ.

    Raises ValueError for another `padding`; when the tensor is used, raises TypeError or ValueError if its dtype,
    values or shape do not fit.

    >>> masks.describe(masks.lengths([3]), 4).useful_pairs
    9
    """
    return of_tensor(Lengths, lengths, name, padding=padding)


def check_sorted(ids: Tensor, begins: Tensor) -> None:
    """Raise ValueError unless ids grow from one document to the next in each row; padding may be between documents.

    begins: True at the first position, and where an id differs from the previous one.
    """
    real = ids >= 0
    highest = torch.where(real, ids, -1).cummax(1).values
    before = torch.nn.functional.pad(highest[:, :-1], (1, 0), value=-1)
    wrong = (real & begins & (ids <= before)).nonzero()
    if len(wrong):
        batch, position = wrong[0].tolist()
        raise ValueError(
            "document ids must increase from one document to the next, and the tokens of a document must be adjacent; "
            f"got {int(ids[batch, position])} at position {position} after {int(before[batch, position])}, in batch "
            f"entry {batch}"
        )


def _check_longest(starts: Tensor, longest: int) -> None:
    length = (torch.arange(starts.shape[1]) - starts + 1).masked_fill(starts == PADDING, 0)
    if int(length.max()) > longest:
        batch, position = divmod(int(length.argmax()), starts.shape[1])
        raise ValueError(
            f"documents must have at most longest={longest} tokens; got one of {int(length.max())} or more that begins "
            f"at position {int(starts[batch, position])}, in batch entry {batch}"
        )


@pattern_kind("visible_keys")
class VisibleKeys(RunTime):
    """Pattern that allows a pair iff the run-time tensor `name`, a mask of keys, marks the key as visible."""

    def table(self, tensor: Tensor, extent: Extent) -> KeySet:
        visible = booleans("a mask of keys", tensor, ("b", "k_idx"))
        if tensor.dim() not in (1, 2) or tensor.shape[-1] != extent.keys:
            raise ValueError(
                f"visible keys must have shape ({extent.keys},) or (batch, {extent.keys}), one for each position from "
                f"0 to that of the last key, k_offset included; got {tuple(tensor.shape)}"
            )
        return KeySet.of(torch.atleast_2d(visible))

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)


class KeySet(Table):
    """Table that allows a pair iff rows[b, k] is True for its batch entry b and key k."""

    kind = "keyset table"

    rows: Bool[Tensor, "B L"]

    def described(self) -> str:
        if len(self.rows) != 1:
            return f"visible keys of {len(self.rows)} batch entries"
        return f"{int(self.only_row.sum())} of {self.rows.shape[1]} keys"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        held, step = self.on(device), self.batch_step(device)
        return lambda b, h, q, k: held.rows[b * step, k] & (q == q)

    @cached_property
    def _num_visible_before(self) -> Int64[Tensor, " L+1"]:
        """Number of visible keys before each position 0 to L; all batch entries must share one row."""
        return torch.nn.functional.pad(self.only_row.long().cumsum(0), (1, 0))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        size = self.rows.shape[1]
        first, last = box.k.first.clamp(0, size), (box.k.last + 1).clamp(0, size)
        seen = self._num_visible_before[last] - self._num_visible_before[first]
        if box.k.step == 1:
            pairs = box.q.count * seen
            return Bounds(pairs, pairs)
        every = seen == box.k.last + 1 - box.k.first
        high = box.q.count * torch.minimum(seen, box.k.count)
        return Bounds(torch.where(every, box.area, 0), high)

    @property
    def are_scattered(self) -> bool:
        """True if visible keys form over 32 runs in some batch entry, but fewer than 25 % of key blocks are empty.

        A block has 128 keys, and is empty if none of them is visible. Blocks of all batch entries count together.
        """
        edges = torch.nn.functional.pad(self.rows, (1, 1)).diff(dim=1).sum(1)
        filled = torch.nn.functional.pad(self.rows, (0, -self.rows.shape[1] % TILE)).unflatten(1, (-1, TILE))
        return int(edges.max()) > 2 * _MAX_WINDOWS and float(filled.any(2).float().mean()) > 1 - _MOST_EMPTY

    def reason(self, pair: Pair) -> Reason:
        allowed = bool(pair.entry(self.only_row, pair.key))
        return Reason(self, allowed, f"{pair.the_key} is {'visible' if allowed else 'hidden'}")

    def windows(self, num_positions: int) -> Windows | None:
        edges = torch.nn.functional.pad(self.only_row.int(), (1, 1)).diff()
        starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
        if len(starts) > _MAX_WINDOWS:
            return None
        first = torch.zeros_like(starts)
        return Windows(first, first + num_positions, starts, stops, first)


@constructor
@advises(
    keywords={
        **OF_PATTERNS,
        **renamed(visible="mask attention_mask visible_mask"),
        "key_padding_mask": "write masks.visible_keys(~key_padding_mask)",
    },
    how="write masks.visible_keys(visible), True for each key that queries may see",
)
def visible_keys(visible: Any, *, name: str = "visible_keys") -> Pattern:
    """Pattern in which each query sees exactly the keys that are marked True.

    visible: booleans of shape (positions,) or (batch, positions), with positions = k_offset + num_keys: one for each
        position from 0 to that of the last key, such as torch's `~key_padding_mask` or `attention_mask.bool()` of
        transformers. Or floats, 0 for True and -inf for False. Or a string, the name under which `attend(bindings=)`
        passes the tensor.
    name: name of the tensor in texts and errors, unless `visible` is a string. Names within a pattern must differ.

    When the tensor is used, raises TypeError or ValueError if its dtype, values or shape do not fit.

    >>> masks.describe(masks.visible_keys([True, False, True]), 3).useful_pairs
    6
    """
    return of_tensor(VisibleKeys, visible, name)
