"""What the cache holds, in the order in which it would go: copies before masters, pinned entries never."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ._cache_limits import Limits

# Entries by their last use, the oldest first.
_Line = OrderedDict["Entry", None]


class Entry:
    """A value with its size. `device` says that it is a copy there, which a master can make again.

    `pattern` holds the texts of the patterns it was built for. `pins` counts those who want it to stay.
    """

    __slots__ = ("device", "key", "line", "nbytes", "pattern", "pins", "value")

    line: _Line

    def __init__(self, key: Hashable, value: Any, nbytes: int, *, pattern: str, device: torch.device | None) -> None:
        self.key, self.value, self.nbytes, self.pattern, self.device = key, value, nbytes, pattern, device
        self.pins = 0


class Store:
    """Entries within limits. Not thread-safe: the cache holds its lock around every call."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[Hashable, Entry] = {}
        self._copies, self._masters, self._pinned = _Line(), _Line(), _Line()
        self.bytes = self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """All that is held, in the order in which it would go; what is pinned comes last."""
        return [*self._copies, *self._masters, *self._pinned]

    def find(self, key: Hashable) -> Entry | None:
        """The entry of a key, which is thereby used, or None."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.line.move_to_end(entry)
        return entry

    def has_room(self, nbytes: int) -> bool:
        """Whether a value of this size fits beside what is pinned."""
        return self.pinned_bytes + nbytes <= self._limits.bytes and len(self._pinned) < self._limits.entries

    def add(self, entry: Entry) -> list[Entry]:
        """Hold an entry; returns what had to go for it. One without room must be pinned before the next."""
        self._entries[entry.key] = entry
        self.bytes += entry.nbytes
        self._line_up(entry)
        return self._evict(spare=entry)

    def limit(self, limits: Limits) -> list[Entry]:
        """Keep other limits from now on; returns what had to go for them."""
        self._limits = limits
        return self._evict(spare=None)

    def pin(self, entry: Entry) -> None:
        """One more wants this entry to stay."""
        entry.pins += 1
        if entry.pins == 1:
            del entry.line[entry]
            self.pinned_bytes += entry.nbytes
            self._line_up(entry)

    def unpin(self, entry: Entry) -> list[Entry]:
        """One fewer does; returns what had to go, which may be the entry."""
        entry.pins -= 1
        if entry.pins or self._entries.get(entry.key) is not entry:
            return []
        del entry.line[entry]
        self.pinned_bytes -= entry.nbytes
        self._line_up(entry)
        return self._evict(spare=None)

    def drop(self, unwanted: Callable[[Entry], bool]) -> int:
        """Drop entries, pinned ones too; returns how many."""
        dropped = [entry for entry in self._entries.values() if unwanted(entry)]
        for entry in dropped:
            self._remove(entry)
        return len(dropped)

    def _line_up(self, entry: Entry) -> None:
        if entry.pins:
            entry.line = self._pinned
        else:
            entry.line = self._masters if entry.device is None else self._copies
        entry.line[entry] = None

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key], entry.line[entry]
        self.bytes -= entry.nbytes
        self.pinned_bytes -= entry.nbytes if entry.pins else 0

    def _evict(self, *, spare: Entry | None) -> list[Entry]:
        """Remove until the limits hold or nothing may go; `spare` stays: it is in use right now."""
        gone = []
        for line in (self._copies, self._masters):
            while self._exceeds() and line and (oldest := next(iter(line))) is not spare:
                self._remove(oldest)
                gone.append(oldest)
        return gone

    def _exceeds(self) -> bool:
        return self.bytes > self._limits.bytes or len(self._entries) > self._limits.entries
