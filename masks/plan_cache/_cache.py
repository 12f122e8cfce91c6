"""Process-wide, thread-safe LRU cache of plans and block lists, with budgets and statistics."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from tabulate import tabulate

from ..core import Expression, bytes_text, require_expression, shortened, suspended_torch_modes
from ..patterns import as_written, table_split
from ..text import read_text

BYTES_VARIABLE, ENTRIES_VARIABLE = "FLEXDILATED_CACHE_BYTES", "FLEXDILATED_CACHE_ENTRIES"
DEFAULT_BYTES = 1 << 28
# Python's overhead per entry, some kB, is not in the byte count; this bounds it to about a hundred MB.
DEFAULT_ENTRIES = 1 << 14
_MOST_DIGITS = 18  # more than any machine has bytes
_LONGEST_TEXT = 160  # most characters of a pattern in a log line
log = logging.getLogger("flexdilated")

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Budgets of a cache: largest number of bytes and of entries; 0 for either disables the cache.

    Raises ValueError unless both are integers of at least 0.
    """

    bytes: int
    entries: int

    def __post_init__(self) -> None:
        for unit, value in (("bytes", self.bytes), ("entries", self.entries)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"budget_{unit} must be an integer of at least 0; got {value!r}")

    def admit(self, nbytes: int, entries: int) -> bool:
        """Return True if this many bytes and entries fit; a disabled cache admits nothing, not even 0 bytes."""
        return 0 not in (self.bytes, self.entries) and nbytes <= self.bytes and entries <= self.entries


@dataclass(frozen=True)
class Holding:
    """Number of cache entries of one kind, and the bytes of their values.

    name: the kind, such as "masters" or "copies on cuda:0".
    """

    name: str
    entries: int
    bytes: int


@dataclass(frozen=True)
class CacheStats:
    """Counts since the last `clear`, and the current contents of a cache.

    hits: number of look-ups that found the value, or found another thread building it.
    misses: number of look-ups that began to build the value.
    evictions: number of entries dropped to stay within the budgets.
    build_seconds: time spent on successful builds; builds within builds count once.
    masters: entries of plans, block lists and other values that are no copies.
    copies: entries of values made from masters for a device, one item for each device.
    limits: budgets in bytes and entries.
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
        """Number of all entries, masters and copies."""
        return self.masters.entries + sum(holding.entries for holding in self.copies)

    @property
    def bytes(self) -> int:
        """Bytes of all entries: of their tensors, and roughly of plans, without the overhead of Python objects."""
        return self.masters.bytes + sum(holding.bytes for holding in self.copies)

    @property
    def hit_rate(self) -> float:
        """Hits divided by look-ups; 0 before the first look-up."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        """Return two tables as text: counts of look-ups, and contents."""
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


@dataclass(eq=False, slots=True)  # hashes by identity, which is faster than by key
class Entry:
    """A cached value, with its size in bytes and its place in the order of eviction.

    pattern: texts of the patterns it depends on, concatenated.
    device: the device of a copy made from other cached values; None for a value that is no copy.
    eviction_order: the order that contains this entry, least recently used first; a cache has one order for copies and
        one for all other entries.
    """

    key: Hashable
    value: Any
    nbytes: int
    pattern: str
    device: torch.device | None
    eviction_order: OrderedDict[Entry, None]


@dataclass(eq=False)
class _PendingBuild:
    """A value that one thread is building; other threads wait for `done`."""

    pattern: str
    device: torch.device | None
    thread: int = field(default_factory=threading.get_ident)
    done: Future[Any] = field(default_factory=Future)


class Cache:
    """Thread-safe LRU cache of built values, with budgets of bytes and of entries."""

    def __init__(self, budget_bytes: int, budget_entries: int = DEFAULT_ENTRIES) -> None:
        self._lock = threading.Lock()
        self._this_build = threading.local()  # its `patterns`: text of the patterns of this thread's build
        self._limits, self._bytes = Limits(budget_bytes, budget_entries), 0
        self._entries: dict[Hashable, Entry] = {}
        self._copies: OrderedDict[Entry, None] = OrderedDict()
        self._masters: OrderedDict[Entry, None] = OrderedDict()
        self._building: dict[Hashable, _PendingBuild] = {}
        self._reset_counts()

    @property
    def budget_bytes(self) -> int:
        """Largest number of bytes of all entries together; setting it evicts the excess immediately."""
        return self._limits.bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int) -> None:
        self._set_limits(Limits(value, self.budget_entries))

    @property
    def budget_entries(self) -> int:
        """Largest number of entries; setting it evicts the excess immediately."""
        return self._limits.entries

    @budget_entries.setter
    def budget_entries(self, value: int) -> None:
        self._set_limits(Limits(self.budget_bytes, value))

    def get(
        self,
        key: Hashable,
        build: Callable[[], T],
        nbytes: Callable[[T], int],
        *,
        pattern: Expression | str = "",
        device: torch.device | None = None,
        suffices: Callable[[T], bool] = lambda value: True,
    ) -> T:
        """Return the value of `key`, from the cache or else from `build()`; a value above the budget is not kept.

        nbytes: function that returns the bytes of a value; the bytes that its pattern keeps alive are added.
        pattern: the pattern that the value depends on, or its text, for `forget`; patterns of enclosing builds are
            added.
        device: the device of a value that is a copy of other cached values, else None; copies are evicted first.
        suffices: function that returns False for a cached value too small for this call, such as a mask of fewer
            tokens; the result of `build` then replaces the value.

        While another thread builds the value, the call waits, and raises the error of that build if it fails.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not suffices(entry.value):
                self._remove(entry)
                entry = None
            if entry is not None:
                self._hits += 1
                entry.eviction_order.move_to_end(entry)
                return entry.value
            building = self._building.get(key)
            is_mine = building is None
            if building is None:
                outer, text = getattr(self._this_build, "patterns", None) or "", _json_of(pattern)
                building = _PendingBuild(outer if text in outer else f"{outer} {text}", device)
                self._building[key] = building
            self._misses += is_mine
            self._hits += not is_mine
        if is_mine:
            return self._build(key, build, lambda value: nbytes(value) + _held_bytes(pattern), building)
        assert building.thread != threading.get_ident(), f"a build asks for its own result: {key!r}"
        value = building.done.result()
        if suffices(value):
            return value
        return self.get(key, build, nbytes, pattern=pattern, device=device, suffices=suffices)

    def forget(self, pattern: Expression) -> int:
        """Drop all values that depend on a pattern, or on a combination that contains it; return their number.

        Values that depend on all parts of the pattern in other combinations are dropped, too. Values that are being
        built for the pattern are returned to their callers but not kept.
        """
        # A larger intersection or union contains these parts, but not the text of the whole.
        expression = require_expression(pattern).unpadded
        split = table_split(expression)  # the pairs that are not in a table of keys or blocks are planned separately
        others = [] if split is None or split.others is None else [_texts_of_parts(split.others)]

        def concerns(built: Entry | _PendingBuild) -> bool:
            return any(all(text in built.pattern for text in texts) for texts in (_texts_of_parts(expression), *others))

        with self._lock:
            self._building = {key: each for key, each in self._building.items() if not concerns(each)}
            dropped = [entry for entry in self._entries.values() if concerns(entry)]
            for entry in dropped:
                self._remove(entry)
        log.debug("entries dropped to forget %r: %d", pattern, len(dropped))
        return len(dropped)

    def clear(self) -> None:
        """Drop every entry, and reset the statistics to zero; values that are being built will not be kept."""
        with self._lock:
            dropped, self._bytes = len(self._entries), 0
            for kept in (self._entries, self._copies, self._masters, self._building):
                kept.clear()
            self._reset_counts()
        log.debug("entries dropped to clear the cache: %d", dropped)

    def stats(self) -> CacheStats:
        """Return the current statistics; str() formats them as tables."""
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        with self._lock:
            counts, limits = (self._hits, self._misses, self._evictions, self._build_seconds), self._limits
            for each in self._entries.values():
                sizes["masters" if each.device is None else f"copies on {each.device}"].append(each.nbytes)
        named = ("masters", sizes.pop("masters", [])), *sorted(sizes.items())
        masters, *copies = (Holding(name, len(held), sum(held)) for name, held in named)
        return CacheStats(*counts, masters, tuple(copies), limits)

    def __repr__(self) -> str:
        """Return a text with the numbers of entries and bytes, and the budgets of both.

        It takes no lock, so that a debugger can call it at any time.
        """
        held = f"{len(self._entries):,} of {self.budget_entries:,} entries"
        return f"Cache({held}, {bytes_text(self._bytes)} of {bytes_text(self.budget_bytes)})"

    def _reset_counts(self) -> None:
        self._hits = self._misses = self._evictions = 0
        self._build_seconds = 0.0

    def _build(self, key: Hashable, build: Callable[[], T], nbytes: Callable[[T], int], mine: _PendingBuild) -> T:
        begin, outer = time.perf_counter(), getattr(self._this_build, "patterns", None)
        self._this_build.patterns = mine.pattern
        try:
            with suspended_torch_modes():
                value = build()
            eviction_order = self._masters if mine.device is None else self._copies
            entry = Entry(key, value, nbytes(value), mine.pattern, mine.device, eviction_order)
        except BaseException as error:
            # Waiting threads get this error too; the next call may try again.
            with self._lock:
                self._end_build(key, mine)
            mine.done.set_exception(error)
            raise
        finally:
            self._this_build.patterns = outer
        seconds, gone = time.perf_counter() - begin, []
        with self._lock:
            limits = self._limits
            kept = self._end_build(key, mine) and limits.admit(entry.nbytes, 1)
            if kept:
                gone = self._evict(entry.nbytes, 1)
                self._entries[key] = entry
                eviction_order[entry] = None
                self._bytes += entry.nbytes
            if outer is None:  # not nested in another build
                self._build_seconds += seconds
        mine.done.set_result(value)
        why = "" if kept else "; not kept, as it is over the budget or was forgotten meanwhile"
        _log_entries("built", [entry], f" in {1e3 * seconds:.2f} ms{why}")
        _log_entries("evicted", gone, ", used longest ago")
        return value

    def _end_build(self, key: Hashable, mine: _PendingBuild) -> bool:
        """Remove a finished build from the builds in progress; return True if it was among them.

        If it was not, `forget` or `clear` had removed it, and its value must not be kept.
        """
        return self._building.get(key) is mine and self._building.pop(key) is mine

    def _set_limits(self, limits: Limits) -> None:
        with self._lock:
            self._limits = limits
            gone = self._evict(0, 0)
        _log_entries("evicted", gone, ", used longest ago")

    def _evict(self, coming_bytes: int, coming_entries: int) -> list[Entry]:
        """Evict entries until these additional bytes and entries fit, or none are left; return the evicted entries.

        Copies go before masters, the least recently used first.
        """
        gone, limits = [], self._limits
        while self._entries and not limits.admit(self._bytes + coming_bytes, len(self._entries) + coming_entries):
            gone.append(next(iter(self._copies or self._masters)))
            self._remove(gone[-1])
        self._evictions += len(gone)
        return gone

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key], entry.eviction_order[entry]
        self._bytes -= entry.nbytes


def _log_entries(what: str, entries: list[Entry], how: str) -> None:
    """Log one DEBUG line for each entry: `what` happened to it, such as "evicted", and `how`.

    Do not call it with the lock held: a log handler may use the cache.
    """
    if entries and debug_wanted():
        for each in entries:
            name = str(each.key[0] if isinstance(each.key, tuple) and each.key else each.key).replace("_", " ")
            where = "" if each.device is None else f" on {each.device}"
            log.debug(
                "%s %s of %s%s: %s%s", what, name, pattern_text(each.pattern), where, bytes_text(each.nbytes), how
            )


def debug_wanted() -> bool:
    return log.isEnabledFor(logging.DEBUG)


def pattern_text(text: str) -> str:
    """Return the first pattern of a text as a Python expression, for a line of a log; "any pattern" for "".

    text: JSON texts of patterns, one after another. If the first cannot be read, `text` itself is returned. Both are
        shortened by `shortened_line`.
    """
    text = text.strip()
    if not text:
        return "any pattern"
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return shortened_line(read_text(text[:end]))
    except (ValueError, RecursionError):  # the custom function is gone, or the text nests too deep
        return shortened_line(text)


def shortened_line(value: object) -> str:
    """Return str(value), shortened to at most 160 characters and an ellipsis."""
    return shortened(str(value), _LONGEST_TEXT)


def _held_bytes(pattern: Expression | str) -> int:
    """Return the bytes of tensors that a pattern, or the pattern of a JSON text, keeps alive; 0 for ""."""
    expression = read_text(pattern) if isinstance(pattern, str) and pattern else pattern
    return 0 if isinstance(expression, str) else sum(leaf.held_bytes for leaf in set(expression.leaves()))


def _texts_of_parts(expression: Expression) -> list[str]:
    return [_json_of(part) for branch in expression.branches() for part in getattr(branch, "parts", (branch,))]


def _json_of(pattern: Expression | str) -> str:
    """Return the JSON text of a pattern, with names of run-time tensors instead of values; a string unchanged."""
    return pattern if isinstance(pattern, str) else as_written(pattern).text


def _read_budget(variable: str, unit: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise ValueError(f"{variable} must be a whole number of {unit}, such as {default}; got {text!r:.40}")
    return int(text)


def bytes_from_environment() -> int:
    return _read_budget(BYTES_VARIABLE, "bytes", DEFAULT_BYTES)


def entries_from_environment() -> int:
    return _read_budget(ENTRIES_VARIABLE, "entries", DEFAULT_ENTRIES)


_cache: Cache | None = None
_cache_lock = threading.Lock()


def cache() -> Cache:
    """Return the process-wide cache of plans and block lists.

    Environment variables FLEXDILATED_CACHE_BYTES and FLEXDILATED_CACHE_ENTRIES set its initial budgets, by default
    256 MiB and 16,384 entries. Raises ValueError if one is not a whole number of at most 18 digits.

    >>> masks.cache().clear()
    """
    global _cache
    if _cache is None:
        with _cache_lock:
            if _cache is None:
                _cache = Cache(bytes_from_environment(), entries_from_environment())
    return _cache
