"""The pool of a device, what the argument `pool` stands for, and the size from which a pool pays."""

import sys
import threading
import time

import pytest
import torch

from flexdilated import distributed
from flexdilated.distributed import BufferPool
from flexdilated.distributed.wire import _pools
from flexdilated.distributed.wire._pool import lease_from
from flexdilated.distributed.wire._pools import break_even_bytes, name_of, pool_named

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def forget():
    """Before and after: what was measured in earlier tests, and the pools made of it."""
    for function in (_pools._pool_for, break_even_bytes):
        function.cache_clear()
    yield
    for function in (_pools._pool_for, break_even_bytes):
        function.cache_clear()


def test_what_the_argument_stands_for(forget, monkeypatch) -> None:
    monkeypatch.setattr(_pools, "break_even_bytes", lambda device: 4 * MIB)
    pool = BufferPool()
    assert pool_named(name_of(None), CPU) is None
    assert pool_named(name_of(pool), CPU) is pool
    assert pool_named(name_of("auto"), CPU) is distributed.pool("cpu") is distributed.pool(torch.device("cpu", 0))
    assert distributed.pool("cpu") is not distributed.pool("meta")
    assert distributed.pool("cpu").threshold_bytes == 4 * MIB
    assert distributed.pool("cpu").device == CPU


@pytest.mark.parametrize("wrong", ["Auto", True, 0, BufferPool])
def test_other_arguments_are_refused(wrong) -> None:
    with pytest.raises(TypeError, match='pool must be None, a BufferPool or "auto"; got '):
        name_of(wrong)


def test_threads_that_ask_at_once_get_one_pool(forget, monkeypatch) -> None:
    monkeypatch.setattr(_pools, "break_even_bytes", lambda device: time.sleep(0.05) or MIB)
    found, start = [], threading.Barrier(4)

    def ask() -> None:
        start.wait()
        found.append(distributed.pool("cpu"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(pool) for pool in found}) == 1


def test_custom_ops_take_a_name() -> None:
    pool = BufferPool()
    assert (name_of(None), name_of("auto")) == ("", "auto")
    assert pool_named(name_of(pool), CPU) is pool
    assert pool_named("", CPU) is None
    name = pool.name
    del pool
    with pytest.raises(RuntimeError, match=f"a BufferPool must live as long as what was compiled with it; '{name}' is"):
        pool_named(name, CPU)


def test_a_graph_takes_the_name_of_the_pool_it_is_given() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def named(x, pool):
        return x + 1, name_of(pool)

    pools = [BufferPool(), BufferPool()]
    names = [named(torch.ones(2), pool)[1] for pool in (None, *pools, "auto")]
    assert names == ["", *(pool.name for pool in pools), "auto"]


def test_without_a_pool_torch_makes_the_tensor() -> None:
    pool = BufferPool(threshold_bytes=0)
    for chosen, num_leases in ((None, 0), (pool, 1)):
        with lease_from(chosen, (2, 3), torch.float16, CPU, role="gradients") as x:
            assert (x.shape, x.dtype) == ((2, 3), torch.float16)
        assert pool.statistics.num_leases == num_leases


@pytest.mark.parametrize("smallest", [1 << 16, 1 << 21, 1 << 26, None])
def test_break_even_is_where_leases_are_faster_from_there_on(forget, monkeypatch, smallest) -> None:
    asked = set()

    def seconds(pool, num_bytes, device):
        asked.add(num_bytes)
        return 1.0 if pool is None or smallest is None or num_bytes < smallest else 0.8

    monkeypatch.setattr(_pools, "_seconds", seconds)
    assert break_even_bytes(CPU) == (smallest or sys.maxsize)
    assert min(asked) >= (smallest or 1 << 26) // 2, "measured no further down than needed"
    asked.clear()
    assert break_even_bytes(CPU) == (smallest or sys.maxsize)
    assert asked == set(), "measured once"


def test_a_gain_below_a_tenth_is_none(forget, monkeypatch) -> None:
    monkeypatch.setattr(_pools, "_seconds", lambda pool, num_bytes, device: 1.0 if pool is None else 0.95)
    assert break_even_bytes(CPU) == sys.maxsize


def test_break_even_is_measured_here(forget) -> None:
    """The limit is wide, as machines are shared; what it takes on a quiet one is in the docs."""
    start = time.process_time()
    size = break_even_bytes(CPU)
    assert time.process_time() - start < 20
    assert size == sys.maxsize or size in {1 << power for power in range(16, 27)}
    assert distributed.pool("cpu").threshold_bytes == size
