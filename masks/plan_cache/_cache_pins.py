"""Pins: entries that stay in the cache for as long as someone wants them there."""

from __future__ import annotations

from collections.abc import Callable

from ._cache_store import Entry, Store


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
