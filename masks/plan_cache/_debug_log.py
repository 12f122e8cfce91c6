"""What the library logs of its work at DEBUG, under the name `flexdilated`."""

from __future__ import annotations

import json
import logging

from ..core import shortened
from ..text import read_text

log = logging.getLogger("flexdilated")
LONGEST = 160  # characters of a pattern in a line


def debug_wanted() -> bool:
    """Whether anything listens at DEBUG. Not to be called where a value is found that was there already."""
    return log.isEnabledFor(logging.DEBUG)


def pattern_text(text: str) -> str:
    """The first of the pattern texts that stand one after the other, as an expression, shortened."""
    text = text.strip()
    if not text:
        return "any pattern"
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return in_line(read_text(text[:end]))
    except (ValueError, RecursionError):  # of a function that is gone, or of one that nests too deep
        return in_line(text)


def in_line(value: object) -> str:
    """The value as text that leaves room for more in its line."""
    return shortened(str(value), LONGEST)
