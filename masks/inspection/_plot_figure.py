"""A picture as a matplotlib figure, laid out in whole pixels: a cell is as many of them everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from textwrap import wrap
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ._plot import BY_BLOCK, Picture
from ._plot_axes import draw_frames, draw_grid, draw_image, draw_ticks, label_width
from ._plot_colours import hues, paint, paint_blocks
from ._plot_legend import Legend, legends_of
from ._plot_panel import Panel, drawn_branches, panel_of
from ._plot_text import counts_text, panel_title, title_lines

_DPI = 100
_LEFT, _RIGHT, _GAP = 36, 24, 22  # beside the tick labels
_BELOW, _EDGE = 46, 8
_TITLE, _PANEL_TITLE, _LEGEND = 19, 18, 19  # pixels a line
_LETTER = 8.6  # pixels of a letter of the title, about
_COLUMNS = 4
_LEAST = 320  # pixels of a figure with texts


class SameBytes(Figure):
    """A figure that is saved with the same bytes each time: without a date, and with the same names within an SVG."""

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """As in matplotlib; `metadata` beside what keeps the time of writing out."""
        kind = str(kwargs.get("format") or getattr(fname, "suffix", "") or fname).lower()
        fixed = {"Date": None} if kind.endswith("svg") else {"CreationDate": None} if kind.endswith("pdf") else {}
        metadata = {**fixed, **(kwargs.pop("metadata", None) or {})}
        with rc_context({"svg.hashsalt": "flexdilated"}):
            super().savefig(fname, metadata=metadata, **kwargs)


@dataclass(frozen=True)
class Places:
    """Where panels and texts stand, in pixels from the top left."""

    columns: int
    rows: int
    labels: int
    panel: tuple[int, int]
    least: int
    heading: int = 0
    subheading: int = 0
    footer: int = 0

    @property
    def width(self) -> int:
        return self._panels + 2 * self._aside

    @property
    def _panels(self) -> int:
        return self.columns * self._across - _GAP + _RIGHT

    @property
    def _aside(self) -> int:
        """Room beside panels that are narrower than the texts."""
        return max(0, self.least - self._panels) // 2

    @property
    def _across(self) -> int:
        return self.panel[0] + _LEFT + self.labels + _GAP

    @property
    def height(self) -> int:
        return self.heading + self.rows * (self.subheading + self.panel[1] + _BELOW) + self.footer

    def corner(self, place: int) -> tuple[int, int]:
        row, column = divmod(place, self.columns)
        top = self.heading + row * (self.subheading + self.panel[1] + _BELOW) + self.subheading
        return self._aside + _LEFT + self.labels + column * self._across, top


def draw(picture: Picture) -> Figure:
    """Count and draw all panels."""
    panels = [panel_of(picture, head, order) for head in picture.heads for order in picture.orders]
    window = picture.window
    columns = _columns(picture, len(panels))
    places = Places(
        columns=columns,
        rows=ceil(len(panels) / columns),
        labels=ceil(label_width(window.queries)),
        panel=(window.keys.length, window.queries.length),
        least=_LEAST if picture.legend else 0,
    )
    title = title_lines(picture, letters=int(places.width / _LETTER))
    titles = [_panel_lines(picture, panel) for panel in panels]
    legends = legends_of(picture, panels, width=places.width) if picture.legend else []
    places = replace(
        places,
        heading=_EDGE + len(title) * _TITLE + (6 if title else 0),
        subheading=max(len(lines) for lines in titles) * _PANEL_TITLE + 8,
        footer=_EDGE // 2 + sum(legend.rows * _LEGEND + 6 for legend in legends),
    )
    figure = SameBytes(figsize=(places.width / _DPI, places.height / _DPI), dpi=_DPI)
    for place, (panel, lines) in enumerate(zip(panels, titles, strict=True)):
        axes = _add_axes(figure, places, place)
        _draw_panel(axes, picture, panel)
        if lines:
            axes.set_title("\n".join(lines), fontsize=9, pad=6, linespacing=1.4)
    _write_title(figure, places, title)
    below = places.footer
    for legend in legends:
        below -= legend.rows * _LEGEND + 6
        _add_legend(figure, legend, below / places.height)
    return figure


def _columns(picture: Picture, panels: int) -> int:
    """A row for each head where orders are compared; else rows of a few."""
    orders = len(picture.orders)
    return orders if orders > 1 and len(picture.heads) > 1 else min(panels, _COLUMNS)


def _panel_lines(picture: Picture, panel: Panel) -> list[str]:
    letters = max(20, int(picture.window.keys.length / 6.0))
    lines = [panel_title(picture, panel)] if panel_title(picture, panel) else []
    if picture.legend and panel.blocks is not None:
        lines += wrap(counts_text(panel.blocks), letters)
    return lines


def _add_axes(figure: Figure, places: Places, place: int) -> Axes:
    (left, top), (width, height) = places.corner(place), places.panel
    bottom = places.height - top - height
    box = (left / places.width, bottom / places.height, width / places.width, height / places.height)
    return figure.add_axes(box)


def _draw_panel(axes: Axes, picture: Picture, panel: Panel) -> None:
    window = picture.window
    if picture.color_by == BY_BLOCK:
        colours = paint_blocks(panel, window)
    else:
        colours = paint(panel, window, hues(len(drawn_branches(picture))))
    draw_image(axes, (colours * 255).round().to(torch.uint8), window)
    if panel.blocks is not None:
        draw_grid(axes, panel.blocks, window)
        if picture.color_by != BY_BLOCK:
            draw_frames(axes, panel.blocks, window)
    draw_ticks(axes, window, word="slot" if panel.rate > 1 else "position")


def _write_title(figure: Figure, places: Places, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        y = 1 - (_EDGE + (number + 0.5) * _TITLE) / places.height
        size, colour = (9, "#555555") if number and line == lines[-1] else (10.5, "#000000")
        figure.text(0.5, y, line, ha="center", va="center", fontsize=size, color=colour)


def _add_legend(figure: Figure, legend: Legend, bottom: float) -> None:
    figure.legend(
        handles=legend.handles(),
        loc="lower center",
        bbox_to_anchor=(0.5, bottom),
        ncols=legend.columns,
        frameon=False,
        fontsize=8.5,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
        handleheight=1.0,
        columnspacing=1.6,
        labelspacing=0.45,
    )
