"""Heat maps: cells as lines of a terminal, with axes and a legend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from jaxtyping import Int64
from torch import Tensor

from ..masks.inspection import Cells
from ._heat_axes import Tick, labels_above, round_slots, ticks
from ._heat_levels import Level, levels_of, levels_used
from ._terminal import Terminal

# R rows, C columns

_TICK_ROWS, _TICK_COLUMNS = 3, 7  # lines and columns for each label
_FRAME = 3  # columns beside the cells and the labels
_LEAST_SIDE = 6
_LEAST_SHARE = 0.8
_PLAIN = "\x1b[0m"


@dataclass(frozen=True)
class Grid:
    """Rows and columns of cells; a cell is `width` characters wide, and with `halves` half a line high."""

    rows: int
    columns: int
    width: int = 1
    halves: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


def grid_for(window: tuple[range, range], terminal: Terminal, lines: int) -> Grid:
    """The finest grid of a window that fits into these lines, with cells about as wide as high.

    A character is about twice as high as wide. Where the window is small each pair is a cell.
    """
    queries, keys = map(len, window)
    margin = max(map(len, round_slots(window[0], lines // _TICK_ROWS).values()), default=0)
    most = terminal.columns - margin - _FRAME
    if queries <= lines and keys <= most:
        return Grid(queries, keys, width=2 if 2 * keys <= most else 1)
    halves = terminal.colour and terminal.shapes
    high = 1 if halves else 2
    rows, columns = min((3 - high) * lines, queries), min(most, keys)
    columns = min(columns, max(_LEAST_SIDE, round(high * rows * keys / queries)))
    rows = min(rows, max(_LEAST_SIDE, round(columns * queries / keys / high)))
    return Grid(_even(queries, rows), _even(keys, columns), halves=halves)


def _even(slots: int, most: int) -> int:
    """Cells of one length, if that does not take many fewer: their edges are then those of segments and blocks."""
    least = max(1, round(_LEAST_SHARE * most))
    return next((cells for cells in range(min(most, slots), least - 1, -1) if slots % cells == 0), min(most, slots))


def heat_map(cells: Cells, grid: Grid, terminal: Terminal) -> list[str]:
    """The cells in a frame, labels at its left and above it."""
    levels, number = levels_of(cells, colour=terminal.colour)
    body = _halves(levels, number) if grid.halves else _whole(levels, number, grid.width, terminal)
    rows = ticks(cells.window[0], cells.row_edges, max(1, len(body) // _TICK_ROWS))
    inner = grid.columns * grid.width
    columns = ticks(cells.window[1], cells.column_edges, max(1, inner // _TICK_COLUMNS))
    return _framed(body, rows, columns, grid, terminal)


def _framed(body: list[str], rows: list[Tick], columns: list[Tick], grid: Grid, terminal: Terminal) -> list[str]:
    inner, high = grid.columns * grid.width, 2 if grid.halves else 1
    by_line = {mark.cell // high: mark.label for mark in reversed(rows)}
    margin = max(map(len, by_line.values()), default=0)
    above, marked = labels_above(columns, grid.width, terminal.columns - margin - 2)
    dash, bar, tick, notch, corners = ("─", "│", "┤", "┴", "┌┐└┘") if terminal.shapes else ("-", "|", "+", "+", "++++")
    border = "".join(notch if column in marked else dash for column in range(inner))
    lines = [f"{'':{margin}}  {above}".rstrip(), f"{'':{margin}} {corners[0]}{border}{corners[1]}"]
    for index, line in enumerate(body):
        lines.append(f"{by_line.get(index, ''):>{margin}} {tick if index in by_line else bar}{line}{bar}")
    return [*lines, f"{'':{margin}} {corners[2]}{dash * inner}{corners[3]}"]


def _whole(levels: tuple[Level, ...], number: Int64[Tensor, "R C"], width: int, terminal: Terminal) -> list[str]:
    """A line for each row."""

    def text(level: Level, cells: int) -> str:
        shape = level.shape if terminal.shapes else level.ascii
        if terminal.colour and level.colour:
            return _coloured(level, (shape if level.is_times else " ").ljust(width) * cells)
        return (shape.ljust(width) if level.is_times else shape * width) * cells

    return ["".join(text(levels[index], len(list(run))) for index, run in groupby(row)) for row in number.tolist()]


def _halves(levels: tuple[Level, ...], number: Int64[Tensor, "R C"]) -> list[str]:
    """A line for two rows: the upper half of a character for the one, the lower half for the other."""
    rows = [*number.tolist(), [0] * number.shape[1]][: number.shape[0] + number.shape[0] % 2]
    return [
        "".join(_half(levels[upper], levels[lower], len(list(run))) for (upper, lower), run in groupby(pairs))
        for pairs in (zip(rows[line], rows[line + 1], strict=True) for line in range(0, len(rows), 2))
    ]


def _half(upper: Level, lower: Level, cells: int) -> str:
    if upper.colour == lower.colour:
        return f"\x1b[38;5;{upper.colour}m{'█' * cells}{_PLAIN}" if upper.colour else " " * cells
    if not upper.colour or not lower.colour:
        shape, colour = ("▀", upper.colour) if upper.colour else ("▄", lower.colour)
        return f"\x1b[38;5;{colour}m{shape * cells}{_PLAIN}"
    return f"\x1b[38;5;{upper.colour};48;5;{lower.colour}m{'▀' * cells}{_PLAIN}"


def legend(cells: Cells, terminal: Terminal) -> list[str]:
    """What the levels that occur mean, in as few lines as hold them."""
    used = levels_used(*levels_of(cells, colour=terminal.colour))
    many = bool((cells.area > 1).any())
    entries = [(f"{_swatch(level, terminal)} {level.meaning}", len(level.meaning) + (3 if terminal.colour else 2))
               for level in used]  # fmt: skip
    if not entries:
        return ["No pair is allowed here."]
    lines, room = ["Pairs allowed:" if many else "A cell is a pair:"], terminal.columns
    room -= len(lines[0])
    for entry, width in entries:
        if 2 + width > room and room < terminal.columns:
            lines, room = [*lines, ""], terminal.columns + 2
        lines[-1] += f"{'  ' if lines[-1] else ''}{entry}"
        room -= 2 + width
    return lines


def _swatch(level: Level, terminal: Terminal) -> str:
    shape = level.shape if terminal.shapes else level.ascii
    if not terminal.colour:
        return shape
    return _coloured(level, f" {shape}" if level.is_times else "  ")


def _coloured(level: Level, text: str) -> str:
    """Black on the level's colour."""
    return f"\x1b[48;5;{level.colour};30m{text}{_PLAIN}"
