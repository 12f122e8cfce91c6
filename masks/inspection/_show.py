"""show: draw a pattern as a heat map of text characters, for any window and number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from textwrap import shorten, wrap
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import (
    HEADS,
    LENGTH,
    Expression,
    advises,
    outside_torch_modes,
    renamed,
    require_bool,
    require_choice,
    require_expression,
    require_int,
    round_places,
    tokens_format,
    tokens_text,
)
from ..planning import layout
from ._cells import Cells, count_cells, window_slots

# R rows, C columns

LEAST_COLUMNS, LEAST_LINES = 24, 12
MOST_CELLS = 1 << 12  # per side
_MOST_SIZE = 1 << 16  # columns or lines
_LINES_AROUND_MAP, _LEAST_MAP = 7, 1  # lines for pattern, facts, labels, frame, legend and prompt; for the cells
_TICK_ROWS, _TICK_COLUMNS = 3, 7  # lines and columns for each label
_FRAME = 3  # columns of the frame, between labels and cells
_LEAST_SIDE, _LEAST_SHARE = 6, 0.8  # number of cells; share of the cells that fit
_MOST_TIMES, _RESET_COLOR = 9, "\x1b[0m"


@dataclass(frozen=True)
class _Canvas:
    """Terminal of `columns` by `lines` characters.

    color: True if it shows 256 ANSI colors.
    shapes: True if it shows characters beyond ASCII.
    """

    columns: int
    lines: int
    color: bool
    shapes: bool


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Allowed pairs of one head of a pattern, counted in the cells of a grid; str() is the picture.

    order: "natural" or "residue".
    rate: rate of the residue-major order; 1 in natural order.
    cells: the counts; their edges are positions, or slots in residue-major order.
    """

    pattern: Expression
    num_tokens: int
    num_heads: int
    head: int
    order: str
    rate: int
    cells: Cells = field(repr=False)
    _canvas: _Canvas = field(repr=False)
    _grid: Grid = field(repr=False)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Lines of the picture."""
        columns = self._canvas.columns
        above = [shorten(repr(self.pattern), columns, placeholder=" ..."), *self._fact_lines()]
        drawn = [*_map_lines(self.cells, self._grid, self._canvas), *_legend_lines(self.cells, self._canvas)]
        return (*above, *drawn, *self._note_lines())

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_data(self) -> dict[str, Any]:
        """Return the map as a dict for JSON, with counts of pairs as nested lists, one for each row of cells.

        "low" and "high" are bounds on the allowed pairs, summed over branches; "likely" is an estimate of these pairs,
        None if all cells are counted exactly; "branches" is a list with the "pattern", "low" and "high" of each branch.
        Other keys: "row_edges" and "column_edges" of the cells, and the fields from `pattern` (as text) to `rate`.
        """
        named = zip(self.pattern.branches(), self.cells.branches, strict=True)
        return {
            "pattern": repr(self.pattern),
            **{name: getattr(self, name) for name in ("num_tokens", "num_heads", "head", "order", "rate")},
            **{name: getattr(self.cells, name).tolist() for name in ("row_edges", "column_edges", "low", "high")},
            "likely": None if bool(self.cells.exact.all()) else self.cells.likely.tolist(),
            "branches": [
                {"pattern": repr(branch), "low": found.low.tolist(), "high": found.high.tolist()}
                for branch, found in named
            ],
        }

    def _fact_lines(self) -> list[str]:
        order = "natural order" if self.order == "natural" else f"residue order mod {self.rate}"
        down, across = (
            _side_text(self.cells.row_edges, "query", "queries"),
            _side_text(self.cells.column_edges, "key", "keys"),
        )
        tokens = f"head {self.head} of {self.num_heads}, {tokens_text(self.num_tokens)} tokens"
        return wrap(f"{tokens}, {order}; cells of {down} x {across}", self._canvas.columns, break_on_hyphens=False)

    def _note_lines(self) -> list[str]:
        notes, cells = [], self.cells
        if len(cells.branches) > 1 and bool((cells.area > 1).any()):
            notes.append("A pair counts once for each branch that allows it.")
        doubtful = int((~cells.exact).sum())
        if doubtful:
            estimates = f"{doubtful:,} of {cells.area.numel():,} cells are estimates within bounds"
            notes.append(f"{estimates}, from a look at some of their pairs; the others are counted.")
        return [line for note in notes for line in wrap(note, self._canvas.columns)]


@outside_torch_modes
@advises(keywords=renamed(num_tokens=LENGTH, num_heads=HEADS))
def show(
    pattern: Expression,
    num_tokens: int,
    *,
    num_heads: int = 1,
    head: int = 0,
    batch: int = 0,
    queries: range | None = None,
    keys: range | None = None,
    order: str = "natural",
    cells: tuple[int, int] | None = None,
    size: tuple[int, int] = (80, 24),
    color: bool = False,
    ascii: bool = False,  # noqa: A002
) -> HeatMap:
    """Draw one head of a pattern as text: queries down, keys across; denser characters for more allowed pairs.

    Returns a HeatMap; print it to see the picture.

    num_tokens: number of queries, and of keys.
    order: "natural", or "residue" for the residue-major order of `masks.layout`.
    queries, keys: the window, by default all: positions in "natural" order, slots of `masks.layout` in "residue" order.
    size: (columns, lines) of the terminal; the picture leaves one line free for the prompt, if it can. A small window
        is drawn pair by pair.
    cells: (rows, columns) of the grid, regardless of `size`; reduced to the number of slots of the window.
    color: use 256 ANSI colors.
    ascii: use only ASCII characters.
    head: index of the head to draw, below num_heads.
    batch: index of the batch entry, if run-time tensors differ by entry.

    Raises ValueError or TypeError for heads, entries, windows and sizes that do not fit, and for tokens that the
    pattern does not take.

    >>> picture = masks.show(masks.causal(), 1 << 20)  # print it
    """
    asked = require_expression(pattern)
    require_int("num_tokens", num_tokens, minimum=1)
    require_choice("order", order, ("natural", "residue"))
    canvas = _Canvas(
        *_require_two_integers("size", size, (LEAST_COLUMNS, LEAST_LINES), _MOST_SIZE),
        require_bool("color", color),
        not require_bool("ascii", ascii),
    )
    slots = layout(asked, num_tokens) if order == "residue" else None
    rate = 1 if slots is None else slots.rate
    window = window_slots("queries", queries, num_tokens), window_slots("keys", keys, num_tokens)
    where = {"head": head, "num_heads": num_heads, "batch": batch, "queries": queries, "keys": keys, "order": slots}

    def drawn(grid: Grid) -> HeatMap:
        found = count_cells(asked, num_tokens, **where, shape=grid.shape)
        return HeatMap(asked, num_tokens, num_heads, head, order, rate, found, canvas, grid)

    if cells is not None:
        rows, columns = _require_two_integers("cells", cells, (1, 1), MOST_CELLS)
        return drawn(Grid(min(rows, len(window[0])), min(columns, len(window[1]))))
    # Reduce the lines of cells until all fits, as texts vary in length. One line is for the prompt.
    free = canvas.lines - 1
    most = free - _LINES_AROUND_MAP + 1
    while True:
        found = drawn(_grid_for(window, canvas, most))
        if len(found.lines) <= free or most == _LEAST_MAP:
            return found
        most = max(_LEAST_MAP, most - (len(found.lines) - free))


def _require_two_integers(name: str, value: object, least: tuple[int, int], most: int) -> tuple[int, int]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{name} must be a tuple of two integers; got {name}={value!r:.80}")
    first, second = (require_int(name, each, minimum=low, maximum=most) for each, low in zip(value, least, strict=True))
    return first, second


def _side_text(edges: Tensor, one: str, many: str) -> str:
    """Return the length of cells along one axis as text, such as "64 queries" or "63 to 64 queries".

    one, many: the noun in singular and in plural.
    """
    least, most = (int(size) for size in edges.diff().aminmax())
    return f"{tokens_text(least)}{f' to {tokens_text(most)}' if most > least else ''} {one if most == 1 else many}"


@dataclass(frozen=True)
class Grid:
    """Grid of cells: a cell is `width` characters wide, and one line high or, if `halves` is True, half a line."""

    rows: int
    columns: int
    width: int = 1
    halves: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def rows_per_line(self) -> int:
        return 2 if self.halves else 1


def _grid_for(window: Sequence[range], canvas: _Canvas, lines: int) -> Grid:
    """Return a grid of cells over a window of query and key slots, for a picture of at most `lines` lines of cells.

    If the canvas has room for all pairs, each pair is a cell. Otherwise there are about as many cells as fit with
    queries and keys at about one scale, where a character is twice as high as wide; an axis that is much shorter still
    gets up to 6 cells.
    """
    queries, keys = map(len, window)
    rows, _ = _labels(window, (lines, canvas.columns))
    margin = max(map(len, rows.values()), default=0)
    most = canvas.columns - margin - _FRAME
    if queries <= lines and keys <= most:
        return Grid(queries, keys, width=2 if 2 * keys <= most else 1)
    grid = Grid(queries, keys, halves=canvas.color and canvas.shapes)
    height = 2 // grid.rows_per_line  # of a cell, in widths of a character
    rows, columns = min(grid.rows_per_line * lines, queries), min(most, keys)
    columns = min(columns, max(_LEAST_SIDE, round(height * rows * keys / queries)))
    rows = min(rows, max(_LEAST_SIDE, round(columns * queries / keys / height)))
    return replace(grid, rows=_num_cells_along(queries, rows), columns=_num_cells_along(keys, columns))


def _num_cells_along(slots: int, most: int) -> int:
    """Return the number of cells, at most `most`, into which `slots` slots are cut.

    It is the largest divisor of `slots` from 80 % of `most` to `most`. If there is none, it is the smaller of `most`
    and `slots`.
    """
    # Divisors are preferred, as the borders of equally long cells coincide with those of segments and blocks.
    least = max(1, round(_LEAST_SHARE * most))
    return next((cells for cells in range(min(most, slots), least - 1, -1) if slots % cells == 0), min(most, slots))


def _labels(window: Sequence[range], size: tuple[int, int]) -> tuple[dict[int, str], dict[int, str]]:
    """Return (query labels, key labels): maps from round-numbered slots to their texts.

    size: (lines, columns) of the picture, which limits the numbers of labels.
    """
    most = size[0] // _TICK_ROWS, size[1] // _TICK_COLUMNS
    sides = [
        [slot for slot in round_places(slots, number) if slot in slots]
        for slots, number in zip(window, most, strict=True)
    ]
    text = tokens_format([slot for side in sides for slot in side])
    rows, columns = ({slot: text(slot) for slot in side} for side in sides)
    return rows, columns


def _labels_by_cell(labels: dict[int, str], edges: Tensor) -> list[tuple[int, str]]:
    cells = torch.searchsorted(edges, torch.tensor(list(labels), dtype=torch.int64), right=True) - 1
    return list(zip(cells.tolist(), labels.values(), strict=True))


def _labels_above(marks: Sequence[tuple[int, str]], width: int, columns: int) -> tuple[str, list[int]]:
    """Return (line of text with each label that fits above its cell, columns at which these labels begin).

    marks: (cell, label) for each label, in ascending order of cells.
    width: characters of a cell.
    columns: greatest length of the line.
    """
    line, shown = "", []
    for cell, label in marks:
        column = cell * width
        if column < len(line) + bool(line) or column + len(label) > columns:
            continue
        line, shown = line.ljust(column) + label, [*shown, column]
    return line, shown


def _map_lines(cells: Cells, grid: Grid, canvas: _Canvas) -> list[str]:
    """Return lines of text: the cells in a frame, with labels at the left and above."""
    levels, number = levels_of(cells, color=canvas.color)
    body = _lines_of_row_pairs(levels, number) if grid.halves else _lines_of_rows(levels, number, grid.width, canvas)
    inner = grid.columns * grid.width
    rows, columns = _labels(cells.window, (len(body), inner))
    by_line = {cell // grid.rows_per_line: label for cell, label in reversed(_labels_by_cell(rows, cells.row_edges))}
    margin = max(map(len, by_line.values()), default=0)
    above, marked = _labels_above(_labels_by_cell(columns, cells.column_edges), grid.width, canvas.columns - margin - 2)
    dash, bar, tick, notch, corners = ("─", "│", "┤", "┴", "┌┐└┘") if canvas.shapes else ("-", "|", "+", "+", "++++")
    border = "".join(notch if column in marked else dash for column in range(inner))
    lines = [f"{'':{margin}}  {above}".rstrip(), f"{'':{margin}} {corners[0]}{border}{corners[1]}"]
    for index, line in enumerate(body):
        lines.append(f"{by_line.get(index, ''):>{margin}} {tick if index in by_line else bar}{line}{bar}")
    return [*lines, f"{'':{margin}} {corners[2]}{dash * inner}{corners[3]}"]


def _lines_of_rows(levels: tuple[Level, ...], number: Int64[Tensor, "R C"], width: int, canvas: _Canvas) -> list[str]:
    """Return lines of text, one for each row of cells; `number`: index of each cell's level."""

    def text(level: Level, cells: int) -> str:
        shape = level.shape if canvas.shapes else level.ascii
        if canvas.color and level.color:
            return _colored_text(level, (shape if level.is_digit else " ").ljust(width) * cells)
        return (shape.ljust(width) if level.is_digit else shape * width) * cells

    return ["".join(text(levels[index], len(list(run))) for index, run in groupby(row)) for row in number.tolist()]


def _lines_of_row_pairs(levels: tuple[Level, ...], number: Int64[Tensor, "R C"]) -> list[str]:
    """Return lines of text, one for two rows of cells, drawn as the upper and lower halves of characters."""
    rows = [*number.tolist(), [0] * number.shape[1]][: number.shape[0] + number.shape[0] % 2]
    return [
        "".join(_halves_text(levels[upper], levels[lower], len(list(run))) for (upper, lower), run in groupby(pairs))
        for pairs in (zip(rows[line], rows[line + 1], strict=True) for line in range(0, len(rows), 2))
    ]


def _halves_text(upper: Level, lower: Level, cells: int) -> str:
    if upper.color == lower.color:
        return f"\x1b[38;5;{upper.color}m{'█' * cells}{_RESET_COLOR}" if upper.color else " " * cells
    if not upper.color or not lower.color:
        shape, color = ("▀", upper.color) if upper.color else ("▄", lower.color)
        return f"\x1b[38;5;{color}m{shape * cells}{_RESET_COLOR}"
    return f"\x1b[38;5;{upper.color};48;5;{lower.color}m{'▀' * cells}{_RESET_COLOR}"


def _legend_lines(cells: Cells, canvas: _Canvas) -> list[str]:
    """Return the lines of the legend: the meaning of each level that occurs, except that of empty cells.

    If all cells are empty, a line says so.
    """
    levels, number = levels_of(cells, color=canvas.color)
    used = [levels[index] for index in reversed(number.unique().tolist()) if index]
    many = bool((cells.area > 1).any())
    if not used:
        return ["No pair is allowed here."]
    lines, room = ["Pairs allowed:" if many else "A cell is a pair:"], canvas.columns
    room -= len(lines[0])
    for level in used:
        width = len(level.meaning) + (3 if canvas.color else 2)
        if 2 + width > room and room < canvas.columns:
            lines, room = [*lines, ""], canvas.columns + 2
        lines[-1] += f"{'  ' if lines[-1] else ''}{_swatch(level, canvas)} {level.meaning}"
        room -= 2 + width
    return lines


def _swatch(level: Level, canvas: _Canvas) -> str:
    shape = level.shape if canvas.shapes else level.ascii
    if not canvas.color:
        return shape
    return _colored_text(level, f" {shape}" if level.is_digit else "  ")


def _colored_text(level: Level, text: str) -> str:
    return f"\x1b[48;5;{level.color};30m{text}{_RESET_COLOR}"


@dataclass(frozen=True)
class Level:
    """Appearance of the cells whose fraction of allowed pairs is in one range.

    In a mixture the fraction counts a pair once for each branch that allows it, and may exceed 1.

    shape: character that is drawn; ascii: the character on a terminal with ASCII only.
    color: number of its ANSI color, 0 for none.
    meaning: text for the legend.
    """

    shape: str
    ascii: str
    color: int
    meaning: str

    @property
    def is_digit(self) -> bool:
        """True if the character is a digit: the mean number of branches that allow a pair, rounded up, at most 9."""
        return self.shape.isdigit()


_NONE = Level(" ", " ", 0, "none")
_UNKNOWN = Level("?", "?", 240, "none found, some possible")
_ALL = Level("█", "#", 220, "all")
# (least fraction of pairs, level, True if only its color distinguishes it from adjacent levels)
_SHARES = (
    (0.0, Level("·", ".", 60, "less"), False),
    (0.001, Level("░", "-", 26, "0.1%+"), False),
    (0.003, Level("░", "-", 32, "0.3%+"), True),
    (0.01, Level("▒", "+", 37, "1%+"), False),
    (0.03, Level("▒", "+", 72, "3%+"), True),
    (0.1, Level("▓", "*", 113, "10%+"), False),
    (0.3, Level("▓", "*", 184, "30%+"), True),
)
_TIMES_COLORS = (209, 203, 197, 198, 199, 164, 128, 92)


def levels_of(cells: Cells, *, color: bool) -> tuple[tuple[Level, ...], Int64[Tensor, "R C"]]:
    """Return (levels that a picture may show, index of the level of each cell).

    color: include the levels that differ from others by color only.
    """
    least, shares = zip(*((least, level) for least, level, colored in _SHARES if color or not colored), strict=True)
    single, mixed = bool((cells.area == 1).all()), len(cells.branches) > 1
    levels = (_NONE, _UNKNOWN, *shares, *_levels_by_times(single, mixed))
    share = cells.likely / cells.area
    number = 2 + torch.bucketize(share, torch.tensor([*least[1:], 1.0], dtype=torch.float64), right=True)
    several = share > 1
    number[several] = len(shares) + 1 + share[several].ceil().clamp(max=_MOST_TIMES).long()
    number[(share == 0) & (cells.high > 0)] = 1
    number[cells.high == 0] = 0
    return levels, number


def _levels_by_times(single: bool, mixed: bool) -> list[Level]:
    """Return the levels of cells by the mean number of branches that allow a pair: 1, over 1 to 2, ..., over 8.

    single: each cell is one pair.
    mixed: the pattern has several branches.
    """
    if single:
        once = Level("1", "1", _ALL.color, "branch") if mixed else replace(_ALL, meaning="allowed")
        meanings = ["branches"] * (_MOST_TIMES - 2) + ["branches or more"]
    else:
        once = replace(_ALL, meaning="once each") if mixed else _ALL
        meanings = [f"{times - 1} to {times} times each" for times in range(2, _MOST_TIMES)]
        meanings.append(f"more than {_MOST_TIMES - 1} times each")
    times = enumerate(zip(_TIMES_COLORS, meanings, strict=True), start=2)
    return [once, *(Level(str(number), str(number), *each) for number, each in times)]
