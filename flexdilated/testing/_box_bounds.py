"""Dense table of a pattern's rule, and checks of the bounds of `count` against it, box by box."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masks import Pattern
from ..masks.core import Box, Progression

# H heads, T tokens

_CPU = torch.device("cpu")
_ALONE = 100


@dataclass(frozen=True, eq=False)
class DenseRule:
    """A pattern for `num_heads` heads, and its table[h, q, k] of pairs that `mask_mod` allows."""

    pattern: Pattern
    num_heads: int
    table: Tensor

    @classmethod
    def of(cls, pattern: Pattern, num_heads: int, max_tokens: int) -> DenseRule:
        heads, tokens = torch.arange(num_heads, device=_CPU), torch.arange(max_tokens, device=_CPU)
        try:
            table = ask(pattern, num_heads, heads[:, None, None], tokens[:, None], tokens)
        except IndexError as error:
            rule = f"{pattern!r} must have an answer for {num_heads} heads and positions below {max_tokens=}"
            raise ValueError(f"{rule}: {error}") from error
        return cls(pattern, num_heads, table)

    @property
    def num_tokens(self) -> int:
        return self.table.shape[1]

    def for_head(self, head: int) -> DenseRule:
        """`pattern.for_head(head)` with the table that it must have for any head argument."""
        one = self.pattern.for_head(head, self.num_heads)
        return replace(self, pattern=one, table=self.table[head].expand_as(self.table))


def ask(pattern: Pattern, num_heads: int, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """mask_mod of the pattern, in the broadcast shape of heads and positions."""
    mod = pattern.mask_mod(num_heads=num_heads, device=_CPU)
    shape = torch.broadcast_shapes(h.shape, q.shape, k.shape)
    return mod(torch.zeros((), dtype=torch.int64, device=_CPU), h, q, k).expand(shape)


def check_elementwise(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """mask_mod of single pairs, and of a batch of pairs, must equal the dense table."""
    number = max(examples, _ALONE)
    h = torch.randint(dense.num_heads, (number,), generator=generator, device=_CPU)
    q, k = torch.randint(dense.num_tokens, (2, number), generator=generator, device=_CPU)
    cells = [slice(None), *range(_ALONE)]
    for cell in cells:
        found = ask(dense.pattern, dense.num_heads, h[cell], q[cell], k[cell])
        wrong = (found != dense.table[h, q, k][cell]).flatten().nonzero().flatten().tolist()
        if wrong:
            head, query, key = (int(side[cell].flatten()[wrong[0]]) for side in (h, q, k))
            rule = f"{dense.pattern!r}: mask_mod must look at each pair by itself"
            raise AssertionError(f"{rule}; for head {head}, query {query}, key {key} it depends on the others asked")


_TRIES = 500
# (step of queries, step of keys): natural order, layouts of one rate, and two rates
_STEPS = ((1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (1, 2), (3, 1), (2, 5))


@dataclass(frozen=True)
class Place:
    """A box, with ranges for queries and keys."""

    head: int
    q: range
    k: range

    def box(self) -> Box:
        q, k = (
            Progression(torch.tensor([side.start]), side.step, torch.tensor([len(side)])) for side in (self.q, self.k)
        )
        return Box(torch.tensor([self.head]), q, k)

    @property
    def size(self) -> tuple[int, int]:
        """Sort key for simplicity: sum of steps, then number of pairs."""
        return self.q.step + self.k.step, len(self.q) * len(self.k)

    def smaller(self) -> Iterator[Place]:
        yield from (replace(self, q=q) for q in _smaller(self.q))
        yield from (replace(self, k=k) for k in _smaller(self.k))
        if self.head:
            yield replace(self, head=0)

    def __str__(self) -> str:
        return f"head {self.head}, queries {_span(self.q)}, keys {_span(self.k)}"


def _smaller(side: range) -> Iterator[range]:
    """Simpler progressions: shorter from either end, without gaps, nearer to 0."""
    number, first = len(side), side.start
    for count in dict.fromkeys((1, number // 2, number - 1)):
        if 0 < count < number:
            yield side[:count]
            yield side[number - count :]
    if side.step > 1:
        yield range(first, first + number)
    for start in dict.fromkeys((0, first // 2, first - 1)):
        if 0 <= start < first:
            yield range(start, start + side.step * number, side.step)


def _span(side: range) -> str:
    span = str(side.start) if len(side) == 1 else f"{side.start} to {side[-1]}"
    return span if side.step == 1 else f"{span} in steps of {side.step}"


def check_bounds(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Require 0 <= low <= allowed pairs <= high <= area for tested boxes; reports the smallest failing box."""
    failures = list(_failures(dense, examples, generator))
    if failures:
        place = min((_shrunk(dense, place) for place in failures), key=lambda place: place.size)
        box = place.box()
        bounds, area = dense.pattern.count(box, num_heads=dense.num_heads), int(box.area)
        low, high = int(bounds.low), int(bounds.high)
        verdict = " (FULL)" if low == area else " (EMPTY)" if high == 0 else ""
        raise AssertionError(
            f"{dense.pattern!r}: count must bound the allowed pairs of each box; {place}: {_pairs(dense, place)} of "
            f"{area} pairs are allowed, count says {low} to {high}{verdict}"
        )


def _failures(dense: DenseRule, examples: int, generator: torch.Generator) -> Iterator[Place]:
    """First failing box of each kind."""
    for box, truth in _all_boxes(dense, examples, generator):
        if wrong := _wrong(dense, box, truth):
            yield _place(box, wrong[0])


def _shrunk(dense: DenseRule, place: Place) -> Place:
    """Smallest failing box found from `place` in _TRIES tries."""
    tries, ahead = _TRIES, place.smaller()
    while tries and (other := next(ahead, None)):
        tries -= 1
        is_inside = max(other.q[-1], other.k[-1]) < dense.num_tokens
        if is_inside and _wrong(dense, other.box(), torch.tensor([_pairs(dense, other)])):
            place, ahead = other, other.smaller()
    return place


def _wrong(dense: DenseRule, box: Box, truth: Tensor) -> list[int]:
    bounds = dense.pattern.count(box, num_heads=dense.num_heads)
    wrong = (bounds.low < 0) | (bounds.low > truth) | (truth > bounds.high) | (bounds.high > box.area)
    return wrong.nonzero().flatten().tolist()


def _all_boxes(dense: DenseRule, examples: int, generator: torch.Generator) -> Iterator[tuple[Box, Tensor]]:
    side = 1
    while side <= dense.num_tokens:
        yield _blocks(dense, side)
        side *= 2
    for q_step, k_step in _STEPS:
        yield _drawn(dense, q_step, k_step, examples, generator)


def _blocks(dense: DenseRule, side: int) -> tuple[Box, Tensor]:
    """All blocks of this side in all heads, with their numbers of allowed pairs; the last blocks may be shorter."""
    tokens, heads = dense.num_tokens, dense.num_heads
    number = -(-tokens // side)
    padded = torch.zeros(heads, number * side, number * side, dtype=torch.int64)
    padded[:, :tokens, :tokens] = dense.table
    head, row, column = torch.cartesian_prod(*(torch.arange(size) for size in (heads, number, number))).view(-1, 3).T
    lengths = (tokens - torch.arange(number) * side).clamp(max=side)
    q, k = (Progression(index * side, 1, lengths[index]) for index in (row, column))
    return Box(head, q, k), padded.view(heads, number, side, number, side).sum((2, 4)).flatten()


def _drawn(dense: DenseRule, q_step: int, k_step: int, examples: int, generator: torch.Generator) -> tuple[Box, Tensor]:
    """Random boxes of progressions; a quarter start at position 0, a quarter extend to the last position."""

    def draw(step: int) -> Progression:
        first, length = torch.rand(2, examples, generator=generator)
        first = (first * dense.num_tokens).long()
        first[::4] = 0
        room = (dense.num_tokens - 1 - first) // step + 1
        count = 1 + (length**2 * room).long().clamp(max=room - 1)
        count[1::4] = room[1::4]
        return Progression(first, step, count)

    head = torch.randint(dense.num_heads, (examples,), generator=generator)
    box = Box(head, draw(q_step), draw(k_step))
    return box, torch.tensor([_pairs(dense, _place(box, index)) for index in range(examples)])


def _pairs(dense: DenseRule, place: Place) -> int:
    q, k = (slice(side.start, side.stop, side.step) for side in (place.q, place.k))
    return int(dense.table[place.head, q, k].sum())


def _place(box: Box, index: int) -> Place:
    firsts = [(int(side.first[index]), int(side.count[index]), side.step) for side in (box.q, box.k)]
    q, k = (range(first, first + step * (count - 1) + 1, step) for first, count, step in firsts)
    return Place(int(box.head[index]), q, k)
