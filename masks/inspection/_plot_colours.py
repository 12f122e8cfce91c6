"""The colours of a picture: a hue for each branch, darker where several allow a pair, paler where few are allowed.

The hues are those that people with any colour vision tell apart. Source: Okabe and Ito, Color Universal Design (2008),
without black, and without yellow, which is faint on white.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ..core._bound import EMPTY, FULL
from ._plot_panel import Blocks, Panel
from ._plot_window import Window

# R rows, C columns of them; B branches; last axis: red, green, blue from 0 to 1

WHITE, SAND = "#ffffff", "#f6ecd9"
PAIR, PAIR_OF_FULL = "#4292c6", "#08519c"
GREY = "#9a9a9a"
_HUES = ("#0072b2", "#cc79a7", "#009e73", "#e69f00", "#56b4e9", "#d55e00")
# From deep blue over violet to orange, ever lighter: for more branches than there are hues.
_SCALE = ("#1a1a7a", "#6a1a9a", "#b12a90", "#df6263", "#f59a3c")

_PALEST, _DECADES = 0.15, 5.0
_LEANING = 3.0  # times the weight of the next branch
_DARKER = 0.68  # what is left of the light where twice as many branches allow a pair


def hues(count: int) -> Float64[Tensor, "B 3"]:
    """A colour for each of `count` branches."""
    if count <= len(_HUES):
        return torch.stack([rgb(hue) for hue in _HUES[:count]])
    scale = torch.stack([rgb(colour) for colour in _SCALE])
    place = torch.linspace(0, len(scale) - 1, count, dtype=torch.float64)
    left = place.long().clamp(max=len(scale) - 2)
    return scale[left].lerp(scale[left + 1], (place - left)[:, None])


def rgb(colour: str) -> Float64[Tensor, " 3"]:
    """#rrggbb as numbers."""
    return torch.tensor([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=torch.float64) / 255


def paint(panel: Panel, window: Window, colours: Float64[Tensor, "B 3"]) -> Float64[Tensor, "R C 3"]:
    """The panel's cells, by branch."""
    return shade(panel.shares, colours, _ground(panel, window))


def paint_blocks(panel: Panel, window: Window) -> Float64[Tensor, "R C 3"]:
    """The panel's cells, by the block they are in: pairs of full blocks dark, those of partial ones lighter."""
    assert panel.blocks is not None
    full = torch.stack([rgb(PAIR), rgb(PAIR_OF_FULL)])[(_states(panel.blocks, window) == FULL).long()]
    strength = _strength(panel.shares[0])[..., None]
    return _ground(panel, window).lerp(full, strength)


def shade(
    shares: Float64[Tensor, "B ..."], colours: Float64[Tensor, "B 3"], ground: Float64[Tensor, "... 3"]
) -> Float64[Tensor, "... 3"]:
    """The branches' colours by their shares, pale for a small share of all pairs and dark where branches overlap.

    A mixture leans to the first of its branches: even ones would all be grey.
    """
    total = shares.sum(0)
    weights = shares.movedim(0, -1) * _LEANING ** -torch.arange(len(shares), dtype=torch.float64)
    mixed = (weights @ colours**2) / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    darker = _DARKER ** total.clamp(min=1).log2()
    return ground.lerp(mixed.sqrt() * darker[..., None], _strength(total)[..., None])


def _strength(share: Tensor) -> Tensor:
    """0 without pairs and 1 with all of them; between, equal steps for equal ratios."""
    some = (1 + share.clamp(min=1e-12, max=1).log10() / _DECADES).clamp(min=_PALEST)
    return torch.where(share > 0, some, 0.0)


def _ground(panel: Panel, window: Window) -> Float64[Tensor, "R C 3"]:
    """White, and sand in computed blocks."""
    if panel.blocks is None:
        return torch.ones(*panel.shares.shape[1:], 3, dtype=torch.float64)
    return torch.stack([rgb(WHITE), rgb(SAND)])[(_states(panel.blocks, window) != EMPTY).long()]


def _states(blocks: Blocks, window: Window) -> Int64[Tensor, "R C"]:
    """The state of the block that each cell lies in."""
    places = []
    for axis, side, first in zip((window.queries, window.keys), blocks.sides, blocks.first, strict=True):
        places.append((axis.first + axis.cell * torch.arange(axis.cells)) // side - first)
    return blocks.state[places[0]][:, places[1]]
