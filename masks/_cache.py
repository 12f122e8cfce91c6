"""The cache: one process-wide store of plans and tables, bounded in bytes, least recently used out first."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_VARIABLE = "FLEXDILATED_CACHE_BYTES"
_DEFAULT_BYTES = 1 << 30


@dataclass(frozen=True)
class CacheStats:
    """Counts since the last `clear`; bytes are those of the tables held now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int
    build_seconds: float

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups, 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


class Cache:
    """A thread-safe store of built values. Each is built once, however many threads ask at the same time."""

    def __init__(self, budget_bytes: int) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._building: dict[Hashable, Future[Any]] = {}
        self._reset()
        self.budget_bytes = budget_bytes

    @property
    def budget_bytes(self) -> int:
        """Most bytes held; setting it evicts at once."""
        return self._budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"budget_bytes must be a number of bytes, 0 or more; got {value!r}")
        with self._lock:
            self._budget_bytes = value
            self._evict()

    def get(self, key: Hashable, build: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """The value of `key`, built on first use. A value larger than the budget is returned but not kept."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._hits += 1
                return entry[0]
            others = self._building.get(key)
            mine = self._building.setdefault(key, Future())
            self._hits += others is not None
            self._misses += others is None
        return self._build(key, build, nbytes, mine) if others is None else others.result()

    def stats(self) -> CacheStats:
        """Counts and sizes at this moment."""
        with self._lock:
            return CacheStats(
                self._hits, self._misses, self._evictions, len(self._entries), self._bytes, self._build_seconds
            )

    def clear(self) -> None:
        """Drop every entry and set the counts to zero."""
        with self._lock:
            self._entries.clear()
            self._reset()

    def _reset(self) -> None:
        self._hits = self._misses = self._evictions = self._bytes = 0
        self._build_seconds = 0.0

    def _build(self, key: Hashable, build: Callable[[], T], nbytes: Callable[[T], int], future: Future[T]) -> T:
        begin = time.perf_counter()
        try:
            value = build()
        except BaseException as error:
            # Whoever waits for this key gets the same error; the next call may try again.
            with self._lock:
                del self._building[key]
            future.set_exception(error)
            raise
        size = nbytes(value)
        with self._lock:
            del self._building[key]
            self._build_seconds += time.perf_counter() - begin
            if size <= self._budget_bytes:
                self._entries[key] = (value, size)
                self._bytes += size
                self._evict()
        future.set_result(value)
        return value

    def _evict(self) -> None:
        while self._bytes > self._budget_bytes:
            _, (_, size) = self._entries.popitem(last=False)
            self._bytes -= size
            self._evictions += 1


_cache: Cache | None = None
_cache_lock = threading.Lock()


def cache() -> Cache:
    """The process-wide cache. Its first budget is FLEXDILATED_CACHE_BYTES, 1 GiB if that is not set.

    Raises ValueError if the variable is not a number of bytes.
    """
    global _cache
    if _cache is None:
        with _cache_lock:
            if _cache is None:
                _cache = Cache(budget_from_environment())
    return _cache


def budget_from_environment() -> int:
    """FLEXDILATED_CACHE_BYTES as a number, or the default."""
    text = os.environ.get(_VARIABLE, str(_DEFAULT_BYTES))
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{_VARIABLE} must be a whole number of bytes, such as {_DEFAULT_BYTES}; got {text!r}")
    return int(text)
