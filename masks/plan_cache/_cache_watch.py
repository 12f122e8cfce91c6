"""When a cache is too small: what it evicts and has to build again, and the budget that would have sufficed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import takewhile

from ._cache_limits import BYTES_VARIABLE, ENTRIES_VARIABLE, Limits
from ._cache_store import Entry, Store

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
