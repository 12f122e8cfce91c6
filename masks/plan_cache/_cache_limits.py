"""How much the cache may hold: bytes and entries, from the environment or from the caller."""

from __future__ import annotations

import os
from dataclasses import dataclass

BYTES_VARIABLE, ENTRIES_VARIABLE = "FLEXDILATED_CACHE_BYTES", "FLEXDILATED_CACHE_ENTRIES"
DEFAULT_BYTES = 1 << 30
# What Python adds to an entry is not counted in bytes: some kB, so this bounds it to about a hundred MB.
DEFAULT_ENTRIES = 1 << 14
_MOST_DIGITS = 18  # more than any machine has bytes


@dataclass(frozen=True)
class Limits:
    """Most bytes and most entries held; 0 of either holds nothing."""

    bytes: int = DEFAULT_BYTES
    entries: int = DEFAULT_ENTRIES

    def __post_init__(self) -> None:
        _require("budget_bytes", self.bytes, "bytes")
        _require("budget_entries", self.entries, "entries")


def limits_from_environment() -> Limits:
    """What FLEXDILATED_CACHE_BYTES and FLEXDILATED_CACHE_ENTRIES say; ValueError where they are no numbers."""
    return Limits(bytes_from_environment(), entries_from_environment())


def bytes_from_environment() -> int:
    """FLEXDILATED_CACHE_BYTES as a number, or the default."""
    return _read(BYTES_VARIABLE, "bytes", DEFAULT_BYTES)


def entries_from_environment() -> int:
    """FLEXDILATED_CACHE_ENTRIES as a number, or the default."""
    return _read(ENTRIES_VARIABLE, "entries", DEFAULT_ENTRIES)


def _require(name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a number of {unit}, 0 or more; got {value!r}")


def _read(variable: str, unit: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise ValueError(f"{variable} must be a whole number of {unit}, such as {default}; got {text!r:.40}")
    return int(text)
