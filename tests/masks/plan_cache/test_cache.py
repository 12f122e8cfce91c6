"""The cache: bounded in bytes, copies out first, one build for many threads; what the library keeps and forgets."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.plan_cache import _cache, bytes_from_environment, entries_from_environment
from flexdilated.masks.plan_cache._cache import Cache
from flexdilated.masks.planning.lowering._term import Term
from tests.support.compilers import without_inductor


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


META = torch.device("meta")


def look_up(cache: Cache, key: str, nbytes: int, device: torch.device | None = None) -> bool:
    built = []
    assert cache.get(key, lambda: built.append(1) or key, lambda value: nbytes, device=device) == key
    return not built


def held(cache: Cache) -> list[str]:
    return [str(entry.key) for entry in (*cache._copies, *cache._masters)]


@dataclass
class Held:
    nbytes: int
    is_master: bool
    last_use: int


class Model:
    """The rule of eviction, one sort each time."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self.held: dict[int, Held] = {}

    def fits(self, nbytes: int, entries: int) -> bool:
        """A budget of 0 holds nothing, whatever it weighs."""
        return min(self.max_bytes, self.max_entries) > 0 and nbytes <= self.max_bytes and entries <= self.max_entries

    def evict(self, spare: int | None = None) -> int:
        gone = 0
        for key in sorted(self.held, key=lambda key: (self.held[key].is_master, self.held[key].last_use)):
            if self.fits(sum(each.nbytes for each in self.held.values()), len(self.held)):
                break
            if key != spare:
                del self.held[key]
                gone += 1
        return gone


STEPS = st.tuples(
    st.sampled_from(["use", "use", "use", "bytes", "entries", "clear"]), st.sampled_from([0, 0, 0, 0, *range(1, 12)])
)


@given(st.lists(STEPS, max_size=60))
def test_eviction_follows_its_rule(steps):
    """Keys 0 to 11 weigh 3 times their number; the even ones are copies."""
    cache, model, evictions = Cache(60, 6), Model(60, 6), 0
    for now, (step, key) in enumerate(steps):
        if step == "use":
            was_there = look_up(cache, str(key), 3 * key, None if key % 2 else META)
            assert was_there == (key in model.held)
            if was_there:
                model.held[key].last_use = now
            elif model.fits(3 * key, 1):
                model.held[key] = Held(3 * key, key % 2 == 1, now)
                evictions += model.evict(spare=key)
        elif step == "bytes":
            cache.budget_bytes = model.max_bytes = 5 * key
            evictions += model.evict()
        elif step == "entries":
            cache.budget_entries = model.max_entries = key
            evictions += model.evict()
        else:
            cache.clear()
            model.held, evictions = {}, 0
        order = sorted(model.held, key=lambda key: (model.held[key].is_master, model.held[key].last_use))
        assert held(cache) == [str(key) for key in order]
        stats = cache.stats()
        assert (stats.bytes, stats.entries) == (sum(each.nbytes for each in model.held.values()), len(model.held))
        assert stats.evictions == evictions


pytestmark = pytest.mark.usefixtures("without_masks")

WINDOW = masks.causal() & masks.local_window(left=40, right=0)
LONGNET = masks.longnet([16, 48], [1, 3]) & masks.causal()


@pytest.fixture
def cache(monkeypatch) -> Cache:
    monkeypatch.setattr(_cache, "_cache", Cache(1 << 30))
    return masks.cache()


@pytest.fixture
def built(monkeypatch) -> list[Term]:
    terms: list[Term] = []
    build = Term.blocks

    def watched(self: Term, *sides: int, **options: bool):
        terms.append(self)
        return build(self, *sides, **options)

    monkeypatch.setattr(Term, "blocks", watched)
    return terms


def mask(device: str | torch.device = "cpu", pattern=WINDOW, num_tokens: int = 500):
    return masks.block_mask(pattern, num_tokens, num_heads=2, device=device, block_size=64)


def test_one_master_and_a_copy_on_each_device(cache, built):
    here, there = mask("cpu"), mask("meta")
    assert here is mask("cpu")
    assert there is mask("meta") is mask(torch.device("meta"))  # with and without its number
    assert (here.kv_indices.device.type, there.kv_indices.device.type) == ("cpu", "meta")
    assert torch.equal(here.kv_num_blocks.cpu(), mask("cpu").kv_num_blocks)
    assert there.kv_num_blocks.shape == here.kv_num_blocks.shape
    assert len(built) == 1
    stats = cache.stats()
    assert [copies.name for copies in stats.copies] == ["copies on cpu", "copies on meta"]
    assert stats.masters.entries == 1
    assert stats.entries == 3
    assert stats.bytes == stats.masters.bytes + sum(copies.bytes for copies in stats.copies)


def test_a_pattern_is_forgotten_in_every_size_and_on_every_device(cache):
    q = torch.randn(1, 2, 100, 8)
    for pattern in (WINDOW, LONGNET):
        for device in ("cpu", "meta"):
            for num_tokens in (100, 200):
                mask(device, pattern, num_tokens)
        fd.attend(q, q, q, pattern)
    entries = cache.stats().entries
    dropped = cache.forget(LONGNET)
    assert dropped == 8  # two masters, four copies, a plan and a program
    assert cache.stats().entries == entries - dropped
    assert cache.forget(LONGNET) == 0
    misses = cache.stats().misses
    mask("meta", WINDOW, 200)
    fd.attend(q, q, q, WINDOW)
    assert cache.stats().misses == misses
    mask("meta", LONGNET, 200)
    assert cache.stats().misses > misses


def test_a_value_still_being_built_for_a_forgotten_pattern_is_not_kept():
    cache = Cache(100)

    def ask(build) -> str:
        return cache.get("key", build, len, pattern=WINDOW.text)

    with under_way(cache, "stale", pattern=WINDOW.text) as (_, stale, gate):
        assert cache.forget(WINDOW) == 0
        assert ask(lambda: "fresh") == "fresh"  # does not wait for the stale one
        gate.set()
        assert stale.result(250) == "stale"
    assert ask(str) == "fresh"


def test_what_a_build_asks_for_is_forgotten_with_it():
    """Parts built for another text, as rules with the values of run-time tensors in place, belong to the whole."""
    cache = Cache(100)
    part = LONGNET.text
    cache.get("whole", lambda: cache.get("part", str, len, pattern=part), len, pattern=WINDOW.text)
    cache.get("another", str, len, pattern=part)
    assert cache.forget(WINDOW) == 2
    assert cache.forget(LONGNET) == 1


def test_run_time_tensors_are_versions(cache):
    """Other values are other entries; forgetting the pattern drops those of all values, and no others."""
    q = torch.randn(1, 2, 60, 8)
    ids = [torch.arange(60) // length for length in (20, 30)]
    outs = [fd.attend(q, q, q, masks.causal() & masks.documents(each)) for each in ids]
    assert not torch.equal(*outs)
    misses = cache.stats().misses
    for each, out in zip(ids, outs, strict=True):
        assert torch.equal(fd.attend(q, q, q, masks.causal() & masks.documents(each.clone())), out)
    assert cache.stats().misses == misses
    masks.block_mask(masks.causal() & masks.documents(ids[0]), 60, num_heads=2)
    mask()
    assert cache.forget(masks.documents(ids[0])) >= 6  # plan and program of each, master and copy of one
    assert cache.stats().entries == 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["aten", pytest.param("flex", marks=pytest.mark.thorough)])
def test_eviction_neither_changes_results_nor_compiles_anew(cache, engine):
    """With no budget every call outside a graph builds its tables again; what was compiled stays."""
    cache.budget_bytes = 0
    pattern = masks.dilated(16, 2) & masks.causal()
    q, k, v = torch.randn(3, 1, 2, 70, 16)
    exact = fd.attend(q, k, v, pattern, engine="reference")

    def attend(q, k, v):
        return fd.attend(q, k, v, pattern, engine=engine)

    with without_inductor():
        for call in (attend, torch.compile(attend, fullgraph=True)):
            counts = []
            for _ in range(3):
                assert_close(call(q, k, v), exact, rtol=1e-4, atol=1e-5)
                counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            assert counts[0] == counts[1] == counts[2]
    assert cache.stats().entries == 0


def test_tensors_that_a_rule_reads_count_with_its_plans() -> None:
    """Otherwise rules over long documents, new in each step, would fill the memory within the budget."""
    ids, q = torch.arange(300_000) // 50_000, torch.randn(1, 1, 64, 8)
    masks.cache().clear()
    fd.attend(q, q, q, masks.custom(lambda b, h, i, j: ids[i] == ids[j]))
    stats = masks.cache().stats()
    assert stats.bytes >= ids.nbytes
