"""BufferPool against a model: any order of leases, returns, releases and lost leases."""

from itertools import pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from flexdilated.distributed import BufferPool

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
        assert (x.shape, x.dtype) == ((size,), dtype)
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

    @invariant()
    def the_budget_holds(self) -> None:
        if self.budget is not None:
            leased = sum(bucket for _, bucket, _ in self.open.values())
            assert self.pool.statistics.allocated_bytes <= max(self.budget, leased)


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=40)
