"""`fd.stats()` and FLEXDILATED_PROFILE: what is counted is what happened, and what a process writes about itself."""

import gc
import gzip
import json
import re
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import BufferPool
from flexdilated.masks.plan_cache import _cache
from flexdilated.masks.plan_cache._cache import Cache
from flexdilated.observe import _profile, _stats
from flexdilated.observe._profile import VARIABLE, folder_from_environment, profile_process

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


@pytest.fixture
def at_exit(monkeypatch) -> list[Callable[[], None]]:
    """What would run as the process ends."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(_profile, "atexit", SimpleNamespace(register=registered.append))  # not of all modules
    return registered


def test_a_process_writes_operators_memory_and_a_trace(tmp_path, monkeypatch, at_exit) -> None:
    """Into a folder that is not there yet; nothing else is left in it."""
    folder = tmp_path / "new" / "profiles"
    monkeypatch.setenv(VARIABLE, str(folder))
    profile_process()
    kept = [torch.ones(1000, 1000) @ torch.ones(1000, 1000) for _ in range(3)]
    (write,) = at_exit
    write()
    trace, text = sorted(folder.iterdir())
    assert (trace.name, text.name) == (f"{trace.name.partition('.')[0]}.trace.json.gz", f"{text.stem}.txt")
    events = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "aten::ones", "[memory]"} <= events
    told = text.read_text(encoding="utf-8")
    assert re.match(r"\d+\.\d s, [\d,]+ events, torch ", told)
    if Path("/proc/self/status").exists():
        assert re.search("^peak memory, resident: [0-9.,]+ [MG]iB$", told, re.MULTILINE)
    rows = [line.split() for line in told.splitlines() if line.strip().startswith("aten::mm ")]
    assert len(rows) == 2, "by time, and by memory"
    assert all(row[-1] == str(len(kept)) for row in rows)
    memory = told[told.index("By self_cpu_memory_usage") :]
    assert re.search(r"^ +aten::empty .* 22\.89 MB .* 6 *$|^ +aten::mm .* 11\.44 MB", memory, re.MULTILINE)


def test_without_the_variable_nothing_is_recorded(tmp_path, monkeypatch, at_exit) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        monkeypatch.delenv(VARIABLE, raising=False) if value is None else monkeypatch.setenv(VARIABLE, value)
        profile_process()
        assert folder_from_environment() is None
    assert at_exit == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path, monkeypatch, at_exit) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv(VARIABLE, str(bad))
        for use in (folder_from_environment, profile_process):
            with pytest.raises(ValueError, match="must name a folder") as caught:
                use()
            assert str(caught.value) == f"FLEXDILATED_PROFILE must name a folder that can be written; got '{bad}'"
    assert at_exit == []
