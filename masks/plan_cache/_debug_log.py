"""What the library logs of its work at DEBUG, under the name `flexdilated`."""

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


def debug_wanted() -> bool:
    """Whether anything listens at DEBUG. Not to be called where a value is found that was there already."""
    return log.isEnabledFor(logging.DEBUG)


class DeferredLog:
    """Records queued under a lock, emitted after its release: a handler of a record may want the same lock."""

    def __init__(self) -> None:
        self._records: deque[tuple[str, tuple[object, ...]]] = deque()

    def queue(self, line: str, *values: object) -> None:
        """Keep a line, with values as `logging` takes them, if anything listens."""
        if debug_wanted():
            self._records.append((line, values))

    def emit(self) -> None:
        """Emit what was queued by any thread, each record once. Not to be called under the lock."""
        while self._records:
            try:
                line, values = self._records.popleft()
            except IndexError:  # another thread took the last one
                return
            log.debug(line, *values)


@dataclass(frozen=True)
class PatternText:
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
class KeyName:
    """The key of something built: its first word."""

    key: Hashable

    def __str__(self) -> str:
        first = self.key[0] if isinstance(self.key, tuple) and self.key else self.key
        return str(first).replace("_", " ")


@dataclass(frozen=True)
class ByteSize:
    """A number of bytes, as people read it."""

    nbytes: int

    def __str__(self) -> str:
        return bytes_text(self.nbytes)


def in_line(value: object) -> str:
    """The value as text that leaves room for more in its line."""
    return shortened(str(value), LONGEST)
