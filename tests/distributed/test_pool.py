"""BufferPool: who gets which memory and for how long, what is counted, and which pool a call takes."""

import copy
import gc
import pickle
import sys
import threading
import time

import pytest
import torch

from flexdilated import distributed
from flexdilated.distributed import BufferPool
from flexdilated.distributed.wire import _pool
from flexdilated.distributed.wire._pool import name_of, pool_named

CPU = torch.device("cpu")
KIB, MIB = 1 << 10, 1 << 20


def lease(pool, num_bytes):
    return pool.lease((num_bytes,), torch.uint8, "cpu")


def address(leased):
    return leased.tensor.untyped_storage().data_ptr()


def test_a_lease_is_a_contiguous_tensor_that_comes_back() -> None:
    assert BufferPool().threshold_bytes == MIB
    pool = BufferPool(threshold_bytes=0)
    with pool.lease((3, 5, 7), torch.float32, "cpu") as x:
        assert (x.shape, x.dtype, x.device.type, x.is_contiguous()) == ((3, 5, 7), torch.float32, "cpu", True)
        x.fill_(1)
        first = x.untyped_storage().data_ptr()
        before = pool.statistics
    with pool.lease([105], torch.int32, "cpu") as y:  # another type and shape of the same bucket
        assert y.untyped_storage().data_ptr() == first
        assert y.tolist() == [0x3F800000] * 105, "leases are not filled"
    assert (before.leased_bytes, before.num_leases) == (420, 1), "statistics are of their moment"
    assert (pool.statistics.num_leases, pool.statistics.num_allocations, pool.statistics.reuse_rate) == (2, 1, 0.5)


def test_the_latest_return_is_leased_first() -> None:
    pool = BufferPool()
    first, second = lease(pool, MIB), lease(pool, MIB)
    latest = address(first)
    second.release()
    first.release()
    assert address(lease(pool, MIB)) == latest


def test_an_exception_returns_the_buffer() -> None:
    pool = BufferPool()
    with pytest.raises(ZeroDivisionError), pool.lease((MIB,), torch.uint8, "cpu"):
        _ = 1 / 0
    assert (pool.statistics.leased_bytes, pool.statistics.idle_bytes) == (0, MIB)


def test_buckets_are_powers_of_two() -> None:
    pool = BufferPool(threshold_bytes=0)
    for num_bytes, bucket in [(1, 1), (2, 2), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB), (3 * MIB, 4 * MIB)]:
        with lease(pool, num_bytes):
            assert pool.statistics.allocated_bytes == bucket
        pool.release()
        assert pool.statistics.allocated_bytes == 0


def test_the_budget_lets_go_what_was_returned_longest_ago() -> None:
    pool = BufferPool(budget_bytes=7 * MIB)
    one, two, four = lease(pool, MIB), lease(pool, 2 * MIB), lease(pool, 4 * MIB)
    for each in (two, one, four):
        each.release()
    assert pool.statistics.idle_bytes == 7 * MIB
    lease(pool, 2 * MIB).release()  # used, and so the last to go
    other = lease(pool, 512 * KIB + MIB)  # its bucket, 2 MiB, is there
    assert pool.statistics.num_allocations == 3
    lease(pool, 2 * MIB).release()  # 2 MiB more: the one has to go, and the four
    assert pool.statistics.allocated_bytes == 4 * MIB
    other.release()
    assert pool.statistics.idle_bytes == 4 * MIB


def test_a_lease_over_the_budget_is_served_and_not_kept() -> None:
    pool = BufferPool(budget_bytes=MIB)
    with lease(pool, 3 * MIB) as large:
        assert large.nbytes == 3 * MIB
        assert pool.statistics.allocated_bytes == 4 * MIB
    assert (pool.statistics.allocated_bytes, pool.statistics.peak_bytes) == (0, 4 * MIB)
    nothing = BufferPool(budget_bytes=0)
    lease(nothing, MIB).release()
    assert nothing.statistics.allocated_bytes == 0


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda: BufferPool(threshold_bytes=1.5),
            ValueError,
            "threshold_bytes must be an integer, at least 0; got 1.5",
        ),
        (lambda: BufferPool().lease((-1,), torch.uint8), RuntimeError, "negative dimension -1"),
        *(
            (lambda wrong=wrong: name_of(wrong), TypeError, 'pool must be None, a BufferPool or "auto"; got ')
            for wrong in ("Auto", True, 0, BufferPool)
        ),
    ],
)
def test_bad_input(act, error, message) -> None:
    with pytest.raises(error, match=message):
        act()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_is_an_empty_pool_of_the_same_settings(copied) -> None:
    pool = BufferPool("cpu", threshold_bytes=5, budget_bytes=9 * MIB)
    with lease(pool, MIB):
        other = copied(pool)
    settings = ("device", "threshold_bytes", "budget_bytes")
    assert [getattr(other, name) for name in settings] == [getattr(pool, name) for name in settings]
    assert other.statistics.allocated_bytes == 0
    assert other.name != pool.name


def test_one_pool_serves_more_than_one_device() -> None:
    pool = BufferPool()
    with pool.lease((MIB,), torch.uint8, "meta") as shape_only:
        assert shape_only.device.type == "meta"
    with lease(pool, MIB) as x:
        assert x.device.type == "cpu"
    assert pool.statistics.num_allocations == 2


def test_after_the_end() -> None:
    pool = BufferPool()
    for leased in (lease(pool, MIB), lease(pool, 1)):
        leased.release()
        leased.release()
        with pytest.raises(RuntimeError, match="may be used until its lease ends; this lease has ended"):
            _ = leased.tensor
    assert pool.statistics.idle_bytes == MIB, "released twice, returned once"


def test_a_lost_lease_takes_its_buffer_along() -> None:
    pool = BufferPool()
    tensor = lease(pool, MIB).tensor
    gc.collect()
    tensor.fill_(1)
    assert (pool.statistics.allocated_bytes, pool.statistics.leased_bytes) == (0, 0)
    assert address(lease(pool, MIB)) != tensor.data_ptr()


def test_a_lease_has_no_part_in_the_graph_of_an_earlier_one() -> None:
    pool = BufferPool(threshold_bytes=0)
    with pool.lease((3,), torch.float32, "cpu") as x:
        x.copy_(torch.ones(3, requires_grad=True))
        assert x.requires_grad
    with torch.inference_mode(), pool.lease((3,), torch.float32, "cpu") as y:
        y.zero_()
    with pool.lease((3,), torch.float32, "cpu") as z:
        assert not z.requires_grad
        assert not z.is_inference()


class Stream:
    """What a pool asks of an accelerator's stream; events note who waited for them."""

    def __init__(self) -> None:
        self.waited_for, self.synchronized = [], 0

    def wait_stream(self, other) -> None:
        self.waited_for.append(other)

    def record_event(self):
        return self

    def synchronize(self) -> None:
        self.synchronized += 1


def test_a_buffer_stays_on_its_stream(monkeypatch) -> None:
    """No accelerator is here: the streams are stand-ins, the memory is the CPU's."""
    pool, current = BufferPool(), [Stream()]
    monkeypatch.setattr(_pool, "_current_stream", lambda device: current[0])
    first, leased = current[0], lease(pool, MIB)
    memory, current[0] = address(leased), Stream()
    leased.release()
    assert first.waited_for == [current[0]], "what was enqueued on the second stream comes before the next lease"
    assert address(lease(pool, MIB)) != memory
    current[0] = first
    assert address(lease(pool, MIB)) == memory
    assert first.waited_for == first.waited_for[:1]


def test_a_captured_graph_gets_memory_of_its_own(monkeypatch) -> None:
    pool = BufferPool()
    monkeypatch.setattr(_pool, "_is_capturing", lambda device: True)
    lease(pool, MIB).release()
    assert (pool.statistics.num_plain, pool.statistics.allocated_bytes) == (1, 0)


def test_threads_take_turns() -> None:
    """Each writes its number, waits, and finds it still there; the sums hold at every moment and at the end."""
    pool, wrong, num_threads, num_steps = BufferPool(threshold_bytes=0, budget_bytes=64 * KIB), [], 8, 200

    def work(number) -> None:
        for step in range(num_steps):
            with pool.lease((1 + (step * number) % 5000,), torch.uint8, "cpu") as x:
                x.fill_(number)
                statistics = pool.statistics
                if statistics.idle_bytes + statistics.leased_bytes > statistics.allocated_bytes:
                    wrong.append(statistics)
                if not bool((x == number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, num_threads + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    statistics = pool.statistics
    assert (statistics.num_leases, statistics.leased_bytes) == (num_threads * num_steps, 0)
    assert statistics.idle_bytes == statistics.allocated_bytes <= 64 * KIB


def test_what_the_argument_stands_for() -> None:
    pool = BufferPool()
    assert pool_named(name_of(None), CPU) is None
    assert pool_named(name_of(pool), CPU) is pool
    assert pool_named(name_of("auto"), CPU) is distributed.pool("cpu") is distributed.pool(torch.device("cpu", 0))
    assert distributed.pool("cpu") is not distributed.pool("meta")
    assert (distributed.pool("cpu").threshold_bytes, distributed.pool("meta").threshold_bytes) == (
        16 * MIB,
        sys.maxsize,
    )
    assert distributed.pool("cpu").device == CPU


def test_threads_that_ask_at_once_get_one_pool(monkeypatch) -> None:
    monkeypatch.setattr(_pool, "_of_devices", {})
    monkeypatch.setattr(_pool, "BufferPool", lambda *args, **kwargs: time.sleep(0.05) or BufferPool(*args, **kwargs))
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


def test_a_pool_that_is_no_more() -> None:
    pool = BufferPool()
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
