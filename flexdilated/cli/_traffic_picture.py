"""Who gets what from whom, as a picture: bytes between ranks, one heat map a way, on one scale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int64
from torch import Tensor

from ._simulation import in_groups
from ._sizes import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# W ranks, R groups of them

_NOTHING = "#ffffff"
_MOST_CELLS = 256  # a side; more ranks are drawn in groups, none of which a picture's resolution then leaves out
_MOST_LABELS = 8  # along an axis
_MOST_WRITTEN = 8  # cells a side that have room for a number
_PALEST = 8  # the scale begins so much below the least number, which is then no white
_DARK = 0.55  # of the scale, from where on a number is written in white


def save_traffic_picture(path: Path, received: Mapping[str, Int64[Tensor, "W W"]], *, title: str) -> None:
    """Draw bytes that each rank (row) gets from each other (column), a heat map for each name, on one scale. PNG.

    The scale is logarithmic: an exchange and an all-gather differ by orders of magnitude. White is nothing.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    groups = {name: in_groups(each, _MOST_CELLS) for name, each in received.items()}
    some = torch.cat([sums[sums > 0] for _, sums in groups.values()])
    least, most = (int(some.min()), int(some.max())) if len(some) else (1, 1)
    norm = LogNorm(least / _PALEST, most)
    figure = Figure(figsize=(1.2 + 6.2 * len(received), 7.0), layout="constrained", dpi=140)
    axes = figure.subplots(1, len(received), squeeze=False)[0]
    for place, (name, (each, sums)) in zip(axes, groups.items(), strict=True):
        _draw(place, each, sums, norm, f"{name}\na rank receives {_amount(received[name].sum(1))}")
    legend = figure.colorbar(ScalarMappable(norm, _colours()), ax=list(axes), shrink=0.8, pad=0.02)
    ticks = _ticks(max(1, least // _PALEST), most)
    legend.set_ticks(ticks, labels=[bytes_text(size) for size in ticks])
    legend.minorticks_off()
    one = "one rank" if max(each for each, _ in groups.values()) == 1 else "one group of ranks"
    legend.set_label(f"from {one} to another; white: nothing")
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, format="png")


def _ticks(least: int, most: int) -> list[int]:
    """Powers of 4, or of 2 where fewer than two of those are within a scale of bytes; its ends where these are too."""
    for powers in ([4**power for power in range(32)], [2**power for power in range(64)], [least, most]):
        inside = [size for size in powers if least <= size <= most]
        if len(inside) > 1:
            break
    return inside


def _draw(axes: Axes, each: int, received: Int64[Tensor, "R R"], norm: Any, title: str) -> None:
    """One heat map, of groups of `each` ranks."""
    number = len(received)
    shown = torch.where(received > 0, received.double(), torch.nan)
    axes.imshow(shown.tolist(), cmap=_colours(), norm=norm, interpolation="nearest")
    axes.set_title(title, fontsize=12)
    groups = "" if each == 1 else f", in groups of {each}"
    axes.set_xlabel(f"from rank{groups}")
    axes.set_ylabel(f"to rank{groups}")
    ticks = range(0, number, -(-number // _MOST_LABELS))
    axes.set_xticks(list(ticks), [str(tick * each) for tick in ticks])
    axes.set_yticks(list(ticks), [str(tick * each) for tick in ticks])
    axes.spines[:].set_color("#999999")
    axes.tick_params(color="#999999")
    if number <= _MOST_WRITTEN:
        for row, column in (received > 0).nonzero().tolist():
            size = int(received[row, column])
            colour = "white" if norm(size) > _DARK else "#333333"
            axes.text(column, row, bytes_text(size), ha="center", va="center", fontsize=7, color=colour)


def _amount(totals: Int64[Tensor, " W"]) -> str:
    most, mean = bytes_text(float(totals.max())), bytes_text(float(totals.double().mean()))
    return most if most == mean else f"at most {most}, {mean} on average"


def _colours() -> Any:
    from matplotlib import colormaps

    return colormaps["Blues"].with_extremes(bad=_NOTHING)
