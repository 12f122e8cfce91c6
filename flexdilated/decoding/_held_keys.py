"""HeldKeys: a buffer of the keys and values that later queries can see; other keys are evicted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..engines import refuse_transforms
from ..masks.attended import FOREVER, RowSource, maybe_visible
from ..masks.core import outside_torch_modes, within

# B batch, G key/value heads, N tokens, D head dim of keys, E of values, S slots, C selected batch entries


class StoredRun(NamedTuple):
    """Keys at positions [first, first + length), stored at indices [slot, slot + length) of the buffer."""

    first: int
    slot: int
    length: int

    @property
    def stop(self) -> int:
        return self.first + self.length


_PAGE = 64  # keys that are kept or evicted together
_LEAST_SLOTS = 256


class HeldKeys:
    """Buffer of the keys and values of past tokens that later queries can see; other keys are evicted.

    A run has consecutive positions at consecutive indices of the buffer's token dim. A full buffer is packed: keys that
    no later query can see are dropped, and the remaining runs are moved to the front.

    keys, values: tensors that give the buffer's batch, heads, head dims, dtype and device; their contents are not
        stored.
    sources: rules of queries, such as the distinct rules of the heads. A query can see a key if one of them allows it.
    capacity: fixed number of tokens of the buffer; None to grow.
    undo: keys that one of the last `undo` queries can see are kept, too.
    """

    def __init__(
        self,
        keys: Float[Tensor, "B G N D"],
        values: Float[Tensor, "B G N E"],
        sources: Sequence[RowSource],
        *,
        capacity: int | None = None,
        undo: int = 0,
    ) -> None:
        self.sources, self.capacity, self.undo = sources, capacity, undo
        num_slots = _LEAST_SLOTS if capacity is None else capacity
        self.keys, self.values = _buffer(keys, num_slots), _buffer(values, num_slots)
        self.runs: list[StoredRun] = []

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def traits(self) -> str:
        """Text with the number of key/value heads, head dims, dtype and device, which all tokens share."""
        return _traits(self.keys, self.values)

    @property
    def num_used(self) -> int:
        return self.runs[-1].slot + self.runs[-1].length if self.runs else 0

    def append(self, k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N E"], first: int) -> None:
        """Append the keys and values of tokens at positions from `first`, replacing held tokens from there on.

        Raises ValueError if the new keys and the keys that must be kept exceed the capacity.
        """
        self.drop_from(first)  # keys of an interrupted call
        room = k.shape[2]
        if self.num_slots - self.num_used < room:
            kept = self.visible(max(0, first - self.undo))
            live = sum(map(len, kept))
            if self.capacity is not None and live + room > self.capacity:
                raise ValueError(
                    f"the cache holds at most capacity={self.capacity} keys; {live} that later queries may see and "
                    f"{room} new ones do not fit: raise the capacity, or pass the new tokens in smaller chunks"
                )
            self._pack(kept, self.capacity or _num_slots_for(live + room))
        self._write(k, v, first)

    def _write(self, k: Tensor, v: Tensor, first: int) -> None:
        """Write k and v after the last used index; the buffer must have room."""
        slot, length = self.num_used, k.shape[2]
        self.keys[:, :, slot : slot + length] = k
        self.values[:, :, slot : slot + length] = v
        if self.runs and self.runs[-1].stop == first:
            last = self.runs.pop()
            first, slot, length = last.first, last.slot, last.length + length
        self.runs.append(StoredRun(first, slot, length))

    def _pack(self, kept: Sequence[range], num_slots: int) -> None:
        """Move the keys at these ranges of positions to a new buffer of num_slots, and drop all other keys."""
        old_keys, old_values, old = self.keys, self.values, [self.slices(positions) for positions in kept]
        self.keys, self.values, self.runs = _buffer(old_keys, num_slots), _buffer(old_values, num_slots), []
        for positions, slices in zip(kept, old, strict=True):
            first = positions.start
            for part in slices:
                self._write(old_keys[:, :, part], old_values[:, :, part], first)
                first += part.stop - part.start

    def shrink(self, query: int) -> None:
        """Shrink the buffer if less than about a quarter of it is visible to queries from `query` - undo on.

        query: position of the next query.

        A buffer with a fixed capacity, or of at most 512 slots, is not shrunk.
        """
        if self.capacity is None and self.num_slots > _LEAST_SLOTS:
            kept = self.visible(max(0, query - self.undo))
            num_slots = _num_slots_for(sum(map(len, kept)))
            if 2 * num_slots < self.num_slots:
                self._pack(kept, num_slots)

    def snapshot(self) -> HeldKeys:
        """Return a copy of the current state that shares the buffers with this object.

        Append to only one of the two, because both write to the same slots. If tokens are dropped from that one before,
        appending overwrites them in the other, too.
        """
        other = copy(self)
        other.runs = list(self.runs)
        return other

    def check_continues(
        self, k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N E"], batch: int | None = None
    ) -> None:
        """Raise ValueError unless k and v have the batch, heads, head dims, dtype and device of the held tokens.

        batch: the batch that k and v must have; None for that of the buffer.
        """
        held = f"batch {self.keys.shape[0] if batch is None else batch}, {self.traits}"
        new = f"batch {k.shape[0]}, {_traits(k, v)}"
        if held != new:
            raise ValueError(f"k and v must match those in the cache, {held}; got {new}")

    def crop(self, position: int, seen: int) -> None:
        """Drop the tokens at `position` and later, or raise ValueError if queries from there on may see evicted keys.

        seen: number of tokens appended so far, for the error.
        """
        if self.lacks(position):
            raise ValueError(
                f"the cache no longer holds all keys that queries from position {position} on may see; it guarantees "
                f"to go back by undo={self.undo} tokens, and has seen {seen}: make it with a larger undo"
            )
        self.drop_from(position)

    def drop_from(self, position: int) -> None:
        """Drop the keys at `position` and later."""
        while self.runs and self.runs[-1].stop > position:
            last = self.runs.pop()
            if last.first < position:
                self.runs.append(StoredRun(last.first, last.slot, position - last.first))

    def select(self, entries: Int64[Tensor, " C"]) -> None:
        """Keep only these batch entries (indices), in this order, in new buffers; indices may repeat."""
        with torch.inference_mode(False):  # as in `_buffer`
            self.keys, self.values = (x.index_select(0, entries.to(x.device)) for x in (self.keys, self.values))

    def slices(self, positions: range) -> list[slice]:
        """Return the slices of the buffer's token dim that have the keys at `positions`, one for each run with any.

        positions: an ascending range, all of whose positions must be held.
        """
        found = []
        for run in self.runs:
            held = within(positions, run.first, run.stop)
            if held:
                shift = run.slot - run.first
                found.append(slice(held[0] + shift, held[-1] + shift + 1, held.step))
        return found

    def slots(self, positions: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Return the index in the buffer's token dim of each position; positions are on the CPU, and must be held."""
        firsts = torch.tensor([run.first for run in self.runs])
        shifts = torch.tensor([run.slot - run.first for run in self.runs])
        return positions + shifts[torch.searchsorted(firsts, positions, right=True) - 1]

    @outside_torch_modes
    def visible(
        self, query: int, num_queries: int = FOREVER, sources: Sequence[RowSource] | None = None
    ) -> list[range]:
        """Return the ascending ranges of held positions that some query in [query, query + num_queries) may see.

        They consist of whole pages, of up to 64 keys of a run, so a range may include keys that no such query sees.

        num_queries: by default all later queries.
        sources: rules of these queries; None for the buffer's own rules.
        """
        pages = [page for run in self.runs for page in _pages(run.first, run.stop)]
        kept: list[range] = []
        for page, seen in zip(pages, self._are_visible(pages, query, num_queries, sources), strict=True):
            if seen and kept and kept[-1].stop == page.start:
                kept[-1] = range(kept[-1].start, page.stop)
            elif seen:
                kept.append(page)
        return kept

    @outside_torch_modes
    def lacks(self, query: int, sources: Sequence[RowSource] | None = None) -> bool:
        """True if a query at position `query` or later may see an evicted key at a position below `query`.

        False is certain; True is not, as it is derived from bounds. sources: as in `visible`.
        """
        ends = [0, *(run.stop for run in self.runs)]
        starts = [*(run.first for run in self.runs), query]
        gaps = (_pages(end, min(start, query)) for end, start in zip(ends, starts, strict=True) if end < query)
        return any(self._are_visible([page for pages in gaps for page in pages], query, FOREVER, sources))

    def _are_visible(
        self, pages: Sequence[range], query: int, num_queries: int, sources: Sequence[RowSource] | None
    ) -> list[bool]:
        """Return, for each page (range of positions), True if a query in [query, query + num_queries) may see a key.

        False is certain; True, derived from bounds, is not. sources: as in `visible`.
        """
        firsts = torch.tensor([page.start for page in pages], dtype=torch.int64)
        lengths = torch.tensor([len(page) for page in pages], dtype=torch.int64)
        return maybe_visible(self.sources if sources is None else sources, firsts, lengths, query, num_queries).tolist()


def _traits(k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N E"]) -> str:
    dims = f"head dim {k.shape[3]}" + (f" of keys and {v.shape[3]} of values" if k.shape != v.shape else "")
    return f"{k.shape[1]} key/value heads, {dims}, {k.dtype} on {k.device}"


def _buffer(like: Tensor, num_slots: int) -> Tensor:
    batch, heads, _, head_dim = like.shape
    # A normal tensor also inside inference mode, as an inference tensor cannot be written to outside of it.
    with torch.inference_mode(False):
        return torch.empty(batch, heads, num_slots, head_dim, dtype=like.dtype, device=like.device)


def _pages(first: int, stop: int) -> list[range]:
    starts = range(first // _PAGE * _PAGE, stop, _PAGE)
    return [range(max(first, start), min(stop, start + _PAGE)) for start in starts]


def _num_slots_for(live: int) -> int:
    return max(_LEAST_SLOTS, 2 * live)


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor has a tangent or is vmapped, or requires a gradient while gradients are enabled."""
    refuse_transforms("KVCache", tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("a cache computes no gradients, and an input requires one: call it under torch.no_grad()")


@cache
def stay_out_of_graphs(kind: type, *methods: str) -> None:
    """Make torch.compile break its graph at these methods of a class.

    Call it when an instance is made, rather than with the class definition, because it imports the compiler.
    """
    for name in methods:
        setattr(kind, name, torch.compiler.disable(getattr(kind, name), reason="a cache changes with every call"))
