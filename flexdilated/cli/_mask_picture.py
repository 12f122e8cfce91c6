"""The mask as a picture: one head's pairs in natural and in residue order, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from .. import masks
from ..masks import Mixture, Pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Q query slots, K key slots
_UNTOUCHED, _WASTED = "#ffffff", "#f6ecd9"
_BY_MULTIPLICITY = ("#9ecae1", "#4292c6", "#08519c", "#08204a")


def save_mask_picture(
    path: Path, pattern: Mixture | Pattern, *, num_tokens: int, num_heads: int, side: int, title: str
) -> None:
    """Draw head 0 of the pattern at `num_tokens`, a multiple of `side`, cut into blocks of that side. PNG.

    White blocks are never computed. In a computed block a pair is blue, darker the more branches allow it;
    a cell that no branch allows, computed for nothing, is sand.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.6), layout="constrained", dpi=140)
    left, right = figure.subplots(1, 2)
    counts = _multiplicity(pattern, num_tokens, num_heads)
    positions = masks.layout(pattern, num_tokens).positions()
    _draw(left, counts, side, title="Natural order", axis="position")
    _draw(right, counts[positions][:, positions], side, title="Residue order", axis="slot")
    figure.suptitle(f"{title}\nhead 0 of {num_heads}, {num_tokens} tokens, blocks of {side} x {side}", fontsize=13)
    figure.legend(handles=_legend(int(counts.max())), loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, format="png")


def touched_blocks(counts: Int64[Tensor, "Q K"], side: int) -> Bool[Tensor, "Q/side K/side"]:
    """Blocks that hold at least one pair."""
    rows, columns = (size // side for size in counts.shape)
    return (counts > 0).view(rows, side, columns, side).any(3).any(1)


def _multiplicity(pattern: Mixture | Pattern, num_tokens: int, num_heads: int) -> Int64[Tensor, "Q K"]:
    """How many branches allow each pair of head 0."""
    zero, position = torch.zeros((), dtype=torch.int64), torch.arange(num_tokens)
    total = torch.zeros(num_tokens, num_tokens, dtype=torch.int64)
    for branch in pattern.branches():
        bound = branch.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
        total += bound.mask_mod()(zero, zero, position[:, None], position[None, :])
    return total


def _draw(axes: Axes, counts: Int64[Tensor, "Q K"], side: int, *, title: str, axis: str) -> None:
    from matplotlib.colors import ListedColormap

    touched = touched_blocks(counts, side)
    computed = touched.repeat_interleave(side, 0).repeat_interleave(side, 1)
    colours = ListedColormap((_UNTOUCHED, _WASTED, *_shades(int(counts.max()))))
    image = torch.where(counts > 0, counts + 1, computed.long())
    axes.imshow(image.tolist(), cmap=colours, vmin=-0.5, vmax=colours.N - 0.5, interpolation="nearest")
    useful = int((counts > 0).sum()) / max(1, int(computed.sum()))
    blocks = f"{int(touched.sum()):,} of {touched.numel():,} blocks computed"
    axes.set_title(f"{title}\n{blocks}, {useful:.0%} of their cells useful", fontsize=12)
    axes.set_xlabel(f"key {axis}")
    axes.set_ylabel(f"query {axis}")
    ticks = range(0, len(counts) + 1, max(1, len(counts) // 4))
    axes.set_xticks([tick - 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axes.set_yticks([tick - 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axes.spines[:].set_color("#999999")
    axes.tick_params(color="#999999")


def _shades(most: int) -> tuple[str, ...]:
    """A colour for each multiplicity from 1 to `most`; the darkest serves all beyond its own."""
    return tuple(_BY_MULTIPLICITY[min(count, len(_BY_MULTIPLICITY)) - 1] for count in range(1, most + 1))


def _legend(most: int) -> list:
    from matplotlib.patches import Patch

    entries = [(_UNTOUCHED, "never computed"), (_WASTED, "computed, no pair")]
    entries += [
        (shade, f"pair in {count} branch{'es' if count > 1 else ''}") for count, shade in enumerate(_shades(most), 1)
    ]
    return [Patch(facecolor=colour, edgecolor="#999999", label=label) for colour, label in entries]
