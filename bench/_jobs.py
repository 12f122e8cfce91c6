"""Jobs that take turns on the same tensors, so that drift of the machine hits all alike; and their peak memory."""

import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ._measures import Row, Target, Timing
from ._processes import run_apart

# B batch, H heads, N tokens, D head dim

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Part = Literal["forward", "backward", "forward + backward"]
WARM_UP_TOKENS = 64
_PROC = Path("/proc/self")
_M_MMAP_THRESHOLD = -3  # of mallopt, in bytes


@dataclass(frozen=True)
class Job:
    """`run` is timed; it receives what `prepare`, untimed, returns before every run (None without one)."""

    name: str
    run: Callable[[Any], object]
    prepare: Callable[[], Any] | None = None

    def seconds(self, clock: Callable[[], float] = perf_counter) -> float:
        given = self.prepare() if self.prepare else None
        start = clock()
        self.run(given)
        return clock() - start


# How many times a device's second-level cache is overwritten before each run: about a millisecond of work, in which
# Python issues the first kernels of the run, so that the device does not wait for them while the clock runs.
FLUSHES = 16


def seconds_on_cuda(job: Job) -> float:
    """Seconds of one run between two events on the device, with a flushed second-level cache."""
    given = job.prepare() if job.prepare else None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    buffer = _flush_buffer(torch.cuda.current_device())
    for _ in range(FLUSHES):
        buffer.zero_()
    start.record()
    job.run(given)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


@lru_cache(maxsize=1)
def _flush_buffer(device: int) -> Tensor:
    # Twice the cache, and at least 256 MiB, so that it is work.
    size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 256 << 20)
    return torch.empty(size, dtype=torch.int8, device=f"cuda:{device}")


def interleave(
    jobs: Sequence[Job], *, repeats: int, seconds: Callable[[Job], float] = Job.seconds
) -> tuple[Timing, ...]:
    """Run every job once a round for `repeats` rounds; a Timing a job, by the clock `seconds`.

    There is no warm-up: the caller has verified each job's output, and so run it.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1; got {repeats=}")
    rounds: list[list[float]] = []
    for index in range(repeats):
        rounds.append([seconds(job) for job in jobs])
        times = ", ".join(f"{job.name} {took:.3g} s" for job, took in zip(jobs, rounds[-1], strict=True))
        say(f"round {index + 1} of {repeats}: {times}")
    return tuple(Timing(job.name, tuple(took)) for job, took in zip(jobs, zip(*rounds, strict=True), strict=True))


def ratio(slower: Timing, faster: Timing) -> float:
    """Median over median."""
    return slower.median_s / faster.median_s


def race(what: str, target: Target, jobs: Sequence[Job], *, repeats: int, over: float = 1.0, **detail: Any) -> Row:
    """The first job's median time over the second's, divided by `over`, with the timings of all jobs."""
    timings = interleave(jobs, repeats=repeats)
    return Row(what, target, ratio(timings[0], timings[1]) / over, timings, detail)


def say(text: str) -> None:
    """Progress, on stderr: stdout holds the table alone."""
    print(f"  {text}", file=sys.stderr, flush=True)


def tokens_text(num_tokens: int) -> str:
    """16384 as 16K; other numbers in full."""
    return f"{num_tokens // 1024}K" if num_tokens % 1024 == 0 else f"{num_tokens:,}"


@dataclass(frozen=True)
class Size:
    """Sizes of a problem, and the number of timed rounds."""

    num_tokens: int
    num_heads: int
    head_dim: int = 64
    repeats: int = 5

    def __str__(self) -> str:
        return tokens_text(self.num_tokens)


@dataclass(frozen=True, eq=False)
class Problem:
    """Tensors to attend over and the gradient of the output, drawn from a seed."""

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B H N D"]
    v: Float[Tensor, "B H N D"]
    grad: Float[Tensor, "B H N D"]

    @classmethod
    def draw(cls, size: Size, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> "Problem":
        generator = torch.Generator(device).manual_seed(seed)
        shape = (1, size.num_heads, size.num_tokens, size.head_dim)
        return cls(*(torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)))

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as fresh leaves over the same storage, with gradients on."""
        q, k, v = (x.detach().requires_grad_() for x in self.qkv)
        return q, k, v


def attention_job(name: str, attention: Attention, problem: Problem, part: Part = "forward") -> Job:
    """Inference; or a backward after a forward that is not timed; or both, to dq, dk and dv."""

    def infer(_: None) -> None:
        with torch.no_grad():
            attention(*problem.qkv)

    def prepare() -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = problem.leaves
        return attention(*leaves), leaves

    if part == "forward":
        return Job(name, infer)
    if part == "backward":
        return Job(name, lambda made: torch.autograd.grad(made[0], made[1], problem.grad), prepare)
    return Job(name, lambda _: train(attention, problem))


def train(attention: Attention, problem: Problem) -> tuple[Tensor, ...]:
    """dq, dk and dv."""
    leaves = problem.leaves
    return torch.autograd.grad(attention(*leaves), leaves, problem.grad)


def peak_bytes(prepare: Callable[..., Callable[[], object]], *args: Any) -> int:
    """Peak resident bytes that `prepare(*args)()` adds to those after `prepare(*args)`, in a separate process.

    `prepare` must be importable and should run the work once at a tiny size, so that set-up (thread pools, tables of
    kernels) is not counted.
    """
    return run_apart(_peak, prepare, args)


def _peak(prepare: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> int:
    # glibc keeps freed memory for later allocations up to a size that grows as a process runs, by which peaks differ
    # between equal runs by a third; set once, the size stays.
    getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)(_M_MMAP_THRESHOLD, 1 << 17)
    return peak_here(prepare(*args))


def peak_here(work: Callable[[], object]) -> int:
    """The same of work in this process, which should be a fresh one. Raises OSError where the kernel keeps no account.

    The mark is VmHWM, not ru_maxrss: a child starts with its parent's ru_maxrss.
    """
    (_PROC / "clear_refs").write_text("5")  # resets the mark to what is resident now
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in (_PROC / "status").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_PROC / 'status'} has no field {name}")


def held_bytes(prepare: Callable[..., Callable[[], object]], *args: Any) -> int:
    """Resident bytes that `prepare(*args)()` leaves behind, in a separate process; `prepare` as for `peak_bytes`."""
    return run_apart(_held, prepare, args)


def _held(prepare: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> int:
    work = prepare(*args)
    before = _status_bytes("VmRSS")
    work()
    gc.collect()
    return _status_bytes("VmRSS") - before


def step_bytes(name: str, attention: Callable[[], Attention], size: Size) -> int:
    """Peak bytes of a forward and backward: inputs, the output's gradient, results, plan and temporaries."""
    peak = peak_bytes(_step, attention, size)
    say(f"{name}, {size}: peak {peak / 2**20:.0f} MiB")
    return peak


def _step(make: Callable[[], Attention], size: Size) -> Callable[[], object]:
    attention = make()
    train(attention, Problem.draw(replace(size, num_tokens=WARM_UP_TOKENS)))
    return lambda: train(attention, Problem.draw(size))
