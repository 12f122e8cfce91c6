"""The cache: one process-wide store of plans and tables, thread-safe, in which each value is built once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from ..core import Expression, bytes_text, own_modes, require_expression
from ..patterns import as_written
from ._cache_stats import CacheStats
from ._cache_store import DEFAULT_ENTRIES, Entry, Limits, Pins, Store, Watch, limits_from_environment
from ._debug_log import ByteSize, DeferredLog, KeyName, PatternText

T = TypeVar("T")
_log = logging.getLogger("flexdilated")


@dataclass(eq=False)
class _Building:
    """A value that a thread is building, and others may wait for."""

    pattern: str
    thread: int = field(default_factory=threading.get_ident)
    done: Future[Any] = field(default_factory=Future)


class _Nesting(threading.local):
    """The patterns of the builds that this thread is inside of, the innermost last."""

    patterns: tuple[str, ...] = ()

    def with_pattern(self, pattern: str) -> str:
        """The texts of the innermost build's patterns, and of this one."""
        innermost = self.patterns[-1] if self.patterns else ""
        return innermost if pattern in innermost else f"{innermost} {pattern}"


class Cache:
    """A thread-safe store of built values. Each is built once, however many threads ask at the same time."""

    def __init__(self, budget_bytes: int, budget_entries: int = DEFAULT_ENTRIES) -> None:
        self._lock = threading.Lock()
        self._limits = Limits(budget_bytes, budget_entries)
        self._store, self._watch = Store(self._limits), Watch()
        self._building: dict[Hashable, _Building] = {}
        self._open_pins: list[Pins] = []
        self._nesting, self._deferred = _Nesting(), DeferredLog()
        self._start_counts()

    @property
    def budget_bytes(self) -> int:
        """Most bytes held, except that what is pinned stays; setting it evicts at once."""
        return self._limits.bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int) -> None:
        self._limit(bytes=value)

    @property
    def budget_entries(self) -> int:
        """Most entries held, except that what is pinned stays; setting it evicts at once."""
        return self._limits.entries

    @budget_entries.setter
    def budget_entries(self, value: int) -> None:
        self._limit(entries=value)

    def get(
        self,
        key: Hashable,
        build: Callable[[], T],
        nbytes: Callable[[T], int],
        *,
        pattern: Expression | str = "",
        device: torch.device | None = None,
    ) -> T:
        """The value of `key`, built on first use. A value larger than the budget is returned but not kept.

        `pattern` is the pattern it is built for, or its text as written, beside the patterns of builds that ask for it.
        `device` says that the value is a copy there, made of values that the cache holds too: copies are the
        first to go.
        """
        with self._lock:
            entry = self._store.find(key)
            if entry is not None:
                self._hits += 1
                for pins in self._open_pins:
                    pins.add(entry, self._store)
                return entry.value
            building = self._building.get(key)
            is_mine = building is None
            if building is None:
                building = self._building[key] = _Building(self._nesting.with_pattern(_text(pattern)))
            self._misses += is_mine
            self._hits += not is_mine
        if is_mine:
            return self._build(key, build, nbytes, building, device)
        assert building.thread != threading.get_ident(), f"a build asks for its own result: {key!r}"
        return building.done.result()

    @contextmanager
    def pin(self) -> Iterator[Pins]:
        """Whatever any thread looks up within this context stays, until `release` of what it yields, or `clear`.

        Threads are not told apart, as a backward may run in another than its forward. If the context ends
        with an error, its pins are released.
        """
        pins = Pins(self._unpin)
        with self._lock:
            self._open_pins.append(pins)
        finished = False
        try:
            yield pins
            finished = True
        finally:
            with self._lock:
                self._open_pins.remove(pins)
            if not finished:
                pins.release()

    def forget(self, pattern: Expression) -> int:
        """Drop all that was built for a pattern, or for a combination in which it is a part; returns how many.

        Values still being built for it are not kept, and whoever asks from now on does not get them.
        """
        # The parts of an intersection or a union stand beside those of a larger one.
        branches = require_expression(pattern).unpadded.branches()
        texts = [_text(part) for branch in branches for part in getattr(branch, "parts", (branch,))]

        def concerns(built: Entry | _Building) -> bool:
            return all(text in built.pattern for text in texts)

        with self._changing():
            self._building = {key: each for key, each in self._building.items() if not concerns(each)}
            dropped = self._store.drop(concerns)
            self._deferred.queue("entries dropped to forget %r: %d", pattern, dropped)
        return dropped

    def clear(self) -> None:
        """Drop every entry, pinned or not, and set the counts to zero."""
        with self._changing():
            dropped = self._store.drop(lambda entry: True)
            self._building = {}
            self._watch.reset()
            self._start_counts()
            self._deferred.queue("entries dropped to clear the cache: %d", dropped)

    def stats(self) -> CacheStats:
        """Counts and sizes at this moment; print them for a table."""
        with self._lock:
            counts = (self._hits, self._misses, self._evictions, self._build_seconds)
            return CacheStats.of(*counts, self._store.entries(), self._limits)

    def __repr__(self) -> str:
        """Without the lock, so that a debugger can show a cache that is being changed."""
        held = f"{len(self._store):,} of {self._limits.entries:,} entries"
        return f"Cache({held}, {bytes_text(self._store.bytes)} of {bytes_text(self._limits.bytes)})"

    def _start_counts(self) -> None:
        self._hits = self._misses = self._evictions = 0
        self._build_seconds = 0.0

    def _limit(self, **limits: int) -> None:
        with self._changing():
            self._limits = replace(self._limits, **limits)
            gone = self._store.limit(self._limits)
            self._watch.reset()
            self._count_evicted(gone)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, and emit what was logged under it once it is released."""
        with self._lock:
            yield
        self._deferred.emit()

    def _build(
        self,
        key: Hashable,
        build: Callable[[], T],
        nbytes: Callable[[T], int],
        mine: _Building,
        device: torch.device | None,
    ) -> T:
        begin = time.perf_counter()
        self._nesting.patterns += (mine.pattern,)
        try:
            with own_modes():
                value = build()
            size = nbytes(value)
        except BaseException as error:
            # Whoever waits for this key gets the same error; the next call may try again.
            with self._lock:
                self._is_wanted(key, mine)
            mine.done.set_exception(error)
            what = KeyName(key), PatternText(mine.pattern), type(error).__name__
            self._deferred.queue("failed to build %s of %s: %s", *what)
            self._deferred.emit()
            raise
        finally:
            self._nesting.patterns = self._nesting.patterns[:-1]
        seconds, entry = time.perf_counter() - begin, Entry(key, value, size, pattern=mine.pattern, device=device)
        warnings: list[str] = []
        with self._lock:
            where = "" if device is None else f" on {device}"
            what = KeyName(key), PatternText(mine.pattern), where, ByteSize(size), 1e3 * seconds
            self._deferred.queue("built %s of %s%s: %s in %.2f ms", *what)
            if self._is_wanted(key, mine):
                self._keep(entry)
            else:
                self._deferred.queue("not kept: it was forgotten while it was built")
            if not self._nesting.patterns:  # a build that is part of no other
                self._build_seconds += seconds
                warnings = list(self._watch.lines(self._store, self._limits))
        mine.done.set_result(value)
        self._deferred.emit()
        for line in warnings:
            _log.warning(line)
        return value

    def _is_wanted(self, key: Hashable, mine: _Building) -> bool:
        """End a build. False if its value is not to be kept: its pattern was forgotten meanwhile."""
        wanted = self._building.get(key) is mine
        if wanted:
            del self._building[key]
        return wanted

    def _keep(self, entry: Entry) -> None:
        """Store a new entry, if it has room or is to be pinned."""
        if not self._open_pins and not self._store.has_room(entry.nbytes):
            self._watch.refused(entry)
            room = ByteSize(self._limits.bytes - self._store.pinned_bytes)
            self._deferred.queue("not kept: the budget has room for %s beside what is pinned", room)
            return
        self._watch.built(entry, self._store)
        self._count_evicted(self._store.add(entry))
        for pins in self._open_pins:
            pins.add(entry, self._store)

    def _unpin(self, pins: Pins) -> None:
        with self._changing():
            for entry in pins.take():
                self._count_evicted(self._store.unpin(entry))

    def _count_evicted(self, gone: list[Entry]) -> None:
        self._watch.evicted(gone)
        self._evictions += len(gone)
        held = self._store.bytes + sum(entry.nbytes for entry in gone)
        limit = f"bytes={self._limits.bytes}" if held > self._limits.bytes else f"entries={self._limits.entries}"
        for entry in gone:
            what = KeyName(entry.key), PatternText(entry.pattern), ByteSize(entry.nbytes)
            self._deferred.queue("evicted %s of %s: %s, used longest ago; budget_%s was exceeded", *what, limit)


def _text(pattern: Expression | str) -> str:
    """The text of a pattern as it was written, with the names of its run-time tensors in place of their values."""
    return pattern if isinstance(pattern, str) else as_written(pattern).text


_cache: Cache | None = None
_cache_lock = threading.Lock()


def cache() -> Cache:
    """The process-wide cache. FLEXDILATED_CACHE_BYTES and FLEXDILATED_CACHE_ENTRIES are its first budgets.

    They are 1 GiB and 16,384 entries if not set. Raises ValueError if one is not a number.

    >>> masks.cache().clear()
    """
    global _cache
    if _cache is None:
        with _cache_lock:
            if _cache is None:
                limits = limits_from_environment()
                _cache = Cache(limits.bytes, limits.entries)
    return _cache
