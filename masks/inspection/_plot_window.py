"""The window of a picture: its slots, how many of them are a cell, and how many pixels a cell has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from ._window_slots import window_slots

_LONGER = 4  # a window longer than this many times its other side is stretched


@dataclass(frozen=True)
class Axis:
    """One side of a window. Cells begin at multiples of `cell`, so that the first and the last may stand out of it."""

    slots: range
    cell: int
    pixels: int  # a cell

    @property
    def first(self) -> int:
        """Where the first cell begins."""
        return self.slots.start // self.cell * self.cell

    @property
    def cells(self) -> int:
        return -((self.first - self.slots.stop) // self.cell)

    @property
    def length(self) -> int:
        """Pixels of the window."""
        return max(1, round(self.pixels_of(len(self.slots))))

    def pixels_of(self, slots: int) -> float:
        """Pixels of so many slots."""
        return slots / self.cell * self.pixels


@dataclass(frozen=True)
class Window:
    """The window of a picture: query slots downwards, key slots to the right."""

    queries: Axis
    keys: Axis


def window_of(
    num_queries: int,
    num_keys: int,
    queries: range | None,
    keys: range | None,
    *,
    block: tuple[int, int] | None,
    size: int,
) -> Window:
    """A window of about `size` pixels along its longer side, both sides to one scale unless one is far longer.

    Raises ValueError for slots that are not there, and where blocks would be smaller than pixels.
    """
    q, k = window_slots("queries", queries, num_queries), window_slots("keys", keys, num_keys)
    sides = (0, 0) if block is None else block
    longer = max(len(q), len(k))
    if longer > _LONGER * min(len(q), len(k)):
        return Window(*(_axis(slots, len(slots), side, size) for slots, side in zip((q, k), sides, strict=True)))
    return Window(*(_axis(slots, longer, gcd(*sides), size) for slots in (q, k)))


def runs(slots: range, side: int) -> Iterator[tuple[range, int]]:
    """The slots, cut so that parts of `side` slots begin at its multiples, with the number of parts of each run."""
    up, down = -(-slots.start // side) * side, slots.stop // side * side
    if up > down:
        yield slots, 1
        return
    for start, stop, parts in ((slots.start, up, 1), (up, down, (down - up) // side), (down, slots.stop, 1)):
        if start < stop:
            yield range(start, stop), parts


def whole_blocks(slots: range, side: int, limit: int) -> range:
    """The slots of all blocks that the window touches."""
    return range(slots.start // side * side, min(limit, -(-slots.stop // side) * side))


def _axis(slots: range, scale: int, block: int, size: int) -> Axis:
    least = -(-scale // size)
    if not block:
        cell = 1 << (least - 1).bit_length()
    else:
        fitting = [each for each in range(least, block + 1) if block % each == 0]
        if not fitting:
            raise ValueError(
                f"to show {scale} tokens in {size} pixels, block sides must share a divisor of at least {least}; "
                f"got {block}: take a smaller window, larger blocks or a larger size"
            )
        cell = fitting[0]
    return Axis(slots, cell, max(1, round(size * cell / scale)))
