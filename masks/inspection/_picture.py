"""Contents of a picture of a pattern, independent of matplotlib: window, cells and blocks, colors, labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from textwrap import shorten, wrap
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ..core import EMPTY, FULL, PARTIAL, Expression, round_places, tokens_format, tokens_text
from ..planning import layout
from ._cells import Cells, count_cells, window_slots

# R rows, C columns of cells; U, V rows and columns of blocks; a last axis of 3: red, green, blue

WHITE, BEIGE = "#ffffff", "#f6ecd9"
PAIR, PAIR_OF_FULL = "#4292c6", "#08519c"
_PALEST, _DECADES = 0.15, 5.0
_DARKER = 0.68  # brightness factor for each doubling of the branches that allow a pair
_MOST_ASPECT = 4  # aspect ratio above which each side of a window has its own scale
_TITLE_LINES = 3
_MOST_TICKS, _TICK_ROOM, _TICK_GAP = 6, 40, 14  # ticks on an axis; pixels for a query tick, and between key labels


@dataclass(frozen=True)
class WindowAxis:
    """Query or key axis of a window: it shows `slots`, in cells of `cell` slots; each cell is `pixels` pixels long.

    Cells begin at multiples of `cell`, so the first and last cell may extend beyond the window.
    """

    slots: range
    cell: int
    pixels: int

    @property
    def first(self) -> int:
        """First slot of the first cell."""
        return self.slots.start // self.cell * self.cell

    @property
    def num_cells(self) -> int:
        return -((self.first - self.slots.stop) // self.cell)

    @property
    def length(self) -> int:
        """Length of the window in pixels."""
        return max(1, round(self.pixels_of(len(self.slots))))

    def pixels_of(self, slots: int) -> float:
        """Return the length in pixels of this number of slots."""
        return slots / self.cell * self.pixels


class Window(NamedTuple):
    """The window of a picture: query slots downwards, key slots to the right."""

    queries: WindowAxis
    keys: WindowAxis


@dataclass(frozen=True)
class Picture:
    """Contents and options of a picture: one panel for each head and order of tokens, all of the same window.

    orders: "natural", "residue" or both.
    block: (queries, keys) of blocks to draw, or None.
    title: None for the pattern's expression.
    """

    pattern: Expression
    num_tokens: int
    num_keys: int
    num_heads: int
    heads: tuple[int, ...]
    orders: tuple[str, ...]
    batch: int
    window: Window
    block: tuple[int, int] | None
    title: str | None
    legend: bool


def window_of(
    num_queries: int,
    num_keys: int,
    queries: range | None,
    keys: range | None,
    *,
    block: tuple[int, int] | None,
    size: int,
) -> Window:
    """Return the window to draw, scaled so that its longer axis has about `size` pixels.

    Both axes have one scale; if one has over 4 times as many slots as the other, each has about `size` pixels instead.

    queries, keys: slots to draw, None for all.
    block: (queries, keys) of the blocks to draw, whose sides are multiples of the side of a cell; None for no blocks.

    Raises ValueError for slots out of range, and for blocks that are too small: each of their sides, and on axes of one
    scale the greatest common divisor of both sides, must be at least one pixel long.
    """
    q, k = window_slots("queries", queries, num_queries), window_slots("keys", keys, num_keys)
    sides = (0, 0) if block is None else block
    longer = max(len(q), len(k))
    if longer > _MOST_ASPECT * min(len(q), len(k)):
        return Window(*(_axis(slots, len(slots), side, size) for slots, side in zip((q, k), sides, strict=True)))
    return Window(*(_axis(slots, longer, gcd(*sides), size) for slots in (q, k)))


def _axis(slots: range, scale: int, block: int, size: int) -> WindowAxis:
    least = -(-scale // size)
    fitting = (each for each in range(least, block + 1) if block % each == 0)
    cell = next(fitting, None) if block else 1 << (least - 1).bit_length()
    if cell is None:
        raise ValueError(
            f"to show {scale} tokens in {size} pixels, the block sides must have a common divisor of at least {least}; "
            f"got {block}: choose a smaller window, larger blocks or a larger size"
        )
    return WindowAxis(slots, cell, max(1, round(size * cell / scale)))


@dataclass(frozen=True)
class WindowBlocks:
    """The blocks that overlap a window, with their counts of allowed pairs.

    cells: counts, one cell for each block.
    sides: (queries, keys) of a block.
    state: EMPTY, PARTIAL or FULL for each block; EMPTY also if a count that is not exact is estimated as 0.

    A block cut short by the end of the sequence is never FULL, nor is one without an exact count.
    """

    cells: Cells
    sides: tuple[int, int]

    @cached_property
    def state(self) -> Int64[Tensor, "U V"]:
        state = torch.full_like(self.cells.area, PARTIAL)
        state[self.cells.likely == 0] = EMPTY
        state[self.cells.low == self.sides[0] * self.sides[1]] = FULL
        return state

    def state_of_cells(self, window: Window) -> Int64[Tensor, "R C"]:
        """Return the state (EMPTY, PARTIAL or FULL) of the block that contains each cell of the window."""
        rows, columns = (
            (axis.first + axis.cell * torch.arange(axis.num_cells)) // side - slots.start // side
            for axis, side, slots in zip(window, self.sides, self.cells.window, strict=True)
        )
        return self.state[rows][:, columns]

    def __str__(self) -> str:
        """Return the numbers of computed and full blocks, and the share of computed pairs that are allowed, as text.

        Without computed blocks, the text ends after their number.
        """
        computed, about = self.state != EMPTY, "" if bool(self.cells.exact.all()) else "about "
        of = f"{about}{int(computed.sum()):,} of {computed.numel():,} blocks computed"
        if not bool(computed.any()):
            return of
        useful = float(self.cells.likely.sum()) / int(self.cells.area[computed].sum())
        share = f"{useful:.0%}" if useful >= 0.01 else f"{100 * useful:.2g}%"
        return f"{of}, {int((self.state == FULL).sum()):,} full; {about}{share} of their pairs allowed"


@dataclass(frozen=True)
class Panel:
    """Contents of the picture of one head in one order of tokens.

    rate: rate of the residue-major order, 1 in natural order.
    blocks: None if no blocks are drawn.
    share: for each cell the mean over its pairs of the number of branches that allow the pair; with `blocks` the
        fraction of pairs that any branch allows. Estimated where the count is not exact.
    """

    head: int
    order: str
    rate: int
    share: Float64[Tensor, "R C"]
    blocks: WindowBlocks | None


def panel_of(picture: Picture, head: int, order: str) -> Panel:
    """Return the panel of one head in one order, "natural" or "residue".

    Raises ValueError if the pattern does not fit the picture's numbers of heads and tokens, or if its mask_mod is
    undefined for a position in the window or in a block that overlaps the window.
    """
    pattern = picture.pattern if picture.block is None else picture.pattern.union
    residue = layout(picture.pattern, picture.num_tokens)
    rate = residue.rate if order == "residue" else 1
    sizes = {"num_tokens": picture.num_tokens, "num_keys": picture.num_keys, "num_heads": picture.num_heads}
    where = {**sizes, "head": head, "batch": picture.batch, "order": residue if rate > 1 else None}
    q, k = picture.window
    cells = count_cells(pattern, **where, queries=q.slots, keys=k.slots, sides=(q.cell, k.cell))
    blocks = None
    if picture.block is not None:
        limits = picture.num_tokens, picture.num_keys
        rows, columns = (
            range(axis.slots.start // side * side, min(limit, -(-axis.slots.stop // side) * side))
            for axis, side, limit in zip((q, k), picture.block, limits, strict=True)
        )
        of_blocks = count_cells(pattern, **where, queries=rows, keys=columns, sides=picture.block)
        blocks = WindowBlocks(of_blocks, picture.block)
    return Panel(head, order, rate, cells.likely / cells.area, blocks)


def rgb(color: str) -> Float64[Tensor, " 3"]:
    """Return red, green and blue of "#rrggbb" as numbers from 0 to 1."""
    return torch.tensor([int(color[at : at + 2], 16) for at in (1, 3, 5)], dtype=torch.float64) / 255


def paint(panel: Panel, window: Window) -> Float64[Tensor, "R C 3"]:
    """Return red, green and blue of each cell, from 0 to 1.

    If blocks are drawn, pairs of full blocks are dark, and masked pairs in computed blocks are beige.
    """
    if panel.blocks is None:
        return shade(panel.share, rgb(PAIR), rgb(WHITE))
    states = panel.blocks.state_of_cells(window)
    pairs = torch.stack([rgb(PAIR), rgb(PAIR_OF_FULL)])[(states == FULL).long()]
    return shade(panel.share, pairs, torch.stack([rgb(WHITE), rgb(BEIGE)])[(states != EMPTY).long()])


def shade(
    share: Float64[Tensor, "..."], pairs: Float64[Tensor, "... 3"], ground: Float64[Tensor, "... 3"]
) -> Float64[Tensor, "... 3"]:
    """Return colors from `ground` (share 0) to `pairs` (share 1), on a logarithmic scale; darker for shares above 1."""
    strength = torch.where(share > 0, (1 + share.clamp(1e-12, 1).log10() / _DECADES).clamp(min=_PALEST), 0.0)
    darker = _DARKER ** share.clamp(min=1).log2()
    return ground.lerp(pairs * darker[..., None], strength[..., None])


def axis_ticks(window: Window, *, letter: float) -> tuple[dict[int, str], dict[int, str]]:
    """Return (labels of the query axis, labels of the key axis): maps from the slot of each tick to its text.

    letter: width of a letter in pixels, which limits the number of key labels.
    """
    q, k = window
    rows = _ticks(q.slots, max(1, min(_MOST_TICKS, q.length // _TICK_ROOM)))
    most = _MOST_TICKS
    while True:
        columns = _ticks(k.slots, most)
        text = tokens_format([*rows, *columns])
        widest = letter * max(map(len, map(text, columns)), default=0)
        if most == 1 or most * (widest + _TICK_GAP) <= k.length:
            return {slot: text(slot) for slot in rows}, {slot: text(slot) for slot in columns}
        most -= 1


def _ticks(slots: range, most: int) -> list[int]:
    """Return the slots of about `most` ticks: the borders of the window's quarters, or round numbers.

    Quarters need `most` >= 4, a length that is a multiple of 4, and a start that is a multiple of a quarter.
    """
    quarter = len(slots) // 4
    if most >= 4 and quarter and len(slots) % 4 == 0 and slots.start % quarter == 0:
        return list(range(slots.start, slots.stop + 1, quarter))
    return list(round_places(slots, most))


def title_lines(picture: Picture, *, letters: int) -> list[str]:
    """Return the lines of the title, of at most `letters` letters, then the sizes as text, in lines up to 15 % longer.

    The title is `picture.title` or, if that is None, the pattern's expression, cut to 3 lines. The sizes are left out
    if `picture.title` is blank, or is given without a legend.
    """
    if picture.title is None:
        text = shorten(repr(picture.pattern), _TITLE_LINES * letters - 8, placeholder=" …")
        lines = wrap(text, letters, break_on_hyphens=False)[:_TITLE_LINES]
    else:
        lines = [line for part in picture.title.splitlines() for line in wrap(part, letters)]
    says_sizes = picture.title is None or (lines and picture.legend)
    return [*lines, *(wrap(_sizes_text(picture), int(letters * 1.15)) if says_sizes else [])]


def panel_title(picture: Picture, panel: Panel) -> str:
    """Return the title of a panel: its head if there are several, and its order unless all orders are natural."""
    words = [f"head {panel.head}"] if len(picture.heads) > 1 else []
    if len(picture.orders) > 1 or panel.order != "natural":
        words.append(f"residue order, mod {panel.rate}" if panel.order == "residue" else "natural order")
    return ", ".join(words)


def _sizes_text(picture: Picture) -> str:
    sizes = [f"{tokens_text(picture.num_tokens)} token{'s' if picture.num_tokens > 1 else ''}"]
    if picture.num_keys != picture.num_tokens:
        sizes = [f"{tokens_text(picture.num_tokens)} queries, {tokens_text(picture.num_keys)} keys"]
    if picture.num_heads > 1:
        number, all_heads = len(picture.heads), picture.num_heads
        some = f"{all_heads} heads" if number == all_heads else f"{number} of {all_heads} heads"
        sizes.append(f"head {picture.heads[0]} of {all_heads}" if number == 1 else some)
    if picture.block is not None:
        sizes.append("blocks of {} × {}".format(*picture.block))
    if max(axis.cell for axis in picture.window) > 1:
        sizes.append("a cell is {} × {} pairs".format(*(tokens_text(axis.cell) for axis in picture.window)))
    return ", ".join(sizes)
