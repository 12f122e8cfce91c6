"""The catalogue's pictures: every pattern over 64 tokens, pair by pair, and all of them on one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from flexdilated.masks import Pattern

from ._catalogue import ENTRIES, PICTURED, Entry
from ._catalogue_check import dense

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# N tokens
SIDE = 8  # tokens a block, in pictures
OVERVIEW = "overview.png"
_COLOURS = ("#ffffff", "#f6ecd9", "#4292c6", "#08519c")  # no pair of the block, of the block but no pair, pairs
_GRID, _FRAME = "#d9d9d9", "#999999"
_DPI, _PANEL = 100, 2.56  # a token is 4 x 4 pixels
_COLUMNS = 8


def draw_all(folder: Path, entries: Sequence[Entry] = ENTRIES) -> list[Path]:
    """Write a PNG for each entry, and the sheet; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {file_name(entry): _picture(entry) for entry in entries} | {OVERVIEW: _sheet(entries)}
    for name, figure in figures.items():
        figure.savefig(folder / name, format="png", dpi=_DPI, metadata={"Software": None})
    return [folder / name for name in figures]


def file_name(entry: Entry) -> str:
    """As `neighborhood_2-d.png`."""
    return entry.name.lower().replace(", ", "_").replace(" ", "_") + ".png"


def panels(entry: Entry) -> dict[int, Bool[Tensor, "N N"]]:
    """Head 0, and the first head that sees otherwise, if one does; of a mixture the pairs of any branch."""
    heads = {head: _allowed(entry, head) for head in range(entry.num_heads)}
    others = [head for head, allowed in heads.items() if not torch.equal(allowed, heads[0])]
    return {head: heads[head] for head in (0, *others[:1])}


def shades(allowed: Bool[Tensor, "N N"]) -> Tensor:
    """0 in blocks without pairs, else 1; 2 for the pairs of partial blocks, and 3 for those of full ones."""
    tiles = allowed.unflatten(0, (-1, SIDE)).unflatten(2, (-1, SIDE))
    some, whole = tiles.any(3).any(1).long(), tiles.all(3).all(1).long()
    some, whole = (each.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1) for each in (some, whole))
    return torch.where(allowed, 2 + whole, some)


def _allowed(entry: Entry, head: int) -> Bool[Tensor, "N N"]:
    branches: tuple[Pattern, ...] = entry.pictured().branches()
    return torch.stack([dense(branch, head, entry.num_heads, PICTURED) for branch in branches]).any(0)


def _picture(entry: Entry) -> Figure:
    from matplotlib.figure import Figure

    drawn = panels(entry)
    left, top, gap, bottom = 0.34, 0.26 if len(drawn) > 1 else 0.08, 0.3, 0.26
    width, height = left + len(drawn) * (_PANEL + gap), top + _PANEL + bottom
    figure = Figure(figsize=(width, height))
    for place, (head, allowed) in enumerate(drawn.items()):
        corner = left + place * (_PANEL + gap)
        axes = figure.add_axes((corner / width, bottom / height, _PANEL / width, _PANEL / height))
        _draw(axes, allowed, grid=0.5)
        ticks = range(0, PICTURED + 1, 2 * SIDE)
        axes.set_xticks([tick - 0.5 for tick in ticks], [str(tick) for tick in ticks], fontsize=7)
        axes.set_yticks([tick - 0.5 for tick in ticks], [str(tick) if not place else "" for tick in ticks], fontsize=7)
        axes.tick_params(length=2, pad=2, color=_FRAME)
        if len(drawn) > 1:
            axes.set_title(f"head {head}", fontsize=8, pad=4)
    return figure


def _sheet(entries: Sequence[Entry]) -> Figure:
    """A thumbnail for each entry, with its name."""
    from matplotlib.figure import Figure

    rows = -(-len(entries) // _COLUMNS)
    size, across, down = 1.28, 1.56, 1.66
    width, height = _COLUMNS * across, rows * down
    figure = Figure(figsize=(width, height))
    for place, entry in enumerate(entries):
        row, column = divmod(place, _COLUMNS)
        corner = (column * across + (across - size) / 2, height - (row + 1) * down + 0.06)
        axes = figure.add_axes((corner[0] / width, corner[1] / height, size / width, size / height))
        *_, allowed = panels(entry).values()
        _draw(axes, allowed, grid=0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(entry.name, fontsize=7.5, pad=3)
    return figure


def _draw(axes: Axes, allowed: Bool[Tensor, "N N"], *, grid: float) -> None:
    from matplotlib.colors import ListedColormap

    axes.imshow(shades(allowed).tolist(), cmap=ListedColormap(_COLOURS), vmin=-0.5, vmax=3.5, interpolation="nearest")
    if grid:
        for line in range(SIDE, PICTURED, SIDE):
            axes.axhline(line - 0.5, color=_GRID, linewidth=grid)
            axes.axvline(line - 0.5, color=_GRID, linewidth=grid)
    axes.spines[:].set_color(_FRAME)
    axes.spines[:].set_linewidth(0.6)
