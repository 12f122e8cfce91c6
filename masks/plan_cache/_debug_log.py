"""What the library says of its work at DEBUG, in the log of the name `flexdilated`."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from ..core import bytes_text, shortened
from ..text import read_text

log = logging.getLogger("flexdilated")
LONGEST = 160  # characters of a pattern in a line


def is_told() -> bool:
    """Whether anybody wants to know. Not to be asked where something is found that was there already."""
    return log.isEnabledFor(logging.DEBUG)


class Untold:
    """Lines that are noted under a lock and told after it: whoever handles a record may want the same lock."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, tuple[object, ...]]] = deque()

    def note(self, line: str, *values: object) -> None:
        """Keep a line, with values as `logging` takes them, where it is wanted."""
        if is_told():
            self._lines.append((line, values))

    def tell(self) -> None:
        """Tell what was noted, by whichever thread. Without a lock: no line is told twice, none is lost."""
        while self._lines:
            try:
                line, values = self._lines.popleft()
            except IndexError:  # another thread was quicker
                return
            log.debug(line, *values)


@dataclass(frozen=True)
class Written:
    """A pattern's text, or several of them one after the other, of which the first is shown as an expression."""

    text: str

    def __str__(self) -> str:
        text = self.text.strip()
        if not text:
            return "any pattern"
        try:
            _, end = json.JSONDecoder().raw_decode(text)
            return in_line(read_text(text[:end]))
        except (ValueError, RecursionError):  # of a function that is gone, or of one that nests too deep
            return in_line(text)


@dataclass(frozen=True)
class Named:
    """The key of something built: its first word."""

    key: Hashable

    def __str__(self) -> str:
        first = self.key[0] if isinstance(self.key, tuple) and self.key else self.key
        return str(first).replace("_", " ")


@dataclass(frozen=True)
class Sized:
    """A number of bytes, as people read it."""

    nbytes: int

    def __str__(self) -> str:
        return bytes_text(self.nbytes)


def in_line(value: object) -> str:
    """The value as text that leaves room for more in its line."""
    return shortened(str(value), LONGEST)
