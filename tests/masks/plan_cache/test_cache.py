"""The cache: bounded in bytes, least recently used out first, one build for many threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from flexdilated.masks.plan_cache import bytes_from_environment, entries_from_environment
from flexdilated.masks.plan_cache._cache import Cache


def size(value: int) -> int:
    return value


def put(cache: Cache, *values: int) -> None:
    for value in values:
        assert cache.get(value, lambda value=value: value, size) == value


def test_a_value_is_built_once():
    cache, built = Cache(100), []
    assert cache.stats().hit_rate == 0.0
    for _ in range(3):
        assert cache.get("key", lambda: built.append(1) or [7], lambda value: 10) is cache.get("key", list, len)
    stats = cache.stats()
    assert len(built) == 1
    assert (stats.hits, stats.misses, stats.entries, stats.bytes) == (5, 1, 1, 10)
    assert stats.hit_rate == 5 / 6
    cache.clear()
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.bytes, stats.build_seconds) == (0, 0, 0, 0, 0.0)


def test_a_value_too_small_is_built_again_in_its_place():
    """Larger ones serve smaller calls, and one entry stays."""
    cache = Cache(100)

    def get(wanted: int) -> int:
        return cache.get("key", lambda: wanted, size, suffices=lambda value: value >= wanted)

    assert [get(wanted) for wanted in (3, 2, 5, 5, 4, 9)] == [3, 3, 5, 5, 5, 9]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.bytes, stats.evictions) == (3, 3, 1, 9, 0)
    assert [get(wanted) for wanted in range(10, 60)] == list(range(10, 60))  # all together exceed the budget
    assert (cache.stats().bytes, cache.stats().evictions) == (59, 0)


@contextmanager
def under_way(cache: Cache, result: Any, **options) -> Iterator[tuple[ThreadPoolExecutor, Future, threading.Event]]:
    """A build of "key" that has begun, and that waits for the event; a result that is an error is raised."""
    started, gate = threading.Event(), threading.Event()

    def slowly() -> Any:
        started.set()
        gate.wait(250)
        if isinstance(result, Exception):
            raise result
        return result

    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(cache.get, "key", slowly, lambda value: 3, **options)
        assert started.wait(250)
        try:
            yield pool, slow, gate
        finally:
            gate.set()


def test_other_keys_do_not_wait_and_a_thread_that_waits_for_a_value_too_small_builds_its_own():
    cache = Cache(100)
    with under_way(cache, 3) as (pool, slow, gate):
        others = [
            pool.submit(cache.get, "key", lambda: 8, size, suffices=lambda value, least=least: value >= least)
            for least in (2, 8)
        ]
        put(cache, 10)
        assert not slow.done()
        gate.set()
        assert slow.result(250) == 3
        assert others[0].result(250) in (3, 8)
        assert others[1].result(250) == 8
    assert cache.stats().bytes == 18


def test_an_error_reaches_every_caller_and_is_not_kept():
    """Those who wait for the build too; also that of a size that cannot be told."""
    cache = Cache(100)
    for _ in range(2):
        with under_way(cache, ValueError("no such plan")) as (pool, slow, gate):
            hits = cache.stats().hits
            other = pool.submit(cache.get, "key", lambda: 3, size)
            while cache.stats().hits == hits:  # until the second waits for the first
                threading.Event().wait(0.001)
            gate.set()
            for future in (slow, other):
                with pytest.raises(ValueError, match="no such plan"):
                    future.result(250)
        with pytest.raises(TypeError):
            cache.get("key", lambda: 3, len)
        assert cache.stats().entries == 0
    assert cache.get("key", lambda: 3, size) == 3
    assert cache.stats().entries == 1


def test_a_build_may_ask_for_other_values():
    """From many threads, each asking for values that share parts: all are built once, and none waits for ever."""
    cache, built = Cache(1 << 20), []

    def build(number: int) -> list[int]:
        built.append(number)
        parts = [cache.get(part, lambda part=part: build(part), len) for part in range(number)]
        return [number, *(part[0] for part in parts)]

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(cache.get, number, lambda number=number: build(number), len) for number in [9, 5, 7] * 8]
        values = [future.result(250) for future in asked]
    assert sorted(built) == list(range(10))
    assert values[0] == [9, *range(9)]


def test_a_build_that_asks_for_itself_fails_at_once():
    cache = Cache(100)
    with pytest.raises(AssertionError, match="asks for its own result: 'key'"):
        cache.get("key", lambda: cache.get("key", list, len), len)
    assert cache.get("key", lambda: [1], len) == [1]


@pytest.mark.parametrize(
    ("variable", "read", "unit", "default"),
    [
        ("FLEXDILATED_CACHE_BYTES", bytes_from_environment, "bytes", 1 << 28),
        ("FLEXDILATED_CACHE_ENTRIES", entries_from_environment, "entries", 1 << 14),
    ],
)
def test_the_environment_sets_the_budget(monkeypatch, variable, read, unit, default):
    monkeypatch.setenv(variable, "12345")
    assert read() == 12345
    monkeypatch.delenv(variable)
    assert read() == default
    for text in ("", "1GB", "-5", "1.5", "٣", " 7", "9" * 5000):
        monkeypatch.setenv(variable, text)
        with pytest.raises(ValueError, match=f"{variable} must be a whole number of {unit}, such as"):
            read()
