"""What things say of themselves: the pattern, the engine, the pool; short, and never an address in memory."""

import re

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated._over_ranks import LONGEST_PATTERN_TEXT
from flexdilated.distributed import BufferPool
from flexdilated.masks.core._check import bytes_text
from flexdilated.masks.planning._planner import plan
from tests.support.ranks import one_rank

PATTERN = masks.longnet([16, 64], [1, 4]) & masks.causal()
CONFIG = fd.LongNetConfig(
    vocab_size=8, embed_dim=16, num_heads=4, depth=1, segment_lengths=(16, 64), dilation_rates=(1, 4), causal=True
)
DEFAULT = "engine=None (aten on CPU, flex on CUDA)"


@pytest.fixture
def mesh():
    with one_rank("sequence") as mesh:
        yield mesh


OWN = f"{PATTERN!r}, scale=None, enable_gqa=False"
FED = {"sinks": True, "num_heads": 2, "block_size": 64, "autotune": True, "engine": "aten"}


@pytest.mark.parametrize(
    ("module", "own"),
    [
        (fd.BlockSparseAttention(PATTERN), f"{OWN}, {DEFAULT}"),
        (
            fd.BlockSparseAttention(PATTERN, **FED),
            f"{OWN}, engine='aten', sinks=True, num_heads=2, block_size=(64, 64), autotune=True",
        ),
        (
            fd.DilatedAttention([16, 64], [1, 4], causal=True, scale=0.5, enable_gqa=True, engine="flex"),
            f"{PATTERN!r}, scale=0.5, enable_gqa=True, engine='flex'",
        ),
        (
            fd.MultiheadDilatedAttention(16, 4, [16, 64], [1, 4], causal=True, batch_first=True),
            f"embed_dim=16, num_heads=4, kdim=16, vdim=16, batch_first=True, {PATTERN!r}, {DEFAULT}",
        ),
        (fd.LongNet(CONFIG), f"{PATTERN!r}, layout='auto', {DEFAULT}"),
    ],
)
def test_modules_say_pattern_and_engine(module: torch.nn.Module, own: str) -> None:
    assert module.extra_repr() == own
    assert own in repr(module)


def test_modules_over_ranks_say_schedule_and_pool(mesh) -> None:
    branches, pool = ([16, 64], [1, 4]), BufferPool("cpu")
    own = f"{masks.longnet(*branches)!r}, scale=None, enable_gqa=False, {DEFAULT}"
    where = "mesh=1 rank of axis 'sequence'"
    ring = fd.RingDilatedAttention(*branches, mesh=mesh, schedule="ring", pool=pool)
    assert ring.extra_repr() == f"{own}, {where}, schedule='ring', pool={pool!r}"
    auto = fd.RingDilatedAttention(*branches, mesh=mesh, pool="auto", codec="int8")
    assert auto.extra_repr() == f"{own}, {where}, schedule='auto', codec='int8', pool='auto'"
    assert fd.RingDilatedAttention(*branches, mesh=mesh).extra_repr().endswith(", schedule='auto', pool=None")
    heads = fd.HeadParallelDilatedAttention(*branches, mesh=mesh)
    assert heads.extra_repr() == f"{own}, {where}, schedule='heads'"
    longnet = fd.LongNet(CONFIG, mesh=mesh, pool=pool)
    assert longnet.extra_repr() == f"{PATTERN!r}, layout='auto', {DEFAULT}, {where}, schedule='auto', pool={pool!r}"


def test_long_patterns_are_cut() -> None:
    """The beginning stays, the cut is marked, and what comes after the pattern is still there."""
    long = masks.longnet([*range(1, 301)], [1] * 300) & masks.causal()
    for text in (fd.BlockSparseAttention(long).extra_repr(), repr(fd.KVCache(long, num_heads=4))):
        assert "longnet((1, 2, 3, 4, 5, 6, " in text
        assert "engine=None" in text.partition("…")[2]
        assert len(text) < LONGEST_PATTERN_TEXT + 250


def test_a_key_value_cache() -> None:
    cache = fd.KVCache(masks.local_window(left=9, right=0), num_heads=2, engine="aten")
    own = f"KVCache({cache.pattern!r}, num_heads=2, engine='aten'"
    assert repr(cache) == f"{own}: 0 tokens seen, 0 keys kept in 0 B)"
    cache.append(*torch.randn(2, 1, 2, 1200, 8))
    assert 10 <= cache.num_kept < 1200
    assert repr(cache) == f"{own}: 1,200 tokens seen, {cache.num_kept} keys kept in {bytes_text(cache.nbytes)})"


def test_a_pool() -> None:
    pool = BufferPool("cpu", threshold_bytes=1024, budget_bytes=1 << 20)
    own = f"BufferPool({pool.name}, cpu, leases from 1 KiB, budget 1 MiB: holds "
    assert repr(pool) == f"{own}0 B, of which 0 B are leased)"
    lease = pool.lease((2000,), torch.uint8)
    assert repr(pool) == f"{own}2 KiB, of which 1.95 KiB are leased)"
    assert repr(lease) == f"Lease((2000,), torch.uint8, of {pool.name})"
    lease.release()
    assert repr(lease) == f"Lease(of {pool.name}, which has ended)"


def test_the_cache_and_a_plan() -> None:
    cache = type(masks.cache())(1 << 20, 10)
    cache.get("a", lambda: None, lambda _: 2048)
    assert repr(cache) == "Cache(1 of 10 entries, 2 KiB of 1 MiB)"
    made = plan(PATTERN.bind(num_heads=4, num_queries=1000, num_keys=1000))
    text = repr(made)
    assert text.startswith(f"Plan({PATTERN!r}, 4 heads, 1,000 queries, 1,000 keys: ")
    assert all(option.layout in text for option in made.chosen)
    assert text.endswith(f"; {len(made.terms)} terms, {1e3 * made.cost.seconds:.3g} ms predicted)")


def test_no_addresses(mesh) -> None:
    pool = BufferPool("cpu", threshold_bytes=0)
    things = [
        *(pool, pool.lease((3,), torch.float32), pool.statistics, masks.cache().stats(), masks.machine()),
        *(PATTERN.bind(num_heads=2, num_queries=3, num_keys=3), masks.layout(PATTERN, 10), fd.LongNet(CONFIG)),
        *(fd.distributed.Sharding(10, 2), fd.distributed.traffic(), fd.LongNet(CONFIG).new_caches()),
        fd.RingDilatedAttention([4], [1], mesh=mesh, pool=pool),
    ]
    for thing in things:
        assert not re.search(r"0x[0-9a-f]{4}|<.* object", repr(thing)), type(thing).__name__
