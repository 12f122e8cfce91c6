"""`fd.stats()`: one value for cache, pools and the source of plans; what it counts is what happened."""

import gc
import json
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import BufferPool
from flexdilated.masks.plan_cache import _cache
from flexdilated.masks.plan_cache._cache import Cache
from flexdilated.observe import _stats

PATTERN = masks.longnet([16, 64], [1, 4]) & masks.causal()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch) -> Cache:
    cache = Cache(1 << 20)
    monkeypatch.setattr(_cache, "_cache", cache)
    return cache


def test_the_cache_is_that_of_now(own_cache) -> None:
    assert fd.stats().cache.misses == 0
    q, k, v = torch.randn(3, 1, 4, 100, 16)
    fd.attend(q, k, v, PATTERN)
    found = fd.stats()
    assert found.cache == own_cache.stats()
    assert found.cache.misses > 0
    fd.attend(q, k, v, PATTERN)
    assert fd.stats().cache.hits == found.cache.hits + 2  # the program and its mask
    assert found.cache.misses == fd.stats().cache.misses


def test_pools_are_those_alive() -> None:
    pool = BufferPool("cpu", threshold_bytes=256, budget_bytes=4096)
    never = BufferPool(threshold_bytes=sys.maxsize)
    lease = pool.lease((100,), torch.float32)
    pool.lease((100,), torch.float32).release()
    pool.lease((100,), torch.float32).release()
    pool.lease((10,), torch.float32).release()
    found = {each.name: each for each in fd.stats().pools}
    assert found[pool.name] == _stats.PoolStats(pool.name, "cpu", 256, 4096, 1024, 400, 1024, 3, 2, 1, 1 - 2 / 3)
    assert (found[never.name].device, found[never.name].threshold_bytes) == ("any", None)
    lease.release()
    name = pool.name
    del pool, lease
    gc.collect()
    assert name not in {each.name for each in fd.stats().pools}


def test_where_plans_come_from(monkeypatch) -> None:
    fd.attend(*torch.randn(3, 1, 4, 100, 16), PATTERN)
    assert dict(fd.stats().constants)["cpu"] == masks.machine("cpu").source == "builtin"
    masks.set_machine(replace(masks.machine(), source="by hand"))
    named = dict(fd.stats().constants)["cpu"]
    masks.set_machine(None)
    assert (named, dict(fd.stats().constants)["cpu"]) == ("by hand", "builtin")
    before = fd.stats().measured
    fd.attend(*torch.randn(3, 1, 4, 101, 16), PATTERN, autotune=True)
    assert fd.stats().measured == before + 1


def test_it_is_a_value_and_plain_data() -> None:
    pool = BufferPool("cpu", threshold_bytes=256)
    found = fd.stats()
    with pytest.raises(FrozenInstanceError):
        found.measured = 3
    data = found.to_data()
    assert json.loads(json.dumps(data)) == data
    assert data["cache"]["misses"] == found.cache.misses
    assert data["pools"][-1]["name"] == pool.name
    assert list(data) == ["cache", "pools", "constants", "measured"]
