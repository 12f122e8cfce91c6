"""The catalogue's pictures: every pattern over 64 tokens, pair by pair, and all of them on one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from flexdilated import masks
from flexdilated.masks import Pattern

from ._catalogue import ENTRIES, PICTURED, Entry
from ._catalogue_check import dense

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# N tokens
SIDE = 8  # tokens a block, in pictures
OVERVIEW = "overview.png"
_PANEL = 256  # pixels: a token is 4 x 4 of them
_FRAME, _DPI = "#999999", 100
_COLUMNS = 8


def draw_all(folder: Path, entries: Sequence[Entry] = ENTRIES) -> list[Path]:
    """Write a PNG for each entry, and the sheet; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {file_name(entry): picture(entry, shown_heads(entry)) for entry in entries} | {OVERVIEW: _sheet(entries)}
    for name, figure in figures.items():
        figure.savefig(folder / name, metadata={"Software": None})
    return [folder / name for name in figures]


def file_name(entry: Entry) -> str:
    """As `neighborhood_2-d.png`."""
    return entry.name.lower().replace(", ", "_").replace(" ", "_") + ".png"


def shown_heads(entry: Entry) -> tuple[int, ...]:
    """Head 0, and the first head that sees otherwise, if one does."""
    others = range(1, entry.num_heads)
    return (0, *[head for head in others if not torch.equal(_allowed(entry, head), _allowed(entry, 0))][:1])


def picture(entry: Entry, heads: tuple[int, ...]) -> Figure:
    """The pairs of these heads, and the state of their blocks; of a mixture the pairs of any branch."""
    given = {"block_size": SIDE, "color_by": "block", "size": _PANEL, "title": "", "legend": False}
    return masks.plot(entry.pictured(), PICTURED, num_heads=entry.num_heads, head=heads, **given)


def _allowed(entry: Entry, head: int) -> Bool[Tensor, "N N"]:
    branches: tuple[Pattern, ...] = entry.pictured().branches()
    return torch.stack([dense(branch, head, entry.num_heads, PICTURED) for branch in branches]).any(0)


def _sheet(entries: Sequence[Entry]) -> Figure:
    """A thumbnail for each entry, with its name: the image of its picture, of the last head that is shown."""
    from matplotlib.figure import Figure

    rows = -(-len(entries) // _COLUMNS)
    size, across, down = 1.28, 1.56, 1.66
    width, height = _COLUMNS * across, rows * down
    figure = Figure(figsize=(width, height), dpi=_DPI)
    for place, entry in enumerate(entries):
        row, column = divmod(place, _COLUMNS)
        corner = (column * across + (across - size) / 2, height - (row + 1) * down + 0.06)
        axes = figure.add_axes((corner[0] / width, corner[1] / height, size / width, size / height))
        (drawn,) = picture(entry, shown_heads(entry)[-1:]).axes[0].images
        cells = drawn.get_array()
        assert cells is not None
        axes.imshow(cells, interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(entry.name, fontsize=7.5, pad=3)
        axes.spines[:].set_color(_FRAME)
        axes.spines[:].set_linewidth(0.6)
    return figure
