"""Placement: positions of the tokens of q, k and v on a device that holds parts of a sequence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import LARGEST, Ranges, among, within


class Part(NamedTuple):
    """A run of queries with the keys they are computed with.

    The first query is token `q_token`. `span`: interval of the keys' positions; `gapless`: there is a key at each.
    """

    queries: range
    q_token: int
    span: range
    gapless: bool


@dataclass(frozen=True)
class Placement:
    """Positions of local tokens: query token i is at the i-th position of `queries`, key token j at the j-th of `keys`.

    `keys` has one entry for all key/value heads, or one for each. With `complete` the rule allows no query a key that
    is absent, so gaps between the keys need no mask; only runs of queries that contain no key are excluded from the
    keys. Otherwise the keys are in runs of step 1, equal for all heads, and absent keys are excluded. Run-time tensors
    have values for `num_tokens` positions; 0 means one past the last position of a query or key.
    """

    queries: Ranges
    keys: tuple[Ranges, ...]
    complete: bool
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if any(run.step != 1 for run in self.queries):
            raise ValueError(f"queries must stand in runs of step 1; got {self.queries}")
        if not self.complete and (len(self.keys) != 1 or any(run.step != 1 for run in self.keys[0])):
            raise ValueError(f"keys must stand in runs of step 1, the same for all heads; got {self.keys}")
        for name, sides in (("queries", (self.queries,)), ("keys", self.keys)):
            if any(not run or run.step < 1 or run.start < 0 or run[-1] > LARGEST for side in sides for run in side):
                raise ValueError(f"{name} must be ascending ranges of positions, none of them empty; got {sides}")

    @cached_property
    def text(self) -> str:
        """JSON text; `read` restores an equal placement."""
        queries = [[run.start, run.stop] for run in self.queries]
        keys = [[[run.start, run.stop, run.step] for run in side] for side in self.keys]
        return json.dumps([queries, keys, int(self.complete), self.num_tokens], separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=256)
    def read(text: str) -> Placement:
        """Placement of a `text`."""
        queries, keys, complete, num_tokens = json.loads(text)
        sides = tuple(tuple(range(*run) for run in side) for side in keys)
        return Placement(tuple(range(*run) for run in queries), sides, bool(complete), num_tokens)

    @property
    def num_queries(self) -> int:
        return sum(map(len, self.queries))

    @property
    def num_keys(self) -> int:
        """Largest number of key tokens of a head."""
        return max(sum(map(len, side)) for side in self.keys)

    @property
    def end(self) -> int:
        """One past the last position for which run-time tensors have values."""
        sides = (self.queries, *self.keys)
        return self.num_tokens or 1 + max((run[-1] for side in sides for run in side), default=0)

    def parts(self) -> Iterator[Part]:
        """Split into parts that hold each pair of a query and a key once."""
        tokens = accumulate(map(len, self.queries), initial=0)
        for queries, token in zip(self.queries, tokens, strict=False):
            for span, gapless in self._spans():
                yield Part(queries, token, span, gapless)

    def _spans(self) -> list[tuple[range, bool]]:
        if not self.complete:
            return [(run, True) for run in self.keys[0]]
        left_out = [run for run in self.queries if not any(among(side, run) for side in self.keys)]
        edges = [0, *(edge for run in left_out for edge in (run.start, run.stop)), LARGEST + 1]
        spans = []
        for between in map(range, edges[::2], edges[1::2]):
            sides = [among(side, between) for side in self.keys]
            if held := [run for side in sides for run in side]:
                span = range(min(run.start for run in held), max(run[-1] for run in held) + 1)
                spans.append((span, all(sum(map(len, side)) == len(span) for side in sides)))
        return spans

    def stretches(self, span: range, gap: int) -> list[range]:
        """Runs of step 1 within the span that hold the keys of all heads, split at gaps of over `gap` positions."""
        runs = {run for side in self.keys for run in side}
        pieces = [range(run.start, run[-1] + 1) for run in runs if run.step <= gap]
        pieces += [range(position, position + 1) for run in runs if run.step > gap for position in run]
        pieces = sorted(
            (cut for piece in pieces if (cut := within(piece, span.start, span.stop))), key=lambda x: x.start
        )
        joined = pieces[:1]
        for piece in pieces[1:]:
            if piece.start - joined[-1].stop > gap:
                joined.append(piece)
            elif piece.stop > joined[-1].stop:
                joined[-1] = range(joined[-1].start, piece.stop)
        return joined

    def key_slots(self, head: int) -> HeldSlots:
        """Slots of a head's keys in its tensor."""
        return _slots(self.keys[head if len(self.keys) > 1 else 0])

    def query_slots(self) -> HeldSlots:
        """Slots of the queries in their tensor."""
        return _slots(self.queries)


@dataclass(frozen=True, eq=False)
class HeldSlots:
    """Slot of each local token: `position` ascending, with its `slot`."""

    position: Int64[Tensor, " n"]
    slot: Int64[Tensor, " n"]

    def of(self, positions: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
        """Slot of each position; an arbitrary slot for absent positions, which no query may attend to."""
        if not len(self.position):
            return torch.zeros_like(positions)
        return self.slot[torch.searchsorted(self.position, positions).clamp(max=len(self.position) - 1)]


@lru_cache(maxsize=64)
def _slots(held: Ranges) -> HeldSlots:
    tokens = [torch.arange(run.start, run.stop, run.step) for run in held]
    position, slot = torch.cat([torch.empty(0, dtype=torch.int64), *tokens]).sort()
    if bool((position[1:] == position[:-1]).any()):
        raise ValueError(f"tokens must stand at different positions; got {held}")
    return HeldSlots(position, slot)
