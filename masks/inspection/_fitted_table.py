"""Tables that fit a terminal: long cells and headings are wrapped, and what is wider still goes on below."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from tabulate import tabulate

_GAP, _PADDING = 2, 2  # between columns, and what tabulate adds to a heading
_NARROWEST = 12  # characters to which a column without spaces is cut
_LEAST = 2 * (_NARROWEST + _PADDING) + _GAP  # narrower terminals get lines of as many: two columns stay together


def fitted_table(
    rows: Sequence[Sequence[str]], headers: Sequence[str], *, columns: int, align: Sequence[str] = ()
) -> str:
    """Of at most so many characters a line. Columns that do not fit follow in a table of their own, with the first."""
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
    """A name and what is said of it a row, without headings."""
    room = max(columns, _LEAST) - max(len(name) for name, _ in facts) - _GAP
    return tabulate([(name, _wrapped(said, room)) for name, said in facts], tablefmt="plain", disable_numparse=True)


def _widths(rows: Sequence[Sequence[str]], headers: Sequence[str], columns: int) -> list[int]:
    """Columns give way where that takes fewest lines: down to their longest words, then, if need be, within words."""
    cells = list(zip(headers, *rows, strict=True))
    widths = whole = [max([len(title) + _PADDING, *map(len, column)]) for title, *column in cells]
    words = [max([_longest_word(title) + _PADDING, *map(_longest_word, column)]) for title, *column in cells]
    for least in (words, [min(word, _NARROWEST) for word in words]):
        while _total(widths) > columns:
            spare = [place for place, width in enumerate(widths) if width > least[place]]
            if not spare:
                break
            first = min(spare, key=lambda place: whole[place] / (widths[place] - 1))
            widths = [width - (place == first) for place, width in enumerate(widths)]
    return widths


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(wrap(text, max(width, 1), break_on_hyphens=False)) if len(text) > width else text


def _some(values: Sequence[str], places: Sequence[int]) -> list[str]:
    return [values[place] for place in places]
