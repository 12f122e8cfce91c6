"""Draw a picture as a matplotlib figure in whole pixels, so that all cells have equal size."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from textwrap import wrap
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ._picture import (
    BEIGE,
    PAIR,
    PAIR_OF_FULL,
    WHITE,
    Panel,
    Picture,
    WindowAxis,
    axis_ticks,
    paint,
    panel_of,
    panel_title,
    rgb,
    shade,
    title_lines,
)

_DPI = 100
_LEFT, _RIGHT, _GAP = 36, 24, 22  # pixels; _LEFT excludes the tick labels
_BELOW, _EDGE = 46, 8  # pixels: below a panel, for tick and axis labels; at the edges of the figure
_TITLE, _PANEL_TITLE, _LEGEND = 19, 18, 19  # pixels of a line
_LETTER = 8.6  # approximate pixels of a letter of the title
_MOST_COLUMNS = 4
_LEAST_WIDTH = 320  # pixels of a figure with a legend
_GRID, _BORDER = "#d9d9d9", "#999999"
_LEAST_BLOCK = 12  # pixels, for lines between blocks
_TICK_LETTER = 6.8  # approximate pixels of a letter of a tick label
_LEGEND_LETTER, _SWATCH = 6.6, 42  # pixels
_LEGEND_STYLE = {
    **{"frameon": False, "fontsize": 8.5, "borderpad": 0, "borderaxespad": 0, "handlelength": 1.4},
    **{"handleheight": 1.0, "columnspacing": 1.6, "labelspacing": 0.45},
}
_SHARES = ((0.001, "1 pair in 1,000"), (0.03, "1 in 30"), (1.0, "every pair"))


class ReproducibleFigure(Figure):
    """Figure that is saved as SVG or PDF without a date, and as SVG with fixed ids, for reproducible bytes."""

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Save as matplotlib does, but SVG and PDF without a date unless `metadata` sets one."""
        kind = str(kwargs.get("format") or getattr(fname, "suffix", "") or fname).lower()
        fixed = {"Date": None} if kind.endswith("svg") else {"CreationDate": None} if kind.endswith("pdf") else {}
        metadata = {**fixed, **(kwargs.pop("metadata", None) or {})}
        with rc_context({"svg.hashsalt": "flexdilated"}):
            super().savefig(fname, metadata=metadata, **kwargs)


def draw(picture: Picture) -> Figure:
    """Return a figure with all panels, in rows of up to 4; several heads in several orders get a row for each head."""
    panels = [panel_of(picture, head, order) for head in picture.heads for order in picture.orders]
    window = picture.window
    compared = len(picture.orders) > 1 and len(picture.heads) > 1
    columns = len(picture.orders) if compared else min(len(panels), _MOST_COLUMNS)
    panel_width, panel_height = window.keys.length, window.queries.length
    rows, _ = axis_ticks(window, letter=_TICK_LETTER)
    left = _LEFT + ceil(_TICK_LETTER * max(map(len, rows.values()), default=0))
    across = left + panel_width + _GAP
    of_panels = columns * across - _GAP + _RIGHT
    aside = max(0, (_LEAST_WIDTH if picture.legend else 0) - of_panels) // 2  # margin if panels are narrower than texts
    width = of_panels + 2 * aside
    title = title_lines(picture, letters=int(width / _LETTER))
    titles = [_panel_title_lines(picture, panel) for panel in panels]
    entries = legend_of(picture, panels) if picture.legend else []
    legend_columns = _legend_columns(entries, width) if entries else 1
    heading = _EDGE + len(title) * _TITLE + (6 if title else 0)
    subheading = max(len(lines) for lines in titles) * _PANEL_TITLE + 8
    down = subheading + panel_height + _BELOW
    footer = _EDGE // 2 + (ceil(len(entries) / legend_columns) * _LEGEND + 6 if entries else 0)
    height = heading + ceil(len(panels) / columns) * down + footer
    figure = ReproducibleFigure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    for place, (panel, lines) in enumerate(zip(panels, titles, strict=True)):
        row, column = divmod(place, columns)
        bottom = height - heading - row * down - subheading - panel_height
        corner = (aside + left + column * across) / width, bottom / height
        axes = figure.add_axes((*corner, panel_width / width, panel_height / height))
        _draw_panel(axes, picture, panel)
        if lines:
            axes.set_title("\n".join(lines), fontsize=9, pad=6, linespacing=1.4)
    for number, line in enumerate(title):
        y = 1 - (_EDGE + (number + 0.5) * _TITLE) / height
        size, color = (9, "#555555") if number and line == title[-1] else (10.5, "#000000")
        figure.text(0.5, y, line, ha="center", va="center", fontsize=size, color=color)
    if entries:
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, _EDGE / 2 / height), "ncols": legend_columns}
        figure.legend(handles=entries, **place, **_LEGEND_STYLE)
    return figure


def _panel_title_lines(picture: Picture, panel: Panel) -> list[str]:
    letters = max(20, int(picture.window.keys.length / 6.0))
    lines = [panel_title(picture, panel)] if panel_title(picture, panel) else []
    if picture.legend and panel.blocks is not None:
        lines += wrap(str(panel.blocks), letters)
    return lines


def _draw_panel(axes: Axes, picture: Picture, panel: Panel) -> None:
    """Draw a panel into `axes`: its cells as an image in slot coordinates, and ticks with labels.

    Blocks whose sides have at least 12 pixels are separated by lines.
    """
    q, k = picture.window
    extent = (k.first, k.first + k.cell * k.num_cells, q.first + q.cell * q.num_cells, q.first)
    colors = (paint(panel, picture.window) * 255).round().to(torch.uint8)
    axes.imshow(colors.numpy(), extent=extent, aspect="auto", interpolation="none")
    axes.set_xlim(k.slots.start, k.slots.stop)
    axes.set_ylim(q.slots.stop, q.slots.start)
    axes.spines[:].set_color(_BORDER)
    axes.spines[:].set_linewidth(0.7)
    if picture.block is not None and min(map(WindowAxis.pixels_of, picture.window, picture.block)) >= _LEAST_BLOCK:
        height, width = picture.block
        lines = [[(k.slots.start, y), (k.slots.stop, y)] for y in _block_starts(q.slots, height)]
        lines += [[(x, q.slots.start), (x, q.slots.stop)] for x in _block_starts(k.slots, width)]
        axes.add_collection(LineCollection(lines, colors=_GRID, linewidths=0.4), autolim=False)
    rows, columns = axis_ticks(picture.window, letter=_TICK_LETTER)
    word = "slot" if panel.rate > 1 else "position"
    axes.set_yticks(list(rows), list(rows.values()), fontsize=8)
    axes.set_xticks(list(columns), list(columns.values()), fontsize=8)
    axes.set_xlabel(f"key {word}", fontsize=8.5, labelpad=3)
    axes.set_ylabel(f"query {word}", fontsize=8.5, labelpad=3)
    axes.tick_params(length=3, pad=2, color=_BORDER)


def _block_starts(slots: range, side: int) -> range:
    """Return the slots of a window at which blocks of `side` slots begin, without the first slot of the window."""
    return range(-(-(slots.start + 1) // side) * side, slots.stop, side)


def _legend_entry(label: str, color: Any) -> Patch:
    return Patch(facecolor=color, edgecolor=_BORDER, linewidth=0.6, label=label)


def legend_of(picture: Picture, panels: Sequence[Panel]) -> list[Patch]:
    """Return the legend entries for the colors of cells, in this order.

    With blocks: pairs of full blocks, pairs of partial blocks, fractions of allowed pairs if cells have several pairs,
    cells without allowed pairs in computed blocks, and blocks that are not computed.

    Without blocks: an allowed pair, or fractions of allowed pairs if cells have several pairs; then pairs in 2, 3, ...
    m branches (if m > 3, in 2 and m), where m is the largest `share` of a cell in the panels, rounded.
    """
    many = max(axis.cell for axis in picture.window) > 1
    shares = [_legend_entry(label, _pair_color(share)) for share, label in _SHARES] if many else []
    if picture.block is not None:
        pairs = [_legend_entry("pair of a full block", PAIR_OF_FULL), _legend_entry("pair of a partial block", PAIR)]
        return [*pairs, *shares, _legend_entry("computed, no pair", BEIGE), _legend_entry("never computed", WHITE)]
    most = max(int(torch.round(panel.share.max())) for panel in panels)
    counts = range(2, most + 1) if most <= 3 else (2, most)
    several = [_legend_entry(f"pair in {count} branches", _pair_color(float(count))) for count in counts]
    return [*(shares or [_legend_entry("allowed pair", PAIR)]), *several]


def _legend_columns(entries: Sequence[Patch], width: int) -> int:
    """Return the number of legend columns that fit `width` pixels, reduced so that all rows are about equally full."""
    longest = max(len(str(entry.get_label())) for entry in entries)
    fitting = int(max(1, min(len(entries), width // (_SWATCH + _LEGEND_LETTER * longest))))
    return ceil(len(entries) / ceil(len(entries) / fitting))


def _pair_color(share: float) -> list[float]:
    return shade(torch.tensor(share, dtype=torch.float64), rgb(PAIR), rgb(WHITE)).tolist()
