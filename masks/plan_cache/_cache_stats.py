"""Budgets and statistics of the cache."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass

from tabulate import tabulate

from ..core import shortened
from ..text import read_text

BYTES_VARIABLE, ENTRIES_VARIABLE = "FLEXDILATED_CACHE_BYTES", "FLEXDILATED_CACHE_ENTRIES"
# Python's overhead per entry, some kB, is not in the byte count; this bounds it to about a hundred MB.
DEFAULT_ENTRIES = 1 << 14
_MOST_DIGITS = 18  # more than any machine has bytes


@dataclass(frozen=True)
class Limits:
    """Maximum bytes and entries; 0 of either disables the cache."""

    bytes: int
    entries: int

    def __post_init__(self) -> None:
        for unit, value in (("bytes", self.bytes), ("entries", self.entries)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"budget_{unit} must be a number of {unit}, 0 or more; got {value!r}")


def bytes_from_environment() -> int:
    return _read(BYTES_VARIABLE, "bytes", 1 << 30)


def entries_from_environment() -> int:
    return _read(ENTRIES_VARIABLE, "entries", DEFAULT_ENTRIES)


def _read(variable: str, unit: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise ValueError(f"{variable} must be a whole number of {unit}, such as {default}; got {text!r:.40}")
    return int(text)


@dataclass(frozen=True)
class Holding:
    """Number and bytes of the cache entries of one kind."""

    name: str
    entries: int
    bytes: int


@dataclass(frozen=True)
class CacheStats:
    """Look-ups since the last `clear`, and the current contents.

    A hit found its value, or another thread building it. `build_seconds` counts nested builds once. `masters` are
    plans and block lists, on the CPU; `copies` are tables made from them, one Holding per device.
    """

    hits: int
    misses: int
    evictions: int
    build_seconds: float
    masters: Holding
    copies: tuple[Holding, ...]
    limits: Limits

    @property
    def entries(self) -> int:
        """Number of entries, masters and copies."""
        return self.masters.entries + sum(holding.entries for holding in self.copies)

    @property
    def bytes(self) -> int:
        """Bytes of the tables of all entries, without Python's overhead."""
        return self.masters.bytes + sum(holding.bytes for holding in self.copies)

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups, 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        """Two tables: look-ups, and contents."""
        lookups = {
            "hits": f"{self.hits:,}",
            "misses": f"{self.misses:,}",
            "hit rate": f"{self.hit_rate:.1%}",
            "evictions": f"{self.evictions:,}",
            "time to build": f"{1e3 * self.build_seconds:,.1f} ms",
        }
        total, budget = Holding("all", self.entries, self.bytes), self.limits
        held = [(each.name, f"{each.entries:,}", f"{each.bytes:,}") for each in (self.masters, *self.copies, total)]
        held.append(("budget", f"{budget.entries:,}", f"{budget.bytes:,}"))
        right = ("left", "right", "right")
        above = tabulate(lookups.items(), tablefmt="plain", disable_numparse=True, colalign=right[:2])
        return f"{above}\n\n{tabulate(held, ('held', 'entries', 'bytes'), disable_numparse=True, colalign=right)}"


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
