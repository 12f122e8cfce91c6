"""BufferPool: who gets which memory, what is counted, what is kept and for how long."""

import copy
import pickle

import pytest
import torch

from flexdilated.distributed import BufferPool
from flexdilated.distributed.wire import _pool

KIB, MIB = 1 << 10, 1 << 20


def lease(pool, num_bytes, **kwargs):
    return pool.lease((num_bytes,), torch.uint8, "cpu", **kwargs)


def address(leased):
    return leased.tensor.untyped_storage().data_ptr()


def test_a_lease_is_a_contiguous_tensor_that_comes_back() -> None:
    pool = BufferPool(threshold_bytes=0)
    assert pool.statistics.allocated_bytes == 0
    with pool.lease((3, 5, 7), torch.float32, "cpu") as x:
        assert (x.shape, x.dtype, x.device.type, x.is_contiguous()) == ((3, 5, 7), torch.float32, "cpu", True)
        x.fill_(1)
        first = x.untyped_storage().data_ptr()
        assert (pool.statistics.leased_bytes, pool.statistics.idle_bytes) == (420, 0)
    with pool.lease([105], torch.int32, "cpu") as y:  # another type and shape of the same bucket
        assert y.untyped_storage().data_ptr() == first
        assert y.tolist() == [0x3F800000] * 105, "leases are not filled"
    assert (pool.statistics.num_leases, pool.statistics.num_allocations, pool.statistics.reuse_rate) == (2, 1, 0.5)


def test_live_leases_never_share() -> None:
    pool = BufferPool()
    leases = [lease(pool, MIB) for _ in range(5)]
    assert len({address(each) for each in leases}) == 5
    leases[2].release()
    again = [lease(pool, MIB), lease(pool, MIB)]
    held = [*leases[:2], *leases[3:], *again]
    assert len({address(each) for each in held}) == 6
    assert pool.statistics.num_allocations == 6


def test_the_latest_return_is_leased_first() -> None:
    pool = BufferPool()
    first, second = lease(pool, MIB), lease(pool, MIB)
    latest = address(first)
    second.release()
    first.release()
    assert address(lease(pool, MIB)) == latest


def test_buckets_are_powers_of_two() -> None:
    pool = BufferPool(threshold_bytes=0)
    for num_bytes, bucket in [(1, 1), (2, 2), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB), (3 * MIB, 4 * MIB)]:
        with lease(pool, num_bytes):
            assert pool.statistics.allocated_bytes == bucket
            assert pool.statistics.fragmentation == bucket / num_bytes
        assert pool.statistics.fragmentation == float("inf")
        pool.release()
        assert (pool.statistics.allocated_bytes, pool.statistics.fragmentation) == (0, 1)


def test_lengths_that_change_hold_less_than_twice_the_buckets_of_the_longest() -> None:
    pool, longest = BufferPool("cpu", threshold_bytes=0), 1 << 10
    for step in range(1, 2 * longest + 1):
        leases = [lease(pool, (step - 1) % longest + 1) for _ in range(3)]
        for each in leases:
            each.release()
    assert pool.statistics.num_allocations == 3 * 11
    assert pool.statistics.allocated_bytes == 3 * (2 * longest - 1)


def test_an_exception_returns_the_buffer() -> None:
    pool = BufferPool()
    with pytest.raises(ZeroDivisionError), pool.lease((MIB,), torch.uint8, "cpu"):
        _ = 1 / 0
    assert (pool.statistics.leased_bytes, pool.statistics.idle_bytes) == (0, MIB)


def test_under_the_threshold_torch_makes_the_tensor() -> None:
    pool = BufferPool()
    with lease(pool, MIB - 1) as small, pool.lease((0, 4), torch.float32, "cpu") as empty:
        assert (small.shape, empty.shape) == ((MIB - 1,), (0, 4))
    assert (pool.statistics.num_plain, pool.statistics.num_leases, pool.statistics.peak_bytes) == (2, 0, 0)
    with BufferPool(threshold_bytes=0).lease((2, 0), torch.int8, "cpu") as empty:
        assert empty.shape == (2, 0)


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


def test_release_keeps_what_is_leased() -> None:
    pool = BufferPool()
    kept, returned = lease(pool, MIB), lease(pool, MIB)
    kept.tensor.fill_(7)
    returned.release()
    pool.release()
    assert (pool.statistics.allocated_bytes, pool.statistics.idle_bytes) == (MIB, 0)
    assert bool((kept.tensor == 7).all())


def test_reset_counts_anew_and_keeps_buffers() -> None:
    pool = BufferPool()
    with lease(pool, 3 * MIB), lease(pool, MIB, role="gradients"):
        before = pool.statistics
        assert before.leases_by_role == {"keys": 1, "gradients": 1}
        assert before.bytes_by_role == {"keys": 3 * MIB, "gradients": MIB}
    open_still = lease(pool, MIB)
    pool.reset()
    after = pool.statistics
    assert (after.num_leases, after.num_allocations, after.leases_by_role, after.bytes_by_role) == (0, 0, {}, {})
    assert (after.allocated_bytes, after.idle_bytes, after.leased_bytes) == (5 * MIB, 4 * MIB, MIB)
    assert (after.peak_bytes, after.peak_leased_bytes) == (5 * MIB, MIB)
    open_still.release()
    assert (before.num_leases, before.peak_leased_bytes) == (2, 4 * MIB), "statistics are of their moment"


@pytest.mark.parametrize("failures", [1, 2])
def test_a_full_memory_lets_all_idle_buffers_go_and_tries_once_more(monkeypatch, failures) -> None:
    pool, allocate, left = BufferPool(), _pool._allocate, [failures]
    lease(pool, MIB).release()

    def out_of_memory(*arguments):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("full")
        assert pool._idle == []
        return allocate(*arguments)

    monkeypatch.setattr(_pool, "_allocate", out_of_memory)
    if failures == 1:
        with lease(pool, 2 * MIB):
            assert pool.statistics.allocated_bytes == 2 * MIB
    else:
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            lease(pool, 2 * MIB)
        assert (pool.statistics.allocated_bytes, pool.statistics.num_leases) == (0, 1)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: BufferPool(threshold_bytes=-1), ValueError, "threshold_bytes must be an integer, at least 0; got -1"),
        (lambda: BufferPool(budget_bytes=1.5), ValueError, "budget_bytes must be an integer, at least 0; got 1.5"),
        (lambda: BufferPool("meta", pinned=True), ValueError, "device must be \"cpu\"; got 'meta'"),
        (lambda: BufferPool(pinned=True), ValueError, 'device must be "cpu"; got None'),
        (lambda: BufferPool("cpu").lease((1,), torch.uint8, "meta"), ValueError, "serves cpu; got a lease on meta"),
        (
            lambda: lease(BufferPool(), 1, role="key"),
            ValueError,
            "role must be one of 'keys', 'gradients', .*got 'key'",
        ),
        (lambda: BufferPool().lease((-1,), torch.uint8), RuntimeError, "negative dimension -1"),
    ],
)
def test_bad_input(act, error, message) -> None:
    with pytest.raises(error, match=message):
        act()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_is_an_empty_pool_of_the_same_settings(copied) -> None:
    pool = BufferPool("cpu", threshold_bytes=5, budget_bytes=9 * MIB, debug=True)
    with lease(pool, MIB):
        other = copied(pool)
    settings = ("device", "threshold_bytes", "budget_bytes", "pinned", "debug")
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


def test_steps_of_a_ring_allocate_once() -> None:
    """Two foreign shards and the gradients of one, as a ring holds them, through 1,000 steps of uneven shards."""
    pool = BufferPool(threshold_bytes=0)
    lengths = (1000, 900, 0, 1100)

    def step() -> None:
        arriving = pool.lease((2, lengths[0], 8), torch.float32, "cpu")
        for length in lengths[1:]:
            here, arriving = arriving, pool.lease((2, length, 8), torch.float32, "cpu")
            with pool.lease((2, here.tensor.shape[1], 8), torch.float32, "cpu", role="gradients"):
                here.release()
        arriving.release()

    step()
    pool.reset()
    for _ in range(1000):
        step()
    statistics = pool.statistics
    assert statistics.num_allocations == 0
    assert statistics.reuse_rate == 1
    assert statistics.leases_by_role == {"keys": 3000, "gradients": 2000}
