"""The end of a lease: use after it, debug mode, streams, graphs, threads."""

import gc
import threading

import pytest
import torch

from flexdilated.distributed import BufferPool
from flexdilated.distributed.wire import _pool

KIB, MIB = 1 << 10, 1 << 20
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]


def lease(pool, num_bytes):
    return pool.lease((num_bytes,), torch.uint8, "cpu")


def address(leased):
    return leased.tensor.untyped_storage().data_ptr()


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


@pytest.mark.parametrize("dtype", FLOATS)
def test_debug_shows_use_after_return_and_before_writing(dtype) -> None:
    pool = BufferPool(threshold_bytes=0, debug=True)
    with pool.lease((3, 5), dtype, "cpu") as x:
        assert x.float().isnan().all()
        x.copy_(torch.ones(3, 5))
    assert x.float().isnan().all()
    with pool.lease((), dtype, "cpu") as scalar:  # in another bucket
        assert scalar.float().isnan()


def test_debug_shows_integers() -> None:
    pool = BufferPool(threshold_bytes=0, debug=True)
    with pool.lease((4,), torch.int64, "cpu") as x:
        assert x.tolist() == [-1] * 4
        x.zero_()
    assert x.tolist() == [-1] * 4


def test_debug_finds_who_writes_after_return() -> None:
    pool = BufferPool(debug=True)
    with lease(pool, MIB) as x:
        pass
    x[77] = 1
    with pytest.raises(RuntimeError, match="until its lease ends; one was written to after that"):
        lease(pool, MIB)
    with lease(pool, MIB):
        assert pool.statistics.allocated_bytes == MIB


def test_debug_lets_autograd_see_what_a_backward_has_saved() -> None:
    pool = BufferPool(threshold_bytes=0, debug=True)
    weight = torch.ones(3, requires_grad=True)
    with pool.lease((3,), torch.float32, "cpu") as x:
        x.fill_(2)
        product = weight * x
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


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


def test_a_pinned_buffer_is_leased_once_copies_from_it_are_done(monkeypatch) -> None:
    """No accelerator is here: the memory is not pinned."""
    stream, allocate = Stream(), _pool._allocate
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(_pool, "_allocate", lambda num_bytes, device, pinned: allocate(num_bytes, device, not pinned))
    pool = BufferPool("cpu", pinned=True)
    lease(pool, MIB).release()
    assert stream.synchronized == 0
    lease(pool, MIB).release()
    assert stream.synchronized == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator can be copied to from pinned memory")
def test_pinned_memory_needs_an_accelerator() -> None:
    with pytest.raises(RuntimeError, match="pinned memory serves copies to an accelerator; torch finds none here"):
        BufferPool("cpu", pinned=True)


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
