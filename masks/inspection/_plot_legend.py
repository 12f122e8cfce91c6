"""The legend: what each colour of a picture means. Branches come first, in rows of their own: their names are long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from matplotlib.patches import Patch

from ..core._bound import FULL
from ._plot import BY_BLOCK, Picture
from ._plot_axes import FRAME
from ._plot_colours import GREY, PAIR, PAIR_OF_FULL, SAND, WHITE, hues, rgb, shade
from ._plot_panel import Panel, drawn_branches

_LETTER, _SWATCH = 6.6, 42  # pixels
_MOST_NAMED = 12
_SHARES = ((0.001, "1 pair in 1,000"), (0.03, "1 in 30"), (1.0, "every pair"))

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Entry:
    """A label, the colour it explains, and whether it is a frame."""

    label: str
    colour: str | Colour
    frame: str = "#999999"


@dataclass(frozen=True)
class Legend:
    """Entries in so many columns."""

    entries: tuple[Entry, ...]
    columns: int

    @property
    def rows(self) -> int:
        return ceil(len(self.entries) / self.columns)

    def handles(self) -> list[Patch]:
        return [
            Patch(facecolor=entry.colour, edgecolor=entry.frame, linewidth=0.6, label=entry.label)
            for entry in self.entries
        ]


def legends_of(picture: Picture, panels: Sequence[Panel], *, width: int) -> list[Legend]:
    """Branches by their expressions; then how they overlap, how pale few pairs are, and the blocks."""
    by_block = picture.color_by == BY_BLOCK
    branches = [] if by_block else _branches(picture, letters=int((width - _SWATCH) / _LETTER))
    others = [] if by_block else _multiplicity(panels)
    if max(picture.window.queries.cell, picture.window.keys.cell) > 1:
        base = rgb(PAIR) if by_block else rgb(GREY)
        others += [Entry(label, _shaded(share, base)) for share, label in _SHARES]
    if picture.block is not None:
        others += _blocks(panels, by_block=by_block)
    parts = [branches, others] if len(branches) > 1 else [branches + others]
    return [Legend(tuple(entries), _columns(entries, width)) for entries in parts if entries]


def _columns(entries: Sequence[Entry], width: int) -> int:
    """As many as fit, and no more than fill the last one about as well."""
    longest = max(len(entry.label) for entry in entries)
    fitting = int(max(1, min(len(entries), width // (_SWATCH + _LETTER * longest))))
    return ceil(len(entries) / ceil(len(entries) / fitting))


def _branches(picture: Picture, *, letters: int) -> list[Entry]:
    drawn = drawn_branches(picture)
    colours = [_tuple(hue) for hue in hues(len(drawn))]
    if len(drawn) == 1:
        times = next(iter(drawn.values()))
        return [Entry("allowed pair" if times == 1 else f"pair, allowed {times} times", colours[0])]
    entries = []
    for (branch, times), colour in zip(drawn.items(), colours, strict=True):
        text = repr(branch) if times == 1 else f"{times} × {branch!r}"
        entries.append(Entry(text if len(text) <= letters else f"{text[: letters - 2]} …", colour))
    if len(entries) > _MOST_NAMED:
        entries[_MOST_NAMED - 1 : -1] = [Entry(f"{len(entries) - _MOST_NAMED} between", WHITE, WHITE)]
    return entries


def _multiplicity(panels: Sequence[Panel]) -> list[Entry]:
    """The same grey for one branch, two, and so on: what several allow is darker."""
    most = max(panel.most for panel in panels)
    if most < 2 or len(panels[0].shares) == 1:
        return []
    counts = range(1, most + 1) if most <= 3 else (1, 2, most)
    return [
        Entry(f"in {count} branch{'es' if count > 1 else ''}", _shaded(float(count), rgb(GREY))) for count in counts
    ]


def _blocks(panels: Sequence[Panel], *, by_block: bool) -> list[Entry]:
    if by_block:
        pairs = [Entry("pair of a full block", PAIR_OF_FULL), Entry("pair of a partial block", PAIR)]
    else:
        full = any(bool((panel.blocks.state == FULL).any()) for panel in panels if panel.blocks is not None)
        pairs = [Entry("full blocks", WHITE, FRAME)] if full else []
    return [*pairs, Entry("computed, no pair", SAND), Entry("never computed", WHITE)]


def _shaded(share: float, base: torch.Tensor) -> Colour:
    return _tuple(shade(torch.tensor([share], dtype=torch.float64), base[None], torch.ones(3, dtype=torch.float64)))


def _tuple(colour: torch.Tensor) -> Colour:
    red, green, blue = colour.tolist()
    return red, green, blue
