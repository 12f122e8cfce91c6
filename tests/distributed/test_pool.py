"""BufferPool against a model, in any order of leases, returns and lost leases; threads, streams, a call's pool."""

import copy
import pickle
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from flexdilated.distributed import BufferPool
from flexdilated.distributed.wire import _pool
from flexdilated.distributed.wire._pool import pool_named
from tests.support.threads import side_by_side

CPU = torch.device("cpu")
KIB, MIB = 1 << 10, 1 << 20


def lease(pool, num_bytes):
    return pool.lease((num_bytes,), torch.uint8, "cpu")


def address(leased):
    return leased.tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_is_an_empty_pool_of_the_same_settings(copied) -> None:
    pool = BufferPool("cpu", threshold_bytes=5, budget_bytes=9 * MIB)
    with lease(pool, MIB):
        other = copied(pool)
    settings = ("device", "threshold_bytes", "budget_bytes")
    assert [getattr(other, name) for name in settings] == [getattr(pool, name) for name in settings]
    assert other.statistics.allocated_bytes == 0
    assert other.name != pool.name


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


def test_a_buffer_stays_on_its_stream(monkeypatch) -> None:
    """No accelerator is here: the streams are stand-ins, the memory is the CPU's."""
    pool, first, second = BufferPool(), Mock(), Mock()
    current = [first]
    monkeypatch.setattr(_pool, "_current_stream", lambda device: current[0])
    leased = lease(pool, MIB)
    memory, current[0] = address(leased), second
    leased.release()
    # What was enqueued on the second stream comes before the next lease.
    first.wait_stream.assert_called_once_with(second)
    assert address(lease(pool, MIB)) != memory
    current[0] = first
    assert address(lease(pool, MIB)) == memory
    first.wait_stream.assert_called_once()


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

    side_by_side([partial(work, number) for number in range(1, num_threads + 1)], seconds=200)
    assert wrong == []
    statistics = pool.statistics
    assert (statistics.num_leases, statistics.leased_bytes) == (num_threads * num_steps, 0)
    assert statistics.idle_bytes == statistics.allocated_bytes <= 64 * KIB


def test_a_pool_that_is_no_more() -> None:
    pool = BufferPool()
    name = pool.name
    del pool
    with pytest.raises(RuntimeError, match=f"a BufferPool must live as long as what was compiled with it; '{name}' no"):
        pool_named(name, CPU)


DTYPES = st.sampled_from([torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64])


class Machine(RuleBasedStateMachine):
    """The model: open leases with the number that each wrote, buckets idle in the order of their return, counts."""

    leases = Bundle("leases")

    @initialize(threshold=st.sampled_from([0, 1, 64]), budget=st.sampled_from([None, 0, 100, 4096]))
    def make(self, threshold, budget) -> None:
        self.pool = BufferPool(threshold_bytes=threshold, budget_bytes=budget)
        self.threshold, self.budget = threshold, budget
        self.open, self.idle, self.next = {}, [], 0
        self.counts = {"leases": 0, "allocations": 0, "plain": 0, "peak": 0, "peak leased": 0}

    @property
    def held(self) -> int:
        return sum(self.idle) + sum(bucket for _, bucket, _ in self.open.values())

    def let_go(self, coming: int) -> None:
        while self.budget is not None and self.idle and self.held + coming > self.budget:
            del self.idle[0]

    @rule(target=leases, size=st.integers(0, 300), dtype=DTYPES)
    def lease(self, size, dtype):
        leased = self.pool.lease((size,), dtype, "cpu")
        x = leased.tensor
        assert (x.shape, x.dtype, x.device, x.is_contiguous()) == ((size,), dtype, CPU, True)
        number = self.next = self.next + 1
        bucket = self.bucket(x.nbytes)
        x.view(torch.uint8).fill_(number % 251)
        self.open[number] = (leased, bucket, x.nbytes)
        self.counts["peak"] = max(self.counts["peak"], self.held)
        self.counts["peak leased"] = max(
            self.counts["peak leased"], sum(n for _, size, n in self.open.values() if size)
        )
        self.counts["leases"] += bucket > 0
        return number

    def bucket(self, num_bytes: int) -> int:
        if num_bytes < max(self.threshold, 1):
            self.counts["plain"] += 1
            return 0
        bucket = 1
        while bucket < num_bytes:
            bucket *= 2
        if bucket in self.idle:
            del self.idle[len(self.idle) - 1 - self.idle[::-1].index(bucket)]
        else:
            self.counts["allocations"] += 1
            self.let_go(bucket)
        return bucket

    @rule(number=consumes(leases), again=st.booleans())
    def give_back(self, number, again) -> None:
        leased, bucket, _ = self.open.pop(number)
        assert bool((leased.tensor.view(torch.uint8) == number % 251).all()), "somebody wrote into a live lease"
        for _ in range(1 + again):
            leased.release()
        with pytest.raises(RuntimeError, match="may be used until its lease ends; this lease has ended"):
            _ = leased.tensor
        if bucket:
            self.idle.append(bucket)
            self.let_go(0)

    @rule(number=consumes(leases))
    def lose(self, number) -> None:
        del self.open[number]

    @rule()
    def release(self) -> None:
        self.pool.release()
        self.idle.clear()

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        leased = sum(num_bytes for _, bucket, num_bytes in self.open.values() if bucket)
        self.counts = {**dict.fromkeys(self.counts, 0), "peak": self.held, "peak leased": leased}

    @invariant()
    def live_leases_share_nothing(self) -> None:
        memory = [(x.data_ptr(), x.nbytes) for x in (leased.tensor for leased, _, _ in self.open.values()) if x.nbytes]
        memory.sort()
        assert all(start + length <= after for (start, length), (after, _) in pairwise(memory))

    @invariant()
    def statistics_add_up(self) -> None:
        found, leased = self.pool.statistics, [each for each in self.open.values() if each[1]]
        assert found.idle_bytes == sum(self.idle)
        assert found.leased_bytes == sum(num_bytes for _, _, num_bytes in leased)
        assert found.allocated_bytes == self.held
        assert (found.peak_bytes, found.peak_leased_bytes) == (self.counts["peak"], self.counts["peak leased"])
        assert (found.num_leases, found.num_allocations) == (self.counts["leases"], self.counts["allocations"])
        assert found.num_plain == self.counts["plain"]
        assert found.reuse_rate == (1 - found.num_allocations / found.num_leases if found.num_leases else 0)


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=40)
