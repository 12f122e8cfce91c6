"""Placement: positions of the tokens of q, k and v on a device; and orders of active tokens, padded to blocks.

A token is active for a head if the head's dilated rule selects it: every `step`-th token of each segment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.functional import pad

from ..core import LARGEST, Ranges, among, within


class Part(NamedTuple):
    """Part of a placement: the pairs of a run of queries with all keys in an interval of positions.

    queries: positions of the queries.
    q_token: index of the first query in q.
    span: the interval of key positions.
    gapless: True if each head has a key at each position of `span`.
    """

    queries: range
    q_token: int
    span: range
    gapless: bool


@dataclass(frozen=True)
class Placement:
    """Positions of the tokens on a device: the i-th token of q is at the i-th position of `queries`.

    queries: runs of step 1, in ascending order.
    keys: positions of the tokens of k and v, in their order: one entry for all key-value heads, or one for each.
    complete: True if gaps between the keys need no mask: the rule allows no pair with an absent key, but in runs of
        queries without any key, which `parts` leaves out. If False, a plan must exclude pairs with absent keys, and all
        heads have equal keys, in runs of step 1.
    num_tokens: number of positions, from 0 on, for which run-time tensors have values; 0 if they have values up to the
        last position of all queries and keys.

    Construction raises ValueError for runs that are empty, of another step or outside [0, 2**31), and for several
    entries of `keys` unless `complete`.
    """

    queries: Ranges
    keys: tuple[Ranges, ...]
    complete: bool
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if any(run.step != 1 for run in self.queries):
            raise ValueError(f"queries must be in runs of step 1; got {self.queries}")
        if not self.complete and (len(self.keys) != 1 or any(run.step != 1 for run in self.keys[0])):
            raise ValueError(f"keys must be in runs of step 1, equal for all heads; got {self.keys}")
        for name, sides in (("queries", (self.queries,)), ("keys", self.keys)):
            if any(not run or run.step < 1 or run.start < 0 or run[-1] > LARGEST for side in sides for run in side):
                raise ValueError(f"{name} must be ascending ranges of positions, none of them empty; got {sides}")

    @cached_property
    def text(self) -> str:
        """Return JSON text, from which `read` restores an equal placement."""
        queries = [[run.start, run.stop] for run in self.queries]
        keys = [[[run.start, run.stop, run.step] for run in side] for side in self.keys]
        return json.dumps([queries, keys, int(self.complete), self.num_tokens], separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=256)
    def read(text: str) -> Placement:
        queries, keys, complete, num_tokens = json.loads(text)
        sides = tuple(tuple(range(*run) for run in side) for side in keys)
        return Placement(tuple(range(*run) for run in queries), sides, bool(complete), num_tokens)

    @property
    def num_queries(self) -> int:
        return sum(map(len, self.queries))

    @property
    def num_keys(self) -> int:
        """Return the largest number of key tokens of a head."""
        return max(sum(map(len, side)) for side in self.keys)

    @property
    def end(self) -> int:
        """Return one more than the last position for which run-time tensors have values."""
        sides = (self.queries, *self.keys)
        return self.num_tokens or 1 + max((run[-1] for side in sides for run in side), default=0)

    def parts(self) -> Iterator[Part]:
        """Yield parts, each of a run of queries with the keys in an interval; each query-key pair is in exactly one."""
        tokens = accumulate(map(len, self.queries), initial=0)
        for queries, token in zip(self.queries, tokens, strict=False):
            for span, gapless in self._spans():
                yield Part(queries, token, span, gapless)

    def _spans(self) -> list[tuple[range, bool]]:
        """Return [(span, gapless), ...] as in `Part`: the spans are disjoint, and together contain all keys."""
        if not self.complete:
            return [(run, True) for run in self.keys[0]]
        # Runs of queries without a key cut the positions into intervals, each with one span at most.
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
        """Return ascending intervals of positions that together contain all keys in `span`, of any head.

        Intervals are separated by gaps: more than `gap` consecutive positions at which no head has a key.
        """
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

    def key_slots(self, head: int) -> TokenIndices:
        """Return where the key of each position is in the key tensor of one key-value head of this device.

        Raises ValueError if two of its keys have one position.
        """
        return _token_indices(self.keys[head if len(self.keys) > 1 else 0])

    def query_slots(self) -> TokenIndices:
        return _token_indices(self.queries)


@dataclass(frozen=True, eq=False)
class TokenIndices:
    """Index of each local token in its tensor: the token at position[i] is at index index[i]; positions ascend."""

    position: Int64[Tensor, " n"]
    index: Int64[Tensor, " n"]

    def of(self, positions: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
        """Return the index in the tensor of the token at each position; it is arbitrary where no token is."""
        if not len(self.position):
            return torch.zeros_like(positions)
        return self.index[torch.searchsorted(self.position, positions).clamp(max=len(self.position) - 1)]


@lru_cache(maxsize=64)
def _token_indices(runs: Ranges) -> TokenIndices:
    tokens = [torch.arange(run.start, run.stop, run.step) for run in runs]
    position, index = torch.cat([torch.empty(0, dtype=torch.int64), *tokens]).sort()
    if bool((position[1:] == position[:-1]).any()):
        raise ValueError(f"tokens must be at different positions; got {runs}")
    return TokenIndices(position, index)


# H heads, F segments, T lists of positions, S slots


@dataclass(frozen=True)
class Padded:
    """Order of every `step`-th token of each segment, from each head's offset on, padded to `width` slots per segment.

    Slot s of head i holds token t = start + f * segment + offsets[i] + p * step, where f, p = divmod(s, width), if t is
    in segment f and begin <= t < end; else the slot is empty. Token `begin` is in segment 0. `width` and the number of
    slots are multiples of `side`, and there are at least two blocks: a graph compiled for a dynamic number of blocks
    would specialize on one.

    side: slots of a block.
    """

    offsets: tuple[int, ...]
    step: int
    segment: int
    width: int
    start: int
    begin: int
    end: int
    side: int = 1
    folds = 1
    is_natural = False
    is_copied = True

    def in_blocks_of(self, side: int) -> Padded:
        """Return the order with each segment padded to whole blocks of `side` slots."""
        return replace(self, width=-(-self.segment // (self.step * side)) * side, side=side)

    @property
    def num_segments(self) -> int:
        return -(-(self.end - self.start) // self.segment)

    @property
    def num_slots(self) -> int:
        """Return the number of slots, equal for all heads: at least two whole blocks, which hold any head's tokens."""
        last = self.num_segments - 1
        held = last * self.width + int(self.filled_slots()[1][:, last].max())
        return max(2, -(-held // self.side)) * self.side

    def filled_slots(self) -> tuple[Int64[Tensor, "H F"], Int64[Tensor, "H F"]]:
        """Return (first, past) for each head and segment: slots first to past - 1, counted within it, hold tokens."""
        start = self.start + torch.arange(self.num_segments) * self.segment
        first = start + torch.tensor(self.offsets)[:, None]
        last = (start + self.segment).clamp(max=self.end)
        past = ((last - first + self.step - 1) // self.step).clamp(min=0)
        return (((self.begin - first).clamp(min=0) + self.step - 1) // self.step).minimum(past), past

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "H 1 S"]:
        """Return the index of the token in each slot of each head, in a single fold; -1 if empty."""
        slot = torch.arange(self.num_slots, device=device)
        place = torch.tensor(self.offsets, device=device)[:, None] + slot % self.width * self.step
        token = self.start + slot // self.width * self.segment + place
        return torch.where((place < self.segment) & (token >= self.begin) & (token < self.end), token, -1)[:, None]

    def moved(self, tokens: int) -> Padded:
        return replace(self, start=self.start + tokens, begin=self.begin + tokens, end=self.end + tokens)


@dataclass(frozen=True)
class ActivePositions:
    """Order of active positions, ascending; heads with equal ranges of positions and equal offset may share a list.

    List r holds the positions p in the ranges runs[r] with p % segment % step == offsets[r].

    runs: ranges of positions of each list, whose steps may exceed 1.
    rows: index of each head's list.
    side: slots of a block.

    Slots after a list's last position are empty. The slots are whole blocks of `side`, at least two, as in `Padded`.
    """

    offsets: tuple[int, ...]
    runs: tuple[Ranges, ...]
    rows: tuple[int, ...]
    step: int
    segment: int
    side: int = 1
    folds = 1
    is_natural = False
    is_copied = True

    def in_blocks_of(self, side: int) -> ActivePositions:
        """Return the order padded to whole blocks of `side` slots."""
        return replace(self, side=side)

    @property
    def num_slots(self) -> int:
        return self.positions.shape[1]

    @cached_property
    def positions(self) -> Int64[Tensor, "T S"]:
        """Return the position in each slot of each list; -1 if the slot is empty."""
        rows = [self._active_positions(*row) for row in zip(self.offsets, self.runs, strict=True)]
        slots = max(2, -(-max(map(len, rows)) // self.side)) * self.side
        return torch.stack([pad(row, (0, slots - len(row)), value=-1) for row in rows])

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "H 1 S"]:
        """Return the position in each slot of each head, in a single fold; -1 if the slot is empty."""
        return self.positions[list(self.rows), None].to(device or "cpu")

    def _active_positions(self, offset: int, runs: Ranges) -> Int64[Tensor, " n"]:
        held = torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop, run.step) for run in runs)])
        return held[held % self.segment % self.step == offset].sort().values
