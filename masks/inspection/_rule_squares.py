"""The squares of a rule: its pairs over all tokens, by what repeats in it instead of pair by pair."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

from ..core import And, Box, Every, Not, Or, Pattern, Progression
from ..patterns import Dilated, KeySet, PerDocument, RandomBlocks, Spans
from ._squares import EVERY_PAIR, NO_PAIR, Squares, TooManySquaresError

# n boxes

_UNDECIDED = -1
_SIDE = 8  # boxes of this side are evaluated pair by pair
_MOST_PAIRWISE = 1 << 14  # of them together


class RuleSquares:
    """The squares of rules for one head over boxes of positions, all in one store.

    `boxes` counts the boxes whose bounds were computed; beyond `most_boxes` that is an error.
    """

    most_boxes = 1 << 21

    def __init__(self, squares: Squares, num_tokens: int) -> None:
        self.squares = squares
        self.num_tokens = num_tokens  # positions from there on have no pairs, whatever the squares hold
        self._rules: dict[Pattern, int] = {}
        self._known: dict[tuple[int, ...], int] = {}
        self._marked: dict[tuple[bytes, int], int] = {}
        self.boxes = 0

    def over(self, rule: Pattern, q: int, k: int, side: int) -> int:
        """The pairs of queries from position q on and keys from position k on."""
        parts = (self.over(part, q, k, side) for part in getattr(rule, "parts", ()))
        if isinstance(rule, Every):
            return EVERY_PAIR
        if isinstance(rule, And):
            return reduce(self.squares.both, parts)
        if isinstance(rule, Or):
            return reduce(self.squares.either, parts)
        if isinstance(rule, Not):
            return self.squares.others(self.over(rule.part, q, k, side))
        if isinstance(rule, Dilated | Spans):
            return self._segments(rule, _segments_of(rule), q, k, side)
        if isinstance(rule, KeySet):
            return self._columns(bytes(rule.only_row[k : k + side].tolist()), side)
        if isinstance(rule, PerDocument):
            return self._per_document(rule, q, k, side)
        q, k = _shifted(q, k, rule.period())
        key = (self._rules.setdefault(rule, len(self._rules)), q, k, side)
        if key not in self._known:
            found = self._listed(rule, q, k, side) if isinstance(rule, RandomBlocks) else None
            self._known[key] = self._counted(rule, q, k, side) if found is None else found
        return self._known[key]

    def _take(self, boxes: int) -> None:
        self.boxes += boxes
        if self.boxes > self.most_boxes:
            raise TooManySquaresError

    def _listed(self, rule: RandomBlocks, q: int, k: int, side: int) -> int | None:
        """From the blocks that were drawn; None where they are no squares of this box."""
        block, drawn = rule.block, rule.squares(0, 1)
        if block & (block - 1) or q % block or k % block or side < block:
            return None
        row, column = (drawn.q_first - q) // block, (drawn.k_first - k) // block
        inside = (row >= 0) & (column >= 0) & (row < side // block) & (column < side // block)
        row, column = row[inside], column[inside]
        squares = torch.full_like(row, EVERY_PAIR)
        for half in (side // block >> level for level in range(1, (side // block).bit_length())):
            place, index = (row // 2 * half + column // 2).unique(return_inverse=True)
            quarters = torch.full((len(place), 4), NO_PAIR)
            quarters[index, row % 2 * 2 + column % 2] = squares
            row, column, squares = place // half, place % half, self.squares.join_all(quarters)
        # The last block may be shorter.
        tokens = range(rule.num_tokens - q), range(rule.num_tokens - k)
        return self.squares.both(int(squares.sum()), self.squares.rectangle(*tokens, side))

    def _segments(self, rule: Pattern, segments: _Segments, q: int, k: int, side: int) -> int:
        """Within one segment the active rows by the active columns; nothing across."""
        first = max(segments.first(q), segments.first(k))
        last = min(segments.last(q + side - 1), segments.last(k + side - 1))
        if first > last:
            return NO_PAIR
        if first == last:
            start, stop = segments.edges(first)
            inside = [start <= at and at + side <= stop for at in (q, k)]
            # A box inside is determined by its residue: along a border all boxes are alike.
            q, k = (
                start + (at - start) % segments.rate if held else at for at, held in zip((q, k), inside, strict=True)
            )
            if all(inside):
                first_row, first_column = ((start + segments.offset - at) % segments.rate for at in (q, k))
                return self._crossing(first_row, first_column, segments.rate, side)
        q, k = _shifted(q, k, rule.period())
        key = (self._rules.setdefault(rule, len(self._rules)), q, k, side)
        if key not in self._known:
            self._take(1)
            self._known[key] = self._by_quarters(partial(self._segments, rule, segments), q, k, side)
        return self._known[key]

    def _crossing(self, row: int, column: int, rate: int, side: int) -> int:
        """Every rate-th row from `row` on by every rate-th column from `column` on."""
        if row >= side or column >= side:
            return NO_PAIR
        if rate == 1 or side == 1:
            return EVERY_PAIR
        key = (row, column, rate, side, _UNDECIDED)
        if key not in self._known:
            half = side // 2
            rows, columns = ((first, (first - half) % rate) for first in (row, column))
            self._known[key] = self.squares.join(*(self._crossing(i, j, rate, half) for i in rows for j in columns))
        return self._known[key]

    def _columns(self, marks: bytes, side: int) -> int:
        """Whole columns, or none, by the marks of the keys; beyond the last one any value will do."""
        if 0 not in marks:
            return EVERY_PAIR
        if 1 not in marks:
            return NO_PAIR
        if (marks, side) not in self._marked:
            half = side // 2
            left, right = self._columns(marks[:half], half), self._columns(marks[half:], half)
            self._marked[marks, side] = self.squares.join(left, right, left, right)
        return self._marked[marks, side]

    def _by_quarters(self, over: Callable[[int, int, int], int], q: int, k: int, side: int) -> int:
        half = side // 2
        return self.squares.join(*(over(i, j, half) for i in (q, q + half) for j in (k, k + half)))

    def _per_document(self, rule: PerDocument, q: int, k: int, side: int) -> int:
        """Within one document the part, counted from its start; nothing across."""
        assert isinstance(rule.spans, Spans)
        segments = _segments_of(rule.spans)

        def over(q: int, k: int, side: int) -> int:
            first = max(segments.first(q), segments.first(k))
            if first > min(segments.last(q + side - 1), segments.last(k + side - 1)):
                return NO_PAIR
            start, stop = segments.edges(first)
            self._take(1)
            if start <= min(q, k) and max(q, k) + side <= stop:
                return self.over(rule.part, q - start, k - start, side)
            return self._by_quarters(over, q, k, side)

        return over(q, k, side)

    def _counted(self, rule: Pattern, q_first: int, k_first: int, side: int) -> int:
        """One square, by bounds on ever smaller boxes; boxes that differ by whole periods are bounded once."""
        q, k = torch.tensor([q_first]), torch.tensor([k_first])
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        while True:
            q, k, place = _distinct(q, k, rule.period())
            self._take(len(q))
            verdict = self._verdict(rule, q, k, side)
            undecided = (verdict == _UNDECIDED).nonzero().squeeze(1)
            levels.append((place, verdict, undecided))
            if not len(undecided) or side <= _SIDE:
                break
            side //= 2
            q = (q[undecided, None] + side * torch.tensor([0, 0, 1, 1])).flatten()
            k = (k[undecided, None] + side * torch.tensor([0, 1, 0, 1])).flatten()
        place, verdict, undecided = levels.pop()
        verdict[undecided] = self._pair_by_pair(rule, q[undecided], k[undecided], side)
        for upper, squares, undecided in reversed(levels):
            squares[undecided] = self.squares.join_all(verdict[place].view(-1, 4))
            place, verdict = upper, squares
        return int(verdict[place])

    def _verdict(self, rule: Pattern, q: Tensor, k: Tensor, side: int) -> Tensor:
        """NO_PAIR, EVERY_PAIR or _UNDECIDED. What lies beyond the last token may be either."""
        inside = [(self.num_tokens - first).clamp(0, side) for first in (q, k)]
        held = (inside[0] > 0) & (inside[1] > 0)
        sides = (
            Progression(first.clamp(max=self.num_tokens - 1), 1, count.clamp(min=1))
            for first, count in zip((q, k), inside, strict=True)
        )
        box = Box(torch.zeros_like(q), *sides)
        bounds = rule.count(box, num_heads=1)
        verdict = torch.full_like(q, _UNDECIDED)
        verdict[bounds.low == box.area] = EVERY_PAIR
        verdict[(bounds.high == 0) | ~held] = NO_PAIR
        return verdict

    def _pair_by_pair(self, rule: Pattern, q: Tensor, k: Tensor, side: int) -> Tensor:
        """The squares of small boxes, each pair evaluated; beyond the last token anything."""
        mask_mod, zero = rule.mask_mod(num_heads=1, device=torch.device("cpu")), torch.zeros((), dtype=torch.int64)
        place, last = torch.arange(side), self.num_tokens - 1
        found = [torch.zeros(0, dtype=torch.int64)]
        for some in torch.arange(len(q)).split(_MOST_PAIRWISE) if len(q) else ():
            rows = (q[some, None] + place).clamp(max=last)[:, :, None]
            columns = (k[some, None] + place).clamp(max=last)[:, None, :]
            cells = mask_mod(zero, zero, rows, columns).long()
            for half in (side >> level for level in range(1, side.bit_length())):
                quarters = cells.view(len(some), half, 2, half, 2).permute(0, 1, 3, 2, 4).reshape(-1, 4)
                cells = self.squares.join_all(quarters).view(len(some), half, half)
            found.append(cells.view(-1))
        return torch.cat(found)


def _distinct(q: Tensor, k: Tensor, period: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, which of them each is): one of the boxes that differ by whole periods."""
    if period is not None:
        shift = torch.minimum(q, k) // period * period
        q, k = q - shift, k - shift
    base = int(k.max()) + 1
    kinds, place = (q * base + k).unique(return_inverse=True)
    return kinds // base, kinds % base, place


def _shifted(q: int, k: int, period: int | None) -> tuple[int, int]:
    """The same box as many periods earlier as there can be."""
    shift = 0 if period is None else min(q, k) // period * period
    return q - shift, k - shift


class _EqualSegments:
    """The segments of a dilated rule: runs of positions, in each of which every `rate`-th from `offset` on is active.

    `first(position)` is the number of the first segment that ends after a position, `last(position)` that of the last
    one that begins at or before it; `edges(number)` are where a segment begins and ends.
    """

    def __init__(self, rule: Dilated) -> None:
        assert isinstance(rule.offset, int), "a rule for one head has its offset resolved"
        self.length, self.rate, self.offset = rule.segment, rule.rate, rule.offset

    def first(self, position: int) -> int:
        return position // self.length

    def last(self, position: int) -> int:
        return position // self.length

    def edges(self, number: int) -> tuple[int, int]:
        return number * self.length, (number + 1) * self.length


class _Documents:
    """The same for documents, between which there may be padding."""

    rate, offset = 1, 0

    def __init__(self, spans: Spans) -> None:
        self.starts, self.stops = spans.starts.tolist(), spans.stops.tolist()

    def first(self, position: int) -> int:
        return bisect_right(self.stops, position)

    def last(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def edges(self, number: int) -> tuple[int, int]:
        return self.starts[number], self.stops[number]


def _segments_of(rule: Dilated | Spans) -> _Segments:
    return _EqualSegments(rule) if isinstance(rule, Dilated) else _Documents(rule)


_Segments = _EqualSegments | _Documents
