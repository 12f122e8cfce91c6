"""max_batch: steps that take known sizes, on CPU for real and on a device that is made up."""

import re
from pathlib import Path

import pytest
import torch

import flexdilated as fd
from flexdilated.memory import _max_batch, max_batch

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks on CPU are read from /proc")
MIB = 1 << 20
UNIT = 48 * MIB  # of one in a batch; so large that glibc takes and returns each by itself


def touching(number: int) -> torch.Tensor:
    """That many bytes in use."""
    return torch.ones(number, dtype=torch.uint8)


@needs_proc
@pytest.mark.parametrize(("probes", "fixed"), [((1, 2), 0), ((2, 3), 60)])
def test_the_largest_that_fits(probes, fixed):
    """Within a tenth of a unit: of the process other pages come and go as well."""
    sizes = []

    def step(n):
        sizes.append(n)
        return touching(fixed * MIB), touching(n * UNIT)

    budget = fixed * MIB + int(6.5 * UNIT)
    found = max_batch(step, most=100, budget=budget, probes=probes, device="cpu")
    assert found.n == 6
    assert sizes == [probes[0], *probes, 6]  # one unmeasured, two probes, one that verifies
    assert [trial.n for trial in found.trials] == [*probes, 6]
    for trial in found.trials:
        assert trial.peak == pytest.approx(fixed * MIB + trial.n * UNIT, abs=UNIT / 10)
    assert (found.measured, found.budget) == (found.trials[-1].peak, budget)
    assert found.predicted == pytest.approx(found.measured, abs=UNIT / 5)
    assert re.fullmatch(r"n = 6: \d+ MiB at the peak, \d+ MiB predicted, of \d+ MiB", str(found))


@needs_proc
def test_what_stays_after_the_first_step_counts_in_all():
    """As gradients and an optimizer's states do: a step of n then holds them besides its own."""
    kept = []

    def step(n):
        kept[:] = kept or [touching(4 * UNIT)]
        return touching(n * UNIT)

    found = max_batch(step, most=100, budget=int(9.5 * UNIT), device="cpu")
    assert found.n == 5
    assert found.trials[0].peak == pytest.approx(5 * UNIT, abs=UNIT / 10)


class Device:
    """A made-up CUDA device of 1000 bytes, of which a step of n takes `step_bytes(n)` beside the 100 of a model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_bytes, cached: int = 0) -> None:
        self.step_bytes, self.peak, self.sizes, self.emptied = step_bytes, 100, [], 0
        stand_ins = {
            "is_available": lambda: True,
            "current_device": lambda: 3,
            "mem_get_info": lambda device: (900 - cached, 1000),
            "memory_reserved": lambda device: 100 + cached,
            "memory_allocated": lambda device: 100,
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", 100),
            "max_memory_allocated": lambda device: self.peak,
            "empty_cache": lambda: setattr(self, "emptied", self.emptied + 1),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def step(self, n: int) -> None:
        self.sizes.append(n)
        wanted = 100 + self.step_bytes(n)
        if wanted > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.peak = max(self.peak, wanted)


@pytest.mark.parametrize("cached", [0, 300])
def test_on_cuda_the_allocators_bytes_count(monkeypatch, cached):
    """80 % of 900 that are free: 720 = 20 + 70 * 10."""
    device = Device(monkeypatch, lambda n: 20 + 70 * n, cached)
    found = fd.max_batch(device.step, most=50)
    assert (found.n, found.predicted, found.measured, found.budget) == (10, 720, 720, 720)
    assert device.sizes == [1, 1, 2, 10]
    assert [(trial.n, trial.peak) for trial in found.trials] == [(1, 90), (2, 160), (10, 720)]


def test_out_of_memory_is_answered_by_less(monkeypatch):
    """Faster than linear from 5 on: the line promises 12, of which neither that nor 7 fits."""
    device = Device(monkeypatch, lambda n: 60 * n if n < 5 else 30 * n * n)
    found = fd.max_batch(device.step, most=50)
    assert found.n == 4
    assert (found.measured, found.predicted) == (240, 240)
    assert device.sizes == [1, 1, 2, 12, 7, 4, 5]
    assert [trial.peak for trial in found.trials] == [60, 120, None, None, 240, 750]
    assert device.emptied == len(device.sizes)


def test_a_second_probe_that_does_not_fit(monkeypatch):
    device = Device(monkeypatch, lambda n: 100 * n)
    assert [fd.max_batch(device.step, most=most).n for most in (1, 2, 3)] == [1, 2, 3]  # and no more than asked for
    found = fd.max_batch(device.step, most=50, probes=(2, 40))
    assert (found.n, found.trials[1].peak) == (7, None)
    assert fd.max_batch(device.step, most=50, probes=(2, 9)).n == 7  # measured, and over the budget
    assert fd.max_batch(device.step, most=50, probes=(7, 8)).n == 7


def test_memory_that_does_not_grow(monkeypatch):
    device = Device(monkeypatch, lambda n: 100 if n % 2 else 90)
    found = fd.max_batch(device.step, most=50)
    assert (found.n, found.predicted, found.measured) == (50, 100, 90)


@pytest.mark.parametrize(("over", "took"), [(730, "it took 730 B"), (950, "it ran out of memory")])
def test_not_even_the_smaller_probe_fits(monkeypatch, over, took):
    says = rf"step\(1\), the smaller probe, must fit into the budget of 720 B; {took}: give"
    with pytest.raises(ValueError, match=says):
        fd.max_batch(Device(monkeypatch, lambda n: over).step, most=50)


def test_other_errors_come_through(monkeypatch):
    def fails(n):
        raise RuntimeError("not of memory")

    Device(monkeypatch, lambda n: n)
    with pytest.raises(RuntimeError, match="not of memory"):
        fd.max_batch(fails, most=50)
    assert fd.max_batch(lambda n: touching(1 << 60) if n > 4 else None, most=5).n == 4  # the CPU allocator's own


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"most": 0}, ValueError, "most must be at least 1"),
        ({"budget": 0.8}, TypeError, "budget must be an integer"),
        ({"budget": 901}, ValueError, "budget must be within the 900 B that are free; got 901 B"),
        ({"probes": (2, 2)}, ValueError, r"probes must ascend, and the first must not exceed most; got \(2, 2\)"),
        ({"probes": (11, 12)}, ValueError, "must not exceed most; got .* and most=10"),
        ({"device": "meta"}, ValueError, "device must be 'cpu' or a CUDA device"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, change, error, message):
    device = Device(monkeypatch, lambda n: n)
    with pytest.raises(error, match=message):
        fd.max_batch(device.step, **{"most": 10, **change})
    assert device.sizes == []


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  8000 kB\n"}
GROUP_2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/memory.max": "3000000\n",
    "sys/fs/cgroup/outer/memory.current": "1000000\n",
    "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 70000\n",
    "sys/fs/cgroup/outer/inner/memory.max": "max\n",
    "sys/fs/cgroup/outer/inner/memory.current": "900000\n",
    "sys/fs/cgroup/outer/inner/memory.stat": "inactive_file 1\n",
}
GROUP_1 = {
    "proc/self/cgroup": "5:cpu:/elsewhere\n4:memory:/job\n0::/\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1500000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 200000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [({}, 8000 * 1024), (GROUP_2, 2_070_000), (GROUP_1, 700_000), ({"proc/self/cgroup": "0::/\n"}, 8000 * 1024)],
    ids=["no groups", "version 2", "version 1", "not shown"],
)
def test_free_memory_within_the_groups_limits(tmp_path, monkeypatch, files, expected):
    tree(tmp_path, MEMINFO | files)
    monkeypatch.setattr(_max_batch, "_ROOT", tmp_path)
    assert _max_batch.free_bytes(torch.device("cpu")) == expected
