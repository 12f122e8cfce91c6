"""Squares: relations between tokens as quadtrees in which equal parts are held once, however often they occur."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

NO_PAIR, EVERY_PAIR = 0, 1  # the squares of one kind throughout, of any side

# n squares


class TooManySquaresError(Exception):
    """A relation, or what is computed with it, repeats too little: it has more different squares than allowed."""


class Squares:
    """Boolean matrices whose sides are powers of two, each known by a number.

    A square is NO_PAIR, EVERY_PAIR, or four quarters (top left, top right, bottom left, bottom right) in the order of
    their numbers. Equal squares have equal numbers, so whatever is computed of one is computed once: time and memory go
    with the number of different squares, not with the tokens. `most` bounds that number and that of products.
    """

    most = 1 << 19

    def __init__(self) -> None:
        self._quarters: list[tuple[int, ...]] = [(NO_PAIR,) * 4, (EVERY_PAIR,) * 4]
        self._numbers = {quarters: number for number, quarters in enumerate(self._quarters)}
        self._both: dict[tuple[int, int], int] = {}
        self._either: dict[tuple[int, int], int] = {}
        self._through: dict[tuple[int, int], int] = {}
        self._others: dict[int, int] = {NO_PAIR: EVERY_PAIR, EVERY_PAIR: NO_PAIR}
        self._pairs: dict[tuple[int, int], int] = {}
        self._lines: dict[tuple[int, int, bool], int] = {}
        self._rectangles: dict[tuple[range, range, int], int] = {}

    def __len__(self) -> int:
        return len(self._quarters) + len(self._through)

    def quarters(self, square: int) -> tuple[int, ...]:
        return self._quarters[square]

    def join(self, *quarters: int) -> int:
        """The square with these quarters."""
        found = self._numbers.get(quarters)
        if found is None:
            if len(self) >= self.most:
                raise TooManySquaresError
            found = self._numbers[quarters] = len(self._quarters)
            self._quarters.append(quarters)
        return found

    def join_all(self, quarters: Int64[Tensor, "n 4"]) -> Int64[Tensor, " n"]:
        """The same of many at once."""
        top, bottom = (_paired(*half.unbind(1)) for half in quarters.split(2, dim=1))
        kinds, kind = _paired(top, bottom).unique(return_inverse=True)
        example = torch.zeros_like(kinds).scatter_(0, kind, torch.arange(len(kind)))
        return torch.tensor([self.join(*each) for each in quarters[example].tolist()], dtype=torch.int64)[kind]

    def both(self, a: int, b: int) -> int:
        """Pairs of both."""
        if a in (b, NO_PAIR) or b == EVERY_PAIR:
            return a
        if a == EVERY_PAIR or b == NO_PAIR:
            return b
        key = (a, b) if a < b else (b, a)
        found = self._both.get(key)
        if found is None:
            parts = zip(self._quarters[a], self._quarters[b], strict=True)
            found = self._both[key] = self.join(*(self.both(x, y) for x, y in parts))
        return found

    def either(self, a: int, b: int) -> int:
        """Pairs of any."""
        if a in (b, EVERY_PAIR) or b == NO_PAIR:
            return a
        if a == NO_PAIR or b == EVERY_PAIR:
            return b
        key = (a, b) if a < b else (b, a)
        found = self._either.get(key)
        if found is None:
            parts = zip(self._quarters[a], self._quarters[b], strict=True)
            found = self._either[key] = self.join(*(self.either(x, y) for x, y in parts))
        return found

    def others(self, square: int) -> int:
        """The pairs that a square lacks."""
        found = self._others.get(square)
        if found is None:
            found = self._others[square] = self.join(*map(self.others, self._quarters[square]))
        return found

    def through(self, a: int, b: int) -> int:
        """The pairs (i, j) for which some k has (i, k) in the first and (k, j) in the second: the Boolean product."""
        if a == NO_PAIR or b == NO_PAIR:
            return NO_PAIR
        if a == EVERY_PAIR and b == EVERY_PAIR:
            return EVERY_PAIR
        found = self._through.get((a, b))
        if found is None:
            (a0, a1, a2, a3), (b0, b1, b2, b3) = self._quarters[a], self._quarters[b]
            found = self._through[a, b] = self.join(
                self._through_any(a0, b0, a1, b2),
                self._through_any(a0, b1, a1, b3),
                self._through_any(a2, b0, a3, b2),
                self._through_any(a2, b1, a3, b3),
            )
        return found

    def _through_any(self, a: int, b: int, c: int, d: int) -> int:
        first = self.through(a, b)
        return EVERY_PAIR if first == EVERY_PAIR else self.either(first, self.through(c, d))

    def pairs(self, square: int, side: int) -> int:
        """How many pairs a square of this side holds."""
        if square in (NO_PAIR, EVERY_PAIR):
            return square * side * side
        found = self._pairs.get((square, side))
        if found is None:
            found = self._pairs[square, side] = sum(self.pairs(part, side // 2) for part in self._quarters[square])
        return found

    def lines(self, square: int, side: int, *, columns: bool = False) -> int:
        """The rows (or columns) that hold a pair, as the bits of an integer."""
        if square in (NO_PAIR, EVERY_PAIR):
            return square and (1 << side) - 1
        found = self._lines.get((square, side, columns))
        if found is None:
            a, b, c, d = (self.lines(part, side // 2, columns=columns) for part in self._quarters[square])
            low, high = (a | c, b | d) if columns else (a | b, c | d)
            found = self._lines[square, side, columns] = low | high << side // 2
        return found

    def first_pair(self, square: int, side: int) -> tuple[int, int] | None:
        """The first pair of the first row that holds any."""
        if square == NO_PAIR:
            return None
        if square == EVERY_PAIR:
            return 0, 0
        row = _lowest(self.lines(square, side))
        return row, _lowest(self._row(square, side, row))

    def _row(self, square: int, side: int, row: int) -> int:
        """The columns of the pairs of one row, as bits."""
        if square in (NO_PAIR, EVERY_PAIR):
            return square and (1 << side) - 1
        half = side // 2
        left, right = self._quarters[square][2:] if row >= half else self._quarters[square][:2]
        return self._row(left, half, row % half) | self._row(right, half, row % half) << half

    def rectangle(self, rows: range, columns: range, side: int) -> int:
        """All pairs of a run of rows and a run of columns, of a square of this side."""
        rows, columns = (range(max(0, run.start), min(side, run.stop)) for run in (rows, columns))
        if not (rows and columns):
            return NO_PAIR
        if len(rows) == len(columns) == side:
            return EVERY_PAIR
        found = self._rectangles.get((rows, columns, side))
        if found is None:
            half = side // 2
            quarters = ((q, k) for q in (0, half) for k in (0, half))
            found = self._rectangles[rows, columns, side] = self.join(
                *(self.rectangle(_moved(rows, q), _moved(columns, k), half) for q, k in quarters)
            )
        return found

    def diagonal(self, side: int) -> int:
        """Each token with itself."""
        square = EVERY_PAIR
        for _ in range(side.bit_length() - 1):
            square = self.join(square, NO_PAIR, NO_PAIR, square)
        return square

    def below_diagonal(self, side: int) -> int:
        """Each token with the ones before it."""
        square = NO_PAIR
        for _ in range(side.bit_length() - 1):
            square = self.join(square, NO_PAIR, EVERY_PAIR, square)
        return square


def _moved(run: range, distance: int) -> range:
    """The run as it is counted from this place on."""
    return range(run.start - distance, run.stop - distance)


def _lowest(bits: int) -> int:
    """The index of the lowest set bit."""
    return (bits & -bits).bit_length() - 1


def _paired(first: Tensor, second: Tensor) -> Tensor:
    """One number for each pair of numbers, the same where both are: its place among the pairs that occur."""
    return (first * (int(second.max()) + 1 if len(second) else 1) + second).unique(return_inverse=True)[1]
