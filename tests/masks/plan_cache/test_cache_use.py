"""The cache as the library uses it: masters and copies, patterns that are forgotten, modes of torch, compilation.

The second device is `meta`, which holds shapes and no values: what goes where can be seen without an accelerator.
"""

import pytest
import torch
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.plan_cache import _cache
from flexdilated.masks.plan_cache._cache import Cache
from flexdilated.masks.planning.lowering._term import Term
from tests.masks.plan_cache.test_cache import under_way
from tests.support.compilers import without_inductor

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
@pytest.mark.parametrize("engine", ["aten", "flex"])
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
