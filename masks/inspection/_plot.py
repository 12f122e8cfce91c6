"""plot: draw a pattern as a matplotlib figure, for any window and number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core import (
    HEADS,
    LENGTH,
    Expression,
    advises,
    outside_torch_modes,
    renamed,
    require_below,
    require_bool,
    require_choice,
    require_expression,
    require_int,
)
from ..planning import block_sides
from ._picture import Picture, window_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ORDERS = ("natural", "residue")
_MOST_PANELS, _MOST_PIXELS = 32, 2048


@outside_torch_modes
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
    size: int = 512,
    title: str | None = None,
    legend: bool = True,
) -> Figure:
    """Draw the allowed pairs: queries downwards, keys to the right, one panel for each head and order.

    Without blocks, a pair that several branches allow is darker. A window of at most `size` tokens is drawn pair by
    pair; in a longer window a cell is several pairs, and its color shows the fraction allowed, on a logarithmic scale.

    num_tokens, num_keys: numbers of queries and keys, equal if num_keys is None.
    head: index of the head to draw, below num_heads, or several.
    order: "natural", "residue" (the residue-major order of `masks.layout`) or both.
    queries, keys: the window, in positions for "natural" and in slots of `masks.layout` for "residue"; None for all.
    block_size: tokens of a block, one number or (queries, keys); None for no blocks. With blocks, allowed pairs are
        dark in full blocks and light in partial ones, masked pairs in computed blocks are beige, and blocks that are
        not computed are white.
    size: approximate pixels along the longer side of a panel.
    legend: draw a legend, with block counts.
    title: by default the expression; "" for none.
    batch: index of the batch entry, if run-time tensors differ by entry.

    Returns a matplotlib Figure, made without pyplot; `figure.savefig(path)` writes PNG, SVG or PDF, without a date.
    Raises ImportError without matplotlib, ValueError or TypeError for invalid arguments.

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
        heads=tuple(require_below("head", each, num_heads, "heads") for each in _as_tuple("head", head)),
        orders=tuple(require_choice("order", each, _ORDERS) for each in _as_tuple("order", order)),
        batch=batch,
        window=window_of(num_tokens, num_keys, queries, keys, block=block, size=size),
        block=block,
        title=title,
        legend=require_bool("legend", legend),
    )
    panels = len(picture.heads) * len(picture.orders)
    if panels > _MOST_PANELS:
        raise ValueError(f"a picture has at most {_MOST_PANELS} panels, one for each head and order; got {panels}")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be text or None; got {type(title).__name__}")
    try:
        from ._plot_figure import draw
    except ImportError as error:
        raise ImportError('masks.plot draws with matplotlib: pip install "flexdilated[plot]"') from error
    return draw(picture)


def _as_tuple(name: str, value: object) -> tuple:
    """Return a sequence of values as a tuple, and a single value or a string as a tuple of one entry.

    Raises ValueError for an empty sequence and for duplicates. name: the argument, for errors.
    """
    several = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not several or len(set(several)) < len(several):
        raise ValueError(f"{name} must be one value, or several different ones; got {name}={value!r}")
    return several
