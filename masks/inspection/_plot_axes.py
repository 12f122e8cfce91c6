"""One panel in matplotlib's terms: the image, the block grid, frames of full blocks, ticks in positions."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from torch import Tensor

from ..core._bound import FULL
from ..core._tokens_text import tokens_text
from ._plot_panel import Blocks
from ._plot_text import ticks
from ._plot_window import Axis, Window

FRAME = "#333333"
_GRID, _BORDER = "#d9d9d9", "#999999"
_LEAST_BLOCK = 12  # pixels, for lines between blocks
_LEAST_FULL = 4
_LETTER = 6.8  # pixels of a letter of tick labels, about


def draw_image(axes: Axes, colours: Tensor, window: Window) -> None:
    """The cells as an image over their slots; those at the borders are cut where the window ends."""
    q, k = window.queries, window.keys
    extent = (k.first, k.first + k.cell * k.cells, q.first + q.cell * q.cells, q.first)
    axes.imshow(colours.numpy(), extent=extent, aspect="auto", interpolation="none")
    axes.set_xlim(k.slots.start, k.slots.stop)
    axes.set_ylim(q.slots.stop, q.slots.start)
    axes.spines[:].set_color(_BORDER)
    axes.spines[:].set_linewidth(0.7)


def draw_grid(axes: Axes, blocks: Blocks, window: Window) -> None:
    """Lines between blocks, where there is room for them."""
    q, k = window.queries, window.keys
    lines = []
    for axis, side, is_row in ((q, blocks.sides[0], True), (k, blocks.sides[1], False)):
        if axis.pixels_of(side) < _LEAST_BLOCK:
            return
        for at in range(-(-(axis.slots.start + 1) // side) * side, axis.slots.stop, side):
            ends = (k.slots.start, k.slots.stop) if is_row else (q.slots.start, q.slots.stop)
            lines.append([(end, at) if is_row else (at, end) for end in ends])
    axes.add_collection(LineCollection(lines, colors=_GRID, linewidths=0.4, gid="grid"), autolim=False)


def draw_frames(axes: Axes, blocks: Blocks, window: Window) -> None:
    """A line around what is full, where there is room for it."""
    (height, width), (top, left) = blocks.sides, blocks.first
    if min(window.queries.pixels_of(height), window.keys.pixels_of(width)) < _LEAST_FULL:
        return
    full = (blocks.state == FULL).int()
    around = full.new_zeros(full.shape[0] + 2, full.shape[1] + 2)
    around[1:-1, 1:-1] = full
    lines = []
    for row, column in around[:, 1:-1].diff(dim=0).nonzero().tolist():
        y, x = (top + row) * height, (left + column) * width
        lines.append([(x, y), (x + width, y)])
    for row, column in around[1:-1].diff(dim=1).nonzero().tolist():
        y, x = (top + row) * height, (left + column) * width
        lines.append([(x, y), (x, y + height)])
    axes.add_collection(LineCollection(lines, colors=FRAME, linewidths=0.6, gid="full"), autolim=False)


def draw_ticks(axes: Axes, window: Window, *, word: str) -> None:
    """Positions, or slots, in units of 1024 where they are multiples of it."""
    wide = label_width(window.keys)
    for axis, room, set_ticks in ((window.keys, wide + 14, axes.set_xticks), (window.queries, 40, axes.set_yticks)):
        places = ticks(axis.slots, max(1, min(6, int(axis.length / room))))
        set_ticks(places, [tokens_text(place) for place in places], fontsize=8)
    axes.set_xlabel(f"key {word}", fontsize=8.5, labelpad=3)
    axes.set_ylabel(f"query {word}", fontsize=8.5, labelpad=3)
    axes.tick_params(length=3, pad=2, color=_BORDER)


def label_width(axis: Axis) -> float:
    """Pixels of the widest tick label, about."""
    return _LETTER * max(len(tokens_text(place)) for place in ticks(axis.slots, 4))
