"""plot: draw a pattern as a picture; any window, any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core import (
    HEADS,
    LENGTH,
    Expression,
    advises,
    plans,
    renamed,
    require_below,
    require_bool,
    require_choice,
    require_expression,
    require_int,
)
from ..planning import block_sides
from ._picture import BY_BLOCK, BY_BRANCH, Picture, window_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = ("natural", "residue")
_MOST_PANELS, _MOST_PIXELS = 32, 2048


@plans
@advises(
    keywords=renamed(num_tokens=LENGTH, num_heads=HEADS),
    how="write masks.plot(pattern, num_tokens).savefig('pattern.png')",
)
def plot(
    pattern: Expression,
    num_tokens: int,
    *,
    num_keys: int | None = None,
    num_heads: int = 1,
    head: int | Sequence[int] = 0,
    batch: int = 0,
    queries: range | None = None,
    keys: range | None = None,
    order: str | Sequence[str] = "natural",
    block_size: int | tuple[int, int] | None = None,
    color_by: str = BY_BRANCH,
    size: int = 512,
    title: str | None = None,
    legend: bool = True,
) -> Figure:
    """Draw the allowed pairs: queries downwards, keys to the right, one panel for each head and order.

    Each branch has a hue; a pair of several branches is darker, and closest in hue to the first of them. A window of at
    most `size` tokens is drawn pair by pair. In a longer window a cell covers several pairs, and its colour strength is
    their allowed share on a logarithmic scale.

    queries, keys: the window, in slots of the order: positions in "natural" order, slots of `masks.layout` in "residue"
    order. block_size: one side or (query side, key side); masked pairs inside computed blocks are then beige, full
    blocks are framed, and white is never computed. color_by: "branch", or "block": pairs of full blocks dark, pairs of
    partial blocks light, for all branches. size: approximate pixels along the longer side of a panel. legend: draw a
    legend, with block counts. title: by default the expression; "" for none. batch: the batch entry, for run-time
    tensors with a row for each.

    Returns a matplotlib Figure, made without pyplot; `figure.savefig(path)` writes PNG, SVG or PDF, reproducibly byte
    by byte. Raises ImportError without matplotlib, ValueError or TypeError for invalid arguments.

    >>> figure = masks.plot(masks.longnet((64, 256), (1, 4)), 256, num_heads=4)
    >>> figure.savefig('pattern.png')
    """
    asked = require_expression(pattern)
    num_keys = num_tokens if num_keys is None else num_keys
    bound = asked.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_keys)
    require_below("batch", batch, bound.batch, "batch entries")
    require_int("size", size, minimum=16, maximum=_MOST_PIXELS)
    block = None if block_size is None else block_sides(block_size)
    picture = Picture(
        pattern=asked,
        num_tokens=num_tokens,
        num_keys=num_keys,
        num_heads=num_heads,
        heads=tuple(require_below("head", each, num_heads, "heads") for each in _several("head", head)),
        orders=tuple(require_choice("order", each, ORDERS) for each in _several("order", order)),
        batch=batch,
        window=window_of(num_tokens, num_keys, queries, keys, block=block, size=size),
        block=block,
        color_by=require_choice("color_by", color_by, (BY_BRANCH, BY_BLOCK)),
        title=title,
        legend=require_bool("legend", legend),
    )
    _check(picture)
    try:
        from ._plot_figure import draw
    except ImportError as error:
        raise ImportError('masks.plot draws with matplotlib: pip install "flexdilated[plot]"') from error
    return draw(picture)


def _several(name: str, value: object) -> tuple:
    """One value, or a sequence of distinct values, as a tuple."""
    several = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not several or len(set(several)) < len(several):
        raise ValueError(f"{name} must be one value, or several that differ; got {name}={value!r}")
    return several


def _check(picture: Picture) -> None:
    panels = len(picture.heads) * len(picture.orders)
    if panels > _MOST_PANELS:
        raise ValueError(f"a picture has at most {_MOST_PANELS} panels, one for each head and order; got {panels}")
    if picture.color_by == BY_BLOCK and picture.block is None:
        raise ValueError('color_by="block" needs block_size; got block_size=None')
    if picture.title is not None and not isinstance(picture.title, str):
        raise TypeError(f"title must be text or None; got {type(picture.title).__name__}")
