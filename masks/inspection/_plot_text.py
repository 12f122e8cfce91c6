"""The words of a picture: titles, tick labels, counts of blocks."""

from __future__ import annotations

from textwrap import shorten, wrap

from ..core._bound import FULL
from ..core._tokens_text import tokens_text
from ._plot import Picture
from ._plot_panel import Blocks, Panel
from ._round_places import round_places

_TITLE_LINES = 3


def ticks(slots: range, most: int) -> list[int]:
    """Round places of a window, `most` steps at the most: quarters of it, if they are round, with its ends."""
    quarter = len(slots) // 4
    if most >= 4 and quarter and len(slots) % 4 == 0 and slots.start % quarter == 0:
        return list(range(slots.start, slots.stop + 1, quarter))
    return list(round_places(slots, most))


def title_lines(picture: Picture, *, letters: int) -> list[str]:
    """The title in lines of so many letters, and what is seen."""
    if picture.title is not None:
        lines = [line for part in picture.title.splitlines() for line in wrap(part, letters)]
        return lines if not lines or not picture.legend else [*lines, *wrap(_sizes_text(picture), int(letters * 1.15))]
    text = shorten(repr(picture.pattern), _TITLE_LINES * letters - 8, placeholder=" …")
    lines = wrap(text, letters, break_on_hyphens=False)[:_TITLE_LINES]
    return [*lines, *wrap(_sizes_text(picture), int(letters * 1.15))]


def panel_title(picture: Picture, panel: Panel) -> str:
    """What tells the panel from others, or from the usual."""
    words = [f"head {panel.head}"] if len(picture.heads) > 1 else []
    if len(picture.orders) > 1 or panel.order != "natural":
        words.append(f"residue order, mod {panel.rate}" if panel.order == "residue" else "natural order")
    return ", ".join(words)


def counts_text(blocks: Blocks) -> str:
    """How many blocks are computed, how many of them are full, and how much of them is of use."""
    computed, about = int(blocks.computed.sum()), "" if blocks.exact else "about "
    full = int((blocks.state == FULL).sum())
    of = f"{about}{computed:,} of {blocks.state.numel():,} blocks computed"
    useful = f"{blocks.useful:.0%}" if blocks.useful >= 0.01 else f"{100 * blocks.useful:.2g}%"
    return f"{of}, {full:,} full; {about}{useful} of their pairs allowed" if computed else of


def _sizes_text(picture: Picture) -> str:
    window = picture.window
    sizes = [f"{tokens_text(picture.num_tokens)} token{'s' if picture.num_tokens > 1 else ''}"]
    if picture.num_keys != picture.num_tokens:
        sizes = [f"{tokens_text(picture.num_tokens)} queries, {tokens_text(picture.num_keys)} keys"]
    if picture.num_heads > 1:
        one, some = (
            f"head {picture.heads[0]} of {picture.num_heads}",
            f"{len(picture.heads)} of {picture.num_heads} heads",
        )
        sizes.append(one if len(picture.heads) == 1 else some.removeprefix(f"{picture.num_heads} of "))
    if picture.block is not None:
        sizes.append("blocks of {} × {}".format(*picture.block))
    if max(window.queries.cell, window.keys.cell) > 1:
        cell = f"{tokens_text(window.queries.cell)} × {tokens_text(window.keys.cell)}"
        sizes.append(f"a cell is {cell} pairs")
    return ", ".join(sizes)
