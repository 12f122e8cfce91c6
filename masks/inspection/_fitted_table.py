"""Tables that fit a terminal: cells wrap between words, and columns that do not fit follow in further tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

_GAP, _PADDING = 2, 2  # spaces between columns; padding that tabulate adds to a heading
_LEAST = 30  # characters; least line width, also on narrower terminals
# A line may end at a space, behind a bracket, or behind a comma that is not part of a number.
_PIECE = re.compile(r"(?:[^,()\[\]]|(?<=\d),(?=\d))+[,()\[\]]{0,3}|[,()\[\]]")


def fitted_table(
    rows: Sequence[Sequence[str]], headers: Sequence[str], *, columns: int, align: Sequence[str] = ()
) -> str:
    """Table with lines of at most max(columns, 30) characters. Further columns follow in tables with the first one."""
    align = [*align, *["left"] * (len(headers) - len(align))]
    widths = _widths(rows, headers, max(columns, _LEAST))
    fit = next((n for n in range(len(headers), 2, -1) if _total(widths[:n]) <= max(columns, _LEAST)), 2)
    if fit < len(headers):
        parts = (range(fit), (0, *range(fit, len(headers))))
        return "\n\n".join(
            fitted_table([_some(row, part) for row in rows], _some(headers, part), columns=columns,
                         align=_some(align, part))
            for part in parts
        )  # fmt: skip
    lines = [[_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    titles = [_wrapped(title, width - _PADDING) for title, width in zip(headers, widths, strict=True)]
    return tabulate(lines, titles, disable_numparse=True, colalign=align)


def fitted_facts(facts: Sequence[tuple[str, str]], *, columns: int) -> str:
    """One (name, text) a row, without headings."""
    room = max(columns, _LEAST) - max(len(name) for name, _ in facts) - _GAP
    return tabulate([(name, _wrapped(said, room)) for name, said in facts], tablefmt="plain", disable_numparse=True)


def _widths(rows: Sequence[Sequence[str]], headers: Sequence[str], columns: int) -> list[int]:
    """Column widths: narrow the columns that then need fewest lines, down to their longest unbreakable pieces."""
    cells = list(zip(headers, *rows, strict=True))
    widths = whole = [max([len(title) + _PADDING, *map(len, column)]) for title, *column in cells]
    least = [max([_longest(title) + _PADDING, *map(_longest, column)]) for title, *column in cells]
    while _total(widths) > columns:
        spare = [place for place, width in enumerate(widths) if width > least[place]]
        if not spare:
            break
        first = min(spare, key=lambda place: whole[place] / (widths[place] - 1))
        widths = [width - (place == first) for place, width in enumerate(widths)]
    return widths


def _longest(text: str) -> int:
    return max((len(piece) for word in text.split() for piece in _PIECE.findall(word)), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _wrapped(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        for piece in _PIECE.findall(word):
            if lines[-1] and len(lines[-1] + gap + piece) > width:
                lines, gap = [*lines, ""], ""
            lines[-1] += gap + piece
            gap = ""
    return "\n".join(lines)


def _some(values: Sequence[str], places: Sequence[int]) -> list[str]:
    return [values[place] for place in places]
