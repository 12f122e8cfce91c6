"""Where a measurement runs: the device, its number format, and the clock that fits it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

import torch
from torch import Tensor

from .._problem import Problem, Size
from .._result import Timing
from .._timing import Job, interleave

# How many times the second-level cache is overwritten before each run: about a millisecond of work, in which Python
# issues the first kernels of the run, so that the device does not wait for them while the clock runs.
_FLUSHED = 16


@dataclass(frozen=True)
class Where:
    """A device by its name. The dry run takes the CPU, and stand-ins for what it does not have.

    `rehearsing`: to compile what will be measured, among others that do the same; nothing is checked or timed in
    earnest.
    """

    device: str
    rehearsing: bool = False

    @property
    def is_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 everywhere: the dry run runs the same code."""
        return torch.bfloat16

    @property
    def tolerance(self) -> float:
        """Relative error of output and gradients that bfloat16 operands explain: some 4e-3, and a margin."""
        return 2e-2

    def draw(self, size: Size, *, seed: int = 0) -> Problem:
        """Random tensors on the device."""
        return Problem.draw(size, seed=seed, device=self.device, dtype=self.dtype)

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """By the wall clock, from the call until the device is done."""
        self.wait()
        start = perf_counter()
        work()
        self.wait()
        return perf_counter() - start

    def tidy(self) -> None:
        """Give freed memory back, so that one job's leftovers are not another's shortage."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def time(self, jobs: Sequence[Job], *, repeats: int) -> tuple[Timing, ...]:
        """The jobs in turns, each from a cold cache; on CUDA by the device's own events."""
        timed = [_ByEvents(job) for job in jobs] if self.is_cuda else jobs
        return interleave(timed, repeats=repeats)


@dataclass(frozen=True)
class _ByEvents:
    """A job timed between two events, with nothing of an earlier run in the second-level cache."""

    job: Job

    @property
    def name(self) -> str:
        return self.job.name

    def seconds(self) -> float:
        given = self.job.prepare() if self.job.prepare else None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush = _flush_buffer(torch.cuda.current_device())
        for _ in range(_FLUSHED):
            flush.zero_()
        start.record()
        self.job.run(given)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


@lru_cache(maxsize=1)
def _flush_buffer(device: int) -> Tensor:
    # Twice the cache, and never so little that it is no work.
    size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 256 << 20)
    return torch.empty(size, dtype=torch.int8, device=f"cuda:{device}")
