"""HeldKeys: the keys that later queries can still see; the others are evicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..masks.core import plans
from ..masks.needs import FOREVER, RowSource, visible
from ._key_store import KeyStore

# B batch, G key/value heads, N tokens, D head dim

_PAGE = 64  # keys that are kept or evicted together
_LEAST_SLOTS = 256


class HeldKeys:
    """A store of the keys of consecutive tokens, packed when it is full: each token is moved about once.

    `sources` hold the rule of every head; `capacity` fixes the slots of the store.
    """

    def __init__(
        self, like: Float[Tensor, "B G N D"], sources: Sequence[RowSource], *, capacity: int | None = None
    ) -> None:
        self.sources, self.capacity = sources, capacity
        self.store = KeyStore(like, _LEAST_SLOTS if capacity is None else capacity)

    def append(self, k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N D"], first: int) -> None:
        """Hold the keys of the tokens from `first` on, and of none that was appended there before.

        Raises ValueError where they and those still visible exceed the capacity.
        """
        self.store.drop_from(first)  # of a call that was broken off
        room = k.shape[2]
        if self.store.num_slots - self.store.num_used < room:
            kept = self.visible(first)
            live = sum(map(len, kept))
            if self.capacity is not None and live + room > self.capacity:
                raise ValueError(
                    f"the cache holds at most capacity={self.capacity} keys; {live} that later queries may see and "
                    f"{room} new ones do not fit: raise the capacity, or pass the new tokens in smaller chunks"
                )
            self.store.pack(kept, self.capacity or _with_room(live + room))
        self.store.append(k, v, first)

    def shrink(self, query: int) -> None:
        """Give back what a large chunk took, if queries from `query` on see little of it."""
        if self.capacity is None and self.store.num_slots > _LEAST_SLOTS:
            kept = self.visible(query)
            num_slots = _with_room(sum(map(len, kept)))
            if 2 * num_slots < self.store.num_slots:
                self.store.pack(kept, num_slots)

    @plans
    def visible(self, query: int, num_queries: int = FOREVER) -> list[range]:
        """Runs of the positions held, those apart that none of the queries from `query` on can see.

        By pages: a run may hold a few others.
        """
        pages = [page for run in self.store.runs for page in _pages(run.first, run.stop)]
        firsts = torch.tensor([page.start for page in pages], dtype=torch.int64)
        lengths = torch.tensor([len(page) for page in pages], dtype=torch.int64)
        kept: list[range] = []
        for page, seen in zip(pages, visible(self.sources, firsts, lengths, query, num_queries).tolist(), strict=True):
            if seen and kept and kept[-1].stop == page.start:
                kept[-1] = range(kept[-1].start, page.stop)
            elif seen:
                kept.append(page)
        return kept


def _pages(first: int, stop: int) -> list[range]:
    starts = range(first // _PAGE * _PAGE, stop, _PAGE)
    return [range(max(first, start), min(stop, start + _PAGE)) for start in starts]


def _with_room(live: int) -> int:
    return max(_LEAST_SLOTS, 2 * live)
