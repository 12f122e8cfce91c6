"""The cache: bounded in bytes, least recently used out first, one build for many threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexdilated import masks
from flexdilated.masks._cache import Cache, budget_from_environment


def size(value: int) -> int:
    return value


def put(cache: Cache, *values: int) -> None:
    for value in values:
        assert cache.get(value, lambda value=value: value, size) == value


def holds(cache: Cache, key: int) -> bool:
    before = cache.stats().misses
    put(cache, key)
    return cache.stats().misses == before


def test_a_value_is_built_once():
    cache, built = Cache(100), []
    for _ in range(3):
        assert cache.get("key", lambda: built.append(1) or [7], lambda value: 10) is cache.get("key", list, len)
    stats = cache.stats()
    assert len(built) == 1
    assert (stats.hits, stats.misses, stats.entries, stats.bytes) == (5, 1, 1, 10)
    assert stats.hit_rate == 5 / 6


def test_no_lookup_is_no_hit_rate():
    assert Cache(1).stats().hit_rate == 0.0


def test_the_least_recently_used_leaves_first():
    cache = Cache(60)
    put(cache, 10, 20, 30)
    put(cache, 10)  # now 20 is the oldest
    put(cache, 5)
    assert cache.stats().bytes == 45
    assert cache.stats().evictions == 1
    assert holds(cache, 10)
    assert holds(cache, 30)
    assert not holds(cache, 20)


def test_never_over_budget():
    cache = Cache(50)
    for value in (20, 13, 40, 7, 20, 50, 3, 49):
        put(cache, value)
        assert cache.stats().bytes <= 50


def test_a_value_over_the_budget_is_returned_but_not_kept():
    cache = Cache(50)
    put(cache, 20, 51)
    assert not holds(cache, 51)
    assert holds(cache, 20)
    assert cache.stats().evictions == 0


def test_a_smaller_budget_evicts_at_once():
    cache = Cache(100)
    put(cache, 10, 20, 30)
    cache.budget_bytes = 35
    assert (cache.budget_bytes, cache.stats().bytes, cache.stats().entries) == (35, 30, 1)
    cache.budget_bytes = 0
    assert cache.stats().entries == 0


def test_clear_forgets_values_and_counts():
    cache = Cache(100)
    put(cache, 10, 10)
    cache.clear()
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.bytes, stats.build_seconds) == (0, 0, 0, 0, 0.0)
    assert not holds(cache, 10)


def test_many_threads_build_once():
    cache, everyone, built = Cache(100), threading.Barrier(8), []
    gate = threading.Event()

    def build() -> list[int]:
        built.append(1)
        gate.wait(10)
        return [1]

    def ask() -> list[int]:
        everyone.wait(10)
        return cache.get("key", build, len)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask) for _ in range(8)]
        gate.set()
        values = [future.result(20) for future in asked]
    assert len(built) == 1
    assert all(value is values[0] for value in values)


def test_two_keys_build_side_by_side():
    """A long build does not hold up another key's."""
    cache, gate = Cache(100), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.get, "slow", lambda: gate.wait(10), lambda value: 1)
        put(cache, 10)
        assert not slow.done()
        gate.set()
        assert slow.result(20)


def test_an_error_reaches_every_caller_and_is_not_kept():
    cache = Cache(100)

    def fail() -> int:
        raise ValueError("no such plan")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such plan"):
            cache.get("key", fail, size)
    assert cache.get("key", lambda: 3, size) == 3
    assert cache.stats().entries == 1


def test_whoever_waits_for_a_build_gets_its_error():
    cache, building, gate = Cache(100), threading.Event(), threading.Event()

    def fail() -> int:
        building.set()
        gate.wait(10)
        raise ValueError("no such plan")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "key", fail, size)
        building.wait(10)
        second = pool.submit(cache.get, "key", lambda: 3, size)
        while cache.stats().hits == 0:  # until the second waits for the first
            threading.Event().wait(0.001)
        gate.set()
        for future in (first, second):
            with pytest.raises(ValueError, match="no such plan"):
                future.result(20)


@pytest.mark.parametrize("value", [-1, 1.5, "many", None, True])
def test_bad_budget(value):
    cache = Cache(100)
    put(cache, 10)
    with pytest.raises(ValueError, match="budget_bytes must be"):
        cache.budget_bytes = value
    assert cache.budget_bytes == 100
    assert holds(cache, 10)


@pytest.mark.parametrize("text", ["", "1GB", "-5", "1.5", "٣", " 7"])
def test_an_environment_variable_that_does_not_parse(monkeypatch, text):
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", text)
    with pytest.raises(ValueError, match="FLEXDILATED_CACHE_BYTES must be a whole number of bytes"):
        budget_from_environment()


def test_the_environment_sets_the_budget(monkeypatch):
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "12345")
    assert budget_from_environment() == 12345
    monkeypatch.delenv("FLEXDILATED_CACHE_BYTES")
    assert budget_from_environment() == 1 << 30


def test_there_is_one_cache():
    assert masks.cache() is masks.cache()
    with ThreadPoolExecutor(4) as pool:
        assert len({id(cache) for cache in pool.map(lambda _: masks.cache(), range(8))}) == 1
