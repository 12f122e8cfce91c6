"""Pictures of the attention that tokens received: along the sequence, or at the coordinates of tokens in a plane."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d

from ..masks.core import advises, require_below, require_int, round_places, tokens_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

# B batch, H query heads, M keys, Y rows and X columns of a grid

_MOST_COLUMNS = 1024  # of a strip; with more tokens, neighbours share a column
_MOST_HEADS = 8  # up to which heads are also drawn separately, next to their mean
_MOST_CELLS = 1 << 22  # of a grid; larger grids are drawn as points
_COLOURS = "viridis"
_NOTHING = (0.85, 0.85, 0.85, 1.0)
_LABEL = "attention received"
_MOST_TICKS = 9  # of a scale of attention
_NARROW = 1.01  # ratio of its ends below which values count as one
_LEAST, _MOST = 1e-30, 1e30  # range of drawn values; values outside are clamped
_DEEPEST = 1e6  # ratio of a curve's top to the least value shown


@advises()
def plot_attention_received(
    received: Float[Tensor, "B H M"],
    *,
    coordinates: Shaped[Tensor, "M 2"] | None = None,
    batch: int = 0,
    k_offset: int = 0,
    title: str | None = None,
) -> Figure:
    """Draw the result of `attention_received` for one batch entry, as a matplotlib figure: `figure.savefig(path)`.

    Without coordinates: one strip per head along the sequence, and curves, averaged over neighbours for many tokens.
    k_offset: position of the first key, as in the call of `attend`. With coordinates, the (x, y) of each token, such as
    the tiles of a slide: a map of the mean over heads, and one per head for at most 8 heads; x grows to the right, y
    downwards, and positions without a token stay white. Colours and curves have logarithmic scales; tokens that
    received nothing are grey, and gaps in the curves.

    Raises ValueError or TypeError for tensors of other shapes, and ImportError without matplotlib.

    >>> figure = fd.plot_attention_received(torch.rand(1, 4, 256))
    >>> figure.savefig('received.png')
    """
    heads = _heads(received, batch)
    require_int("k_offset", k_offset, minimum=0)
    if coordinates is None:
        return _over_the_sequence(heads, k_offset, title)
    if k_offset:
        raise ValueError(f"k_offset is for keys along a sequence, without coordinates; got {k_offset=} and both")
    places = _places(coordinates, heads.shape[1])
    return _over_the_plane(heads, places, title)


def _over_the_sequence(heads: Tensor, first: int, title: str | None) -> Figure:
    figure = _new_figure((11, 2.6 + 0.22 * min(len(heads), 24) + 2.4))
    tokens, columns = heads.shape[1], min(heads.shape[1], _MOST_COLUMNS)
    drawn = adaptive_avg_pool1d(heads[None], columns)[0]
    strip, curves = figure.subplots(2, 1, sharex=True, height_ratios=(0.6 + 0.22 * min(len(heads), 24), 2.2))
    extent = (first, first + tokens, len(heads) - 0.5, -0.5)
    shades = _shades(drawn)
    strip.imshow(_coloured(drawn, shades).numpy(), aspect="auto", interpolation="nearest", extent=extent)
    strip.set_ylabel("head")
    strip.set_yticks([head for head in round_places(range(len(heads)), 6) if head < len(heads)])
    _add_bar(figure, shades, [strip])
    middle = (first + (torch.arange(columns) + 0.5) * (tokens / columns)).numpy()
    if len(heads) <= _MOST_HEADS:
        for index, head in enumerate(drawn):
            curves.plot(middle, head.numpy(), linewidth=0.7, alpha=0.7, label=f"head {index}")
    curves.plot(middle, drawn.mean(0).numpy(), color="black", linewidth=1.4, label=f"mean of {len(heads)} heads")
    curves.set_xlabel("token" if columns == tokens else f"token, means over {tokens / columns:.1f} neighbours")
    curves.set_ylabel(_LABEL)
    curves.set_xlim(first, first + tokens)
    places = round_places(range(first, first + tokens), 8)
    curves.set_xticks(places, list(map(tokens_format(places), places)))
    _scale_curves(curves)
    curves.legend(loc="upper right", ncols=3, fontsize="small", frameon=False)
    return _titled(figure, title)


def _scale_curves(curves: Axes) -> None:
    """Set a logarithmic scale over values above 0; on a linear one, global tokens would flatten all others."""
    drawn = torch.cat([torch.as_tensor(line.get_ydata()) for line in curves.lines])
    some = drawn[drawn > 0].clamp(_LEAST, _MOST)
    if not len(some):
        return
    least, most = _apart(max(float(some.min()), float(some.max()) / _DEEPEST), float(some.max()))
    curves.set_yscale("log", nonpositive="mask")
    curves.set_ylim(least / 1.2, most * 1.2)
    curves.set_yticks(scale_ticks(least, most))
    curves.yaxis.set_major_formatter(plain_numbers())
    curves.minorticks_off()


def _over_the_plane(heads: Tensor, places: Tensor, title: str | None) -> Figure:
    panels = {f"mean of {len(heads)} heads" if len(heads) > 1 else "head 0": heads.mean(0)}
    if 1 < len(heads) <= _MOST_HEADS:
        panels |= {f"head {index}": head for index, head in enumerate(heads)}
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    grid = _grid(places)
    figure = _new_figure((4.2 * columns + 1.2, 4.0 * rows + 0.4))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    shades = _shades(heads if len(panels) > 1 else heads.mean(0))
    for each, (name, values) in zip(axes, panels.items(), strict=False):
        _draw_map(each, _coloured(values, shades), places, grid)
        each.set_title(name, fontsize="medium")
    for each in axes[len(panels) :]:
        each.set_axis_off()
    _add_bar(figure, shades, list(axes))
    return _titled(figure, title)


def _draw_map(axes: Axes, colours: Tensor, places: Tensor, grid: tuple[Tensor, Tensor] | None) -> None:
    axes.set_aspect("equal")
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(plain_numbers())
    if grid is None:
        axes.scatter(*places.T.numpy(), c=colours.numpy(), s=6)
        axes.invert_yaxis()
        return
    cells, step = grid
    size, least = cells.max(0).values + 1, places.min(0).values
    picture = torch.zeros(int(size[1]), int(size[0]), 4, dtype=colours.dtype)  # transparent
    picture[cells[:, 1], cells[:, 0]] = colours
    (left, top), (right, bottom) = (least - step / 2).tolist(), (least + step * (size - 0.5)).tolist()
    axes.imshow(picture.numpy(), interpolation="nearest", extent=(left, right, bottom, top))


def _grid(places: Tensor) -> tuple[Tensor, Tensor] | None:
    """(column and row of each token, grid steps along x and y) if coordinates form a grid; else None."""
    steps = []
    for along in places.T:
        gaps = along.unique().diff()
        steps.append(gaps.min() if len(gaps) else torch.ones((), dtype=along.dtype))
    step = torch.stack(steps)
    exact = (places - places.min(0).values) / step
    cells = exact.round()
    alike = len(cells.unique(dim=0)) < len(cells)
    if alike or (exact - cells).abs().max() > 1e-3 or (cells.max(0).values + 1).prod() > _MOST_CELLS:
        return None
    return cells.long(), step


def _shades(values: Tensor) -> ScalarMappable:
    """Colour map from the 1st to the 99th percentile of the values above 0."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    some = values[values > 0].clamp(_LEAST, _MOST)
    ends = some.quantile(torch.tensor([0.01, 0.99], dtype=some.dtype)).tolist() if len(some) else [1.0, 1.0]
    return ScalarMappable(LogNorm(*_apart(*ends), clip=True), _COLOURS)


def _apart(least: float, most: float) -> tuple[float, float]:
    """Ends of a scale; widened to a factor of 4 if values are nearly equal."""
    return (least, most) if most >= _NARROW * least else (least / 2, least * 2)


def _add_bar(figure: Figure, shades: ScalarMappable, axes: list[Axes]) -> None:
    ticks = scale_ticks(*shades.get_clim())
    bar = figure.colorbar(shades, ax=axes, label=_LABEL, shrink=0.9, ticks=ticks, format=plain_numbers())
    bar.minorticks_off()


def scale_ticks(least: float, most: float) -> list[float]:
    """Two to nine round numbers of a logarithmic scale: 1, 2, 5 of each decade; decades; or equal steps.

    `most` is at least 1.01 times `least`, which is above 0.
    """
    from matplotlib.ticker import MaxNLocator

    first, last = floor(log10(least)), ceil(log10(most))
    decades = range(first, last + 1, max(1, ceil((last - first) / (_MOST_TICKS - 1))))
    fine = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    for ticks in (fine, [10.0**decade for decade in decades], MaxNLocator(5).tick_values(least, most)):
        inside = [float(tick) for tick in ticks if least <= tick <= most]
        if 2 <= len(inside) <= _MOST_TICKS:
            break
    return inside


def plain_numbers() -> Formatter:
    """Formatter of ticks without an offset or a common power of ten."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.10g}")


def _coloured(values: Tensor, shades: ScalarMappable) -> Tensor:
    """RGBA colour of each value."""
    colours = torch.from_numpy(shades.to_rgba(values.clamp(min=torch.finfo(values.dtype).tiny).numpy()))
    colours[values == 0] = torch.tensor(_NOTHING, dtype=colours.dtype)
    return colours


def _heads(received: object, batch: int) -> Tensor:
    """Attention of one batch entry, (H, M), in float64 on the CPU."""
    if not isinstance(received, Tensor):
        raise TypeError(f"received must be a tensor from attention_received; got {type(received).__name__}")
    if received.dim() != 3 or 0 in received.shape:
        raise ValueError(f"received must have the 3 dims (batch, heads, keys); got {tuple(received.shape)}")
    require_below("batch", batch, len(received), "batch entries")
    heads = received[batch].detach().to("cpu", torch.float64)
    if not heads.isfinite().all() or heads.min() < 0:
        raise ValueError("received must hold finite numbers of at least 0, as attention_received gives them")
    return heads


def _places(coordinates: object, tokens: int) -> Tensor:
    """Coordinates, (M, 2), in float64 on the CPU."""
    if not isinstance(coordinates, Tensor):
        raise TypeError(f"coordinates must be a tensor; got {type(coordinates).__name__}")
    if coordinates.shape != (tokens, 2):
        raise ValueError(f"coordinates must be the (x, y) of each of {tokens} keys; got {tuple(coordinates.shape)}")
    places = coordinates.detach().to("cpu", torch.float64)
    if not places.isfinite().all():
        raise ValueError("coordinates must be finite")
    return places


def _new_figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plot_attention_received needs matplotlib: pip install "flexdilated[plot]"') from error
    return Figure(figsize=size, layout="constrained", dpi=140)


def _titled(figure: Figure, title: str | None) -> Figure:
    if title is not None:
        figure.suptitle(title)
    return figure
