"""Log of the library at level DEBUG, under the name `flexdilated`."""

from __future__ import annotations

import json
import logging

from ..core import shortened
from ..text import read_text

log = logging.getLogger("flexdilated")
LONGEST = 160  # characters of a pattern in a line


def debug_wanted() -> bool:
    """True if DEBUG is enabled. Do not call it on a cache hit, which must stay fast."""
    return log.isEnabledFor(logging.DEBUG)


def pattern_text(text: str) -> str:
    """The first of several concatenated pattern texts, as an expression, shortened."""
    text = text.strip()
    if not text:
        return "any pattern"
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return in_line(read_text(text[:end]))
    except (ValueError, RecursionError):  # the custom function is gone, or the text nests too deep
        return in_line(text)


def in_line(value: object) -> str:
    """The value as text of at most LONGEST characters."""
    return shortened(str(value), LONGEST)
