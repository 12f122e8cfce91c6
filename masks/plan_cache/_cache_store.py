"""What the cache holds within limits, in order of eviction: copies before masters, pinned entries never."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

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


class Pins:
    """What was looked up while these were open. It stays until `release`, or until the cache is cleared."""

    def __init__(self, unpin: Callable[[Pins], None]) -> None:
        self._entries: set[Entry] = set()
        self._unpin = unpin

    def add(self, entry: Entry, store: Store) -> None:
        """Keep this entry too. The cache calls it, under its lock."""
        if entry not in self._entries:
            self._entries.add(entry)
            store.pin(entry)

    def take(self) -> set[Entry]:
        """The entries, which are then no longer kept by these pins. The cache calls it, under its lock."""
        entries, self._entries = self._entries, set()
        return entries

    def __repr__(self) -> str:
        return f"Pins({len(self._entries):,} entries)"

    def release(self) -> None:
        """Let the entries go when their turn comes. A second call does nothing."""
        self._unpin(self)


_REMEMBERED = 4096  # evicted keys
_WINDOW = 16  # builds looked back on
_THRASHING = 8  # of these that only made again what had been evicted


class Watch:
    """Remembers what was evicted, and what did not fit, and says so in lines for the log.

    Each line comes once, and again only after `reset`; that of thrashing also when the need has doubled.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Things have changed: other limits, or an empty cache."""
        # Evicted keys, by hash, and their bytes; the last to go comes last.
        self._evicted: OrderedDict[int, int] = OrderedDict()
        self._needs: deque[Limits | None] = deque(maxlen=_WINDOW)
        self._said_need = Limits(0, 0)
        self._largest_refused: int | None = None
        self._said_refused = False

    def evicted(self, entries: Iterable[Entry]) -> None:
        """These had to go."""
        for entry in entries:
            self._evicted[hash(entry.key)] = entry.nbytes
        while len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)

    def refused(self, entry: Entry) -> None:
        """This has no room beside what is pinned."""
        self._largest_refused = max(entry.nbytes, self._largest_refused or 0)

    def built(self, entry: Entry, store: Store) -> None:
        """This is about to be added to the store."""
        self._needs.append(self._need(hash(entry.key), entry.nbytes, store))

    def lines(self, store: Store, limits: Limits) -> Iterator[str]:
        """What there is to say now."""
        if self._largest_refused is not None and not self._said_refused:
            self._said_refused = True
            yield (
                f"the cache cannot hold a value of {self._largest_refused} bytes, which is built anew at each use: "
                f"budget_bytes={limits.bytes} ({BYTES_VARIABLE}), budget_entries={limits.entries} "
                f"({ENTRIES_VARIABLE}), {store.pinned_bytes} bytes pinned"
            )
        needs = [need for need in self._needs if need is not None]
        if len(needs) >= _THRASHING:
            need = Limits(max(need.bytes for need in needs), max(need.entries for need in needs))
            yield from self._thrashing(need, limits, len(needs))

    def _thrashing(self, need: Limits, limits: Limits, again: int) -> Iterator[str]:
        wanted = [
            f"budget_{unit}={enough} ({variable}; it is {now})"
            for unit, enough, now, variable in (
                ("bytes", need.bytes, limits.bytes, BYTES_VARIABLE),
                ("entries", need.entries, limits.entries, ENTRIES_VARIABLE),
            )
            if enough > now
        ]
        doubled = need.bytes >= 2 * self._said_need.bytes or need.entries >= 2 * self._said_need.entries
        if wanted and doubled:
            self._said_need = need
            yield (
                f"the cache is thrashing: {again} of the last {len(self._needs)} builds made again what it had "
                f"evicted; {' and '.join(wanted)} would have sufficed"
            )

    def _need(self, key: int, nbytes: int, store: Store) -> Limits | None:
        """The limits under which this key had not been evicted; None if it was not.

        Room for the key, for all that has gone since, and for all that is held: then nothing had to go since.
        """
        if key not in self._evicted:
            return None
        since = [self._evicted[other] for other in takewhile(lambda other: other != key, reversed(self._evicted))]
        del self._evicted[key]
        return Limits(store.bytes + nbytes + sum(since), len(store) + 1 + len(since))
