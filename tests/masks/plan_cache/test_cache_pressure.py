"""The cache when it is full: copies go before masters, pinned entries stay, and threads may do all at once."""

import random
import threading
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated.masks.plan_cache._cache import Cache
from flexdilated.masks.plan_cache._cache_store import Entry, Limits, Store
from tests.support.threads import side_by_side

META = torch.device("meta")


def look_up(cache: Cache, key: str, nbytes: int, device: torch.device | None = None) -> bool:
    """Whether the cache had it."""
    built = []
    assert cache.get(key, lambda: built.append(1) or key, lambda value: nbytes, device=device) == key
    return not built


def held(cache: Cache) -> list[str]:
    return [str(entry.key) for entry in cache._store.entries()]


def test_copies_go_before_masters_and_the_oldest_first():
    cache = Cache(105)
    for key in "abc":
        look_up(cache, f"master {key}", 10)
        look_up(cache, f"copy {key}", 20, META)
    look_up(cache, "copy a", 20, META)  # now b is the oldest copy
    look_up(cache, "master d", 20)
    assert held(cache) == ["copy c", "copy a", "master a", "master b", "master c", "master d"]
    cache.budget_bytes = 45
    assert held(cache) == ["master b", "master c", "master d"]
    assert cache.stats().evictions == 4


def test_the_number_of_entries_is_bounded_too():
    cache = Cache(1000, 3)
    for key in "abcd":
        look_up(cache, key, 1)
    assert held(cache) == ["b", "c", "d"]
    cache.budget_entries = 1
    assert held(cache) == ["d"]
    cache.budget_entries = 0
    look_up(cache, "e", 1)
    assert held(cache) == []


def test_what_is_pinned_stays():
    cache = Cache(100)
    look_up(cache, "found", 30)
    with cache.pin() as pins:
        assert look_up(cache, "found", 30)
        look_up(cache, "built", 50, META)
    for number in range(20):
        look_up(cache, f"passing {number}", 20)
    stats = cache.stats()
    assert held(cache) == ["passing 19", "found", "built"]
    assert (stats.pinned.entries, stats.pinned.bytes, stats.bytes) == (2, 80, 100)
    assert not look_up(cache, "too large beside what is pinned", 21)
    assert not look_up(cache, "too large beside what is pinned", 21)
    cache.budget_bytes = 0
    assert held(cache) == ["found", "built"]
    pins.release()
    assert cache.stats().entries == cache.stats().pinned.bytes == 0


def test_pins_may_exceed_the_budget():
    """Whoever pins wants it kept; what is not pinned then finds no room."""
    cache = Cache(100)
    look_up(cache, "passing", 20)
    with cache.pin():
        look_up(cache, "large", 90)
        look_up(cache, "larger", 200)
    assert held(cache) == ["large", "larger"]
    assert not look_up(cache, "passing", 20)
    assert held(cache) == ["large", "larger"]


def test_an_entry_stays_until_the_last_pin_goes():
    cache = Cache(50)
    with cache.pin() as outer:
        look_up(cache, "a", 50)
        with cache.pin() as inner:
            look_up(cache, "a", 50)
            look_up(cache, "a", 50)
    inner.release()
    inner.release()
    look_up(cache, "b", 50)
    assert held(cache) == ["a"]
    outer.release()
    look_up(cache, "b", 50)
    assert held(cache) == ["b"]


def test_pins_of_a_block_that_failed_are_released():
    cache = Cache(100)

    def warm_up() -> None:
        with cache.pin():
            look_up(cache, "a", 10)
            raise KeyError("a")

    with pytest.raises(KeyError):
        warm_up()
    assert cache.stats().pinned.entries == 0
    look_up(cache, "b", 10)
    assert cache.stats().pinned.entries == 0


def test_clear_drops_what_is_pinned():
    cache = Cache(100)
    with cache.pin() as pins:
        look_up(cache, "a", 10)
    cache.clear()
    assert not look_up(cache, "a", 10)
    pins.release()  # of the entry that is gone, not of the new one
    assert (cache.stats().bytes, cache.stats().pinned.bytes) == (10, 0)


def test_what_another_thread_looks_up_is_pinned_too():
    cache = Cache(100)
    with cache.pin():
        side_by_side([partial(look_up, cache, "a", 10)], seconds=20)
    assert cache.stats().pinned.entries == 1


@dataclass
class Held:
    """What the plain model below knows of an entry."""

    nbytes: int
    is_master: bool
    last_use: int
    pins: int = 0


class Model:
    """The rule of the store, one sort an eviction."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}

    def evict(self, limits: Limits, spare: int | None) -> list[int]:
        gone = []
        order = sorted(self.held, key=lambda key: (self.held[key].is_master, self.held[key].last_use))
        for key in order:
            if sum(each.nbytes for each in self.held.values()) <= limits.bytes and len(self.held) <= limits.entries:
                break
            if not self.held[key].pins and key != spare:
                del self.held[key]
                gone.append(key)
        return gone


STEPS = st.tuples(st.sampled_from(["use", "use", "use", "pin", "unpin", "limit", "drop"]), st.integers(0, 11))


@given(st.lists(STEPS, max_size=60))
def test_the_store_follows_its_rule(steps):
    """Keys 0 to 11 weigh 3 times their number; the even ones are copies."""
    store, model, limits = Store(Limits(60, 6)), Model(), Limits(60, 6)
    store.limit(limits)
    for now, (step, key) in enumerate(steps):
        mine, theirs = store.find(key), model.held.get(key)
        if theirs is not None:
            theirs.last_use = now
        gone: list[Entry] = []
        lost: list[int] = []
        if step == "use" and mine is None:
            if store.has_room(3 * key):
                gone = store.add(Entry(key, key, 3 * key, pattern="", device=None if key % 2 else META))
                model.held[key] = Held(3 * key, key % 2 == 1, now)
                lost = model.evict(limits, key)
        elif step == "pin" and mine is not None and theirs is not None:
            store.pin(mine)
            theirs.pins += 1
        elif step == "unpin" and mine is not None and theirs is not None and theirs.pins:
            gone = store.unpin(mine)
            theirs.pins -= 1
            lost = model.evict(limits, None)
        elif step == "limit":
            limits = Limits(5 * key + 5, key)
            gone, lost = store.limit(limits), model.evict(limits, None)
        elif step == "drop":
            assert store.drop(lambda entry, key=key: entry.key == key) == (theirs is not None)
            model.held.pop(key, None)
        assert [entry.key for entry in gone] == lost
        assert {entry.key for entry in store.entries()} == set(model.held)
        assert store.bytes == sum(each.nbytes for each in model.held.values())
        assert store.pinned_bytes == sum(each.nbytes for each in model.held.values() if each.pins)
        assert len(store) == len(model.held)


def test_sixty_four_threads_build_once():
    cache, together, built = Cache(100), threading.Barrier(64), []

    def build() -> object:
        time.sleep(0.05)
        built.append(1)
        return object()

    def ask() -> object:
        together.wait(250)
        return cache.get("key", build, lambda value: 10)

    values = side_by_side([ask] * 64, seconds=60)
    assert len(built) == 1
    assert len({id(value) for value in values}) == 1
    assert (cache.stats().hits, cache.stats().misses) == (63, 1)


def test_threads_may_do_everything_at_once():
    """Look up, nested too, pin, change the limits, clear. The books are right throughout."""
    cache, together = Cache(300, 20), threading.Barrier(8)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        together.wait(250)
        for _ in range(300):
            key, what = draw.randrange(1, 40), draw.random()
            if what < 0.9:
                assert find(key) == key
            elif what < 0.96:
                with cache.pin() as pins:
                    find(key)
                pins.release()
            elif what < 0.99:
                cache.budget_bytes, cache.budget_entries = draw.randrange(400), draw.randrange(30)
            else:
                cache.clear()
            stats = cache.stats()
            assert 0 <= stats.pinned.bytes <= stats.bytes

    def find(key: int) -> int:
        """The key, built of half of it and the rest."""
        half = key // 2
        return cache.get(
            key,
            lambda: (find(half) if half else 0) + half + key % 2,
            lambda value: 10 + value,
            device=META if key % 2 else None,
        )

    side_by_side([partial(work, seed) for seed in range(8)], seconds=120)
    assert cache.stats().pinned.entries == 0
    cache.budget_bytes = 0
    assert (cache.stats().entries, cache.stats().bytes, cache._store.pinned_bytes) == (0, 0, 0)
    assert (cache._building, cache._open_pins) == ({}, [])
