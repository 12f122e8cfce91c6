"""The terminal that is written to: its size, and what it can show."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TextIO

_COLUMNS, _LINES = 80, 24  # where nothing is known
_LEAST_COLUMNS, _LEAST_LINES = 24, 12
_SHAPES = "·░▒▓█▀▄│─┌┐└┘┬┤├┴×…"
COLOUR_CHOICES = ("auto", "always", "never")


@dataclass(frozen=True)
class Terminal:
    """Characters a line and lines; whether it shows colours (ANSI, 256 of them) and shapes beyond ASCII."""

    columns: int
    lines: int
    colour: bool
    shapes: bool


def terminal_of(stream: TextIO, *, colour: str = "auto") -> Terminal:
    """What is known of a stream's terminal. With "auto" only a terminal gets colours, and none where NO_COLOR is set.

    Source of NO_COLOR: https://no-color.org.
    """
    size = shutil.get_terminal_size((_COLUMNS, _LINES))
    wanted = colour == "always" or (colour == "auto" and _takes_colours(stream))
    return Terminal(max(size.columns, _LEAST_COLUMNS), max(size.lines, _LEAST_LINES), wanted, _takes_shapes(stream))


def _takes_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _takes_shapes(stream: TextIO) -> bool:
    try:
        _SHAPES.encode(stream.encoding or "utf-8")  # none: text that is not encoded
    except (UnicodeEncodeError, LookupError):
        return False
    return True
