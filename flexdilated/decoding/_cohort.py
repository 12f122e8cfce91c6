"""Cohort: batch entries of a cache that are at one position, with their keys and values in one buffer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from ..engines import ScoreMod, through
from ._held_keys import HeldKeys

# B batch entries of the cache, C of a cohort or selected

_Value = TypeVar("_Value", bound=Hashable)


class State(Protocol):
    """State that a subclass of `KVCache` keeps for a cohort between calls; it is never changed in place."""

    @property
    def nbytes(self) -> int: ...

    def cropped(self, tokens: int) -> Any:
        """Return the state after only the first `tokens` tokens."""
        ...

    def select(self, entries: Int64[Tensor, " C"]) -> Any:
        """Return the state of these entries (indices in the cohort), in this order."""
        ...


@dataclass
class Cohort:
    """Batch entries of a cache that have seen equally many tokens and share one buffer of keys and values.

    entries: indices of these entries in the cache's batch, ascending; the buffer has them in this order.
    seen: number of tokens seen, which is the position of the next token.
    state: state that a subclass of `KVCache` keeps for the cohort; None if it keeps none.
    """

    entries: tuple[int, ...]
    held: HeldKeys
    seen: int = 0
    state: State | None = None

    @property
    def nbytes(self) -> int:
        return self.held.nbytes + (0 if self.state is None else self.state.nbytes)

    @property
    def batch_index(self) -> slice | Int64[Tensor, " C"]:
        """Index of the cohort's entries in tensors of the whole batch: a slice if they are consecutive."""
        first, last = self.entries[0], self.entries[-1]
        return slice(first, last + 1) if last - first < len(self.entries) else torch.tensor(self.entries)

    def tokens_of(self, x: Shaped[Tensor, "B ..."], tokens: int) -> Shaped[Tensor, "C ..."]:
        """Return the first `tokens` tokens (dim 2) of the cohort's entries of x; a view if entries are consecutive."""
        if (len(self.entries), tokens) == (x.shape[0], x.shape[2]):
            return x  # slicing takes microseconds, which count in a step
        return x[self.batch_index, :, :tokens]

    def local_score_mod(self, score_mod: ScoreMod | None, batch: int) -> ScoreMod | None:
        """Return a score_mod that takes b as an index in the cohort, not in the cache's batch; None for None.

        batch: number of entries of the cache.
        """
        if score_mod is None or len(self.entries) == batch:
            return score_mod
        entries = torch.tensor(self.entries, dtype=torch.int32, device=self.held.keys.device)
        return through(score_mod, _with_entries, entries)

    def split(self, numbers: int | Sequence[int]) -> list[tuple[Cohort, int]]:
        """Return [(cohort, number)]: for each distinct number, a new cohort of this cohort's entries that have it.

        numbers: one number for all entries, or one for each entry of the cache's batch, such as of new tokens.

        A returned cohort with all entries shares this cohort's buffer.
        """
        if isinstance(numbers, int):
            return [(self._select(range(len(self.entries)), self.entries), numbers)]
        groups = grouped(numbers[entry] for entry in self.entries)
        return [
            (self._select(places, [self.entries[place] for place in places]), number)
            for number, places in groups.items()
        ]

    def in_new_batch(self, entries: Sequence[int]) -> list[Cohort]:
        """Return [cohort of the entries that are also in a new batch], or [] if there are none.

        In the returned cohort, entries have their indices in the new batch.

        entries: the new batch, as indices in the cache's batch; they may repeat.
        """
        places = {entry: place for place, entry in enumerate(self.entries)}
        found = [index for index, entry in enumerate(entries) if entry in places]
        return [self._select([places[entries[index]] for index in found], found)] if found else []

    def moved(self, shift: int) -> Cohort:
        """Return a copy, with buffers of its own, whose entries have indices that are larger by `shift`."""
        copied = self._select(range(len(self.entries)), [entry + shift for entry in self.entries])
        copied.held.select(torch.arange(len(self.entries)))
        return copied

    def _select(self, places: Sequence[int], entries: Sequence[int]) -> Cohort:
        """Return a cohort of some of this cohort's entries.

        If it has all of them in order, the two share the buffer, and only one of the two may be changed.

        places: indices of these entries in this cohort.
        entries: indices of these entries in the batch of the cache that gets the returned cohort.
        """
        held, state = self.held.snapshot(), self.state
        if list(places) != list(range(len(self.entries))):
            index = torch.tensor(places)
            held.select(index)
            state = None if state is None else state.select(index)
        return Cohort(tuple(entries), held, self.seen, state)

    def crop(self, tokens: int) -> None:
        """Drop all but the first `tokens` tokens; raises ValueError if later queries may see evicted keys."""
        self.held.crop(tokens, self.seen)
        self.seen = tokens
        self.state = None if self.state is None else self.state.cropped(tokens)


def grouped(values: Iterable[_Value]) -> dict[_Value, list[int]]:
    """Return {value: its indices in `values`, ascending}."""
    groups: dict[_Value, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return groups


def _with_entries(score_mod: ScoreMod, entries: Int32[Tensor, " C"]) -> ScoreMod:
    return lambda score, b, h, q, k: score_mod(score, entries[b], h, q, k)
