"""What the cache says in the log when its budget is too small: once, with the budget that would have sufficed."""

import re
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.plan_cache import _cache
from flexdilated.masks.plan_cache._cache import Cache

pytestmark = pytest.mark.usefixtures("without_masks")

META = torch.device("meta")


def use(cache: Cache, keys: Iterable[int]) -> None:
    """Key n weighs n bytes; odd ones are copies."""
    for key in keys:
        cache.get(key, lambda key=key: key, lambda value: value, device=META if key % 2 else None)


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(_cache._log, "warning", said.append)
    return said


@pytest.mark.parametrize("budget", [50, 59])
def test_thrashing_is_said_once_with_the_budget_that_suffices(lines, budget):
    """One byte less does not suffice; with the budget that is named each is built once, as drawn below too."""
    use(Cache(budget), [10, 20, 30] * 100)
    (line,) = lines
    facts = "8 of the last 11 builds", "budget_bytes=60", "_CACHE_BYTES", f"it is {budget}"
    assert all(fact in line for fact in facts)


def test_too_few_entries_are_named_as_such(lines):
    cache = Cache(1000, 2)
    use(cache, [10, 20, 30] * 100)
    assert len(lines) == 1
    assert "; budget_entries=3 (FLEXDILATED_CACHE_ENTRIES; it is 2) would have sufficed" in lines[0]


def test_passing_through_is_no_thrashing(lines):
    """Values that are evicted and never asked for again, or seldom, need no larger budget."""
    cache = Cache(140)
    use(cache, range(2, 50, 2))
    use(cache, [key for number in range(50, 100, 2) for key in (number, 40)])
    assert cache.stats().evictions > 30
    assert lines == []


def test_thrashing_is_said_again_when_things_change(lines):
    cache = Cache(50)
    use(cache, [10, 20, 30] * 100)
    cache.budget_bytes = 55
    use(cache, [10, 20, 30] * 100)
    assert len(lines) == 2
    use(cache, [12, 22, 32] * 100)  # hardly more
    assert len(lines) == 2
    use(cache, [16, 26, 36, 46] * 100)  # twice as much
    assert len(lines) == 3
    assert "budget_bytes=124" in lines[2]
    cache.clear()
    use(cache, [10, 20, 30] * 100)
    assert len(lines) == 4


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12, unique=True),
    st.integers(0, 100),
    st.integers(0, 12),
)
def test_the_named_budget_suffices(keys, budget, entries):
    """Whatever goes round, masters and copies: with the budgets named, each is built once."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cache._log, "warning", said.append)
        cache = Cache(max(budget, *keys), max(1, entries))
        use(cache, keys * 20)
        rebuilt = cache.stats().misses > len(keys)
        named = dict(re.findall(r"(budget_\w+)=(\d+) \(\w+; it is", "".join(said)))
        assert bool(named) == rebuilt
        cache.clear()
        for name, value in named.items():
            setattr(cache, name, int(value))
        use(cache, keys * 20)
    assert cache.stats().misses == len(keys)


def test_a_budget_that_cannot_hold_one_plan(lines, monkeypatch):
    """attend works, uncached; that is said once, with the size of the largest value."""
    monkeypatch.setattr(_cache, "_cache", Cache(100))
    pattern = masks.longnet([16, 48], [1, 3]) & masks.causal()
    q, k, v = torch.randn(3, 1, 2, 60, 8, dtype=torch.float64)
    exact = fd.attend(q, k, v, pattern, engine="reference")
    for _ in range(3):
        torch.testing.assert_close(fd.attend(q, k, v, pattern), exact)
    stats = masks.cache().stats()
    assert (stats.entries, stats.hits, stats.evictions) == (0, 0, 0)
    assert stats.misses >= 6
    assert len(lines) == 1
    match = re.match(r"the cache cannot hold a value of (\d+) bytes, which is built anew at each use: ", lines[0])
    assert match
    assert "budget_bytes=100 (FLEXDILATED_CACHE_BYTES)" in lines[0]
    masks.cache().budget_bytes = int(match[1])
    fd.attend(q, k, v, pattern)
    assert masks.cache().stats().entries > 0
    assert len(lines) == 1


def test_what_pins_leave_no_room_for_is_said_too(lines):
    cache = Cache(100)
    with cache.pin():
        use(cache, [90])
    use(cache, [12, 12])
    assert len(lines) == 1
    assert lines[0].endswith(", 90 bytes pinned")
    cache.clear()
    use(cache, [12, 12])
    assert len(lines) == 1


def test_the_line_goes_to_the_logger_of_the_library(caplog):
    cache = Cache(5)
    use(cache, [10, 10])
    assert [(record.name, record.levelname) for record in caplog.records] == [("flexdilated", "WARNING")]
