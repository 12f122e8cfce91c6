"""max_batch: the largest batch, or length, whose step fits into memory, from two probes and steps that verify it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..masks.core import advises, bytes_text, device_kind, require_int

_BUDGET_SHARE = 0.8  # of free memory, if no budget is given
_ROOT = Path("/")
# Files of a control group: its limit, its usage, and the field of memory.stat with the droppable part.
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True)
class Trial:
    """One step that was run and measured.

    n: its size.
    peak: most bytes that it held on top of those held when `max_batch` was called; None if it ran out of memory.
    """

    n: int
    peak: int | None


@dataclass(frozen=True)
class MaxBatch:
    """Result of `max_batch`: the largest `n` found to fit, and measurements; bytes exclude those held at the call.

    predicted: peak of `step(n)` by the line through the probes; the smaller probe's peak if the larger probe took no
        more memory, ran out of memory or was not run.
    measured: measured peak of `step(n)`.
    budget: bytes that a step may hold.
    trials: all measured steps, the probes first.
    """

    n: int
    predicted: int
    measured: int
    budget: int
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        bytes_of = [bytes_text(each) for each in (self.measured, self.predicted, self.budget)]
        return "n = {}: {} at the peak, {} predicted, of {}".format(self.n, *bytes_of)


@advises(how="write fd.max_batch(lambda n: train_step(batch[:n]), most=64)")
def max_batch(
    step: Callable[[int], object],
    *,
    most: int,
    budget: int | None = None,
    probes: Sequence[int] = (1, 2),
    device: torch.device | str | None = None,
) -> MaxBatch:
    """Find the largest n, at most `most`, for which `step(n)` stays within the budget; n is a batch size or a length.

    The smaller probe first runs unmeasured, because first steps create optimizer states, plans and compiled code. Then
    both probes are measured. The line through them, peak = a + b * n, predicts the largest n that fits, and a real step
    verifies it; no larger n is tried after that. If that step does not fit, the midpoint to the largest step that
    fitted is tried, and so on by bisection. If memory does not grow between the probes, or the larger one was not run
    or ran out of memory, the first step after the probes has the largest n that they do not exclude. For lengths,
    choose probes longer than the pattern's segments, from where memory grows in proportion to the tokens.

    step: runs one whole step for n, such as forward, backward and the optimizer's; its result is dropped. It must leave
        no memory behind that grows with n, and take any n up to `most`.
    budget: bytes that a step may hold on top of those held at the call; None takes 80 % of the memory that is free at
        the call. On CUDA, free memory is that of the device and the unused part of the allocator's; on CPU, it is the
        available memory that Linux reports, within the limits of the process's control groups.
    probes: two sizes, ascending; the second is not run if it is above `most`.
    device: "cpu" or a CUDA device; None takes the current CUDA device, or the CPU without one. On CUDA a peak is that
        of the allocator, and a step that runs out of memory does not fit. On CPU a peak is resident memory of the whole
        process by Linux's high-water mark, so it includes other threads and pages that glibc keeps within a step. If a
        step exceeds the machine's memory, Linux may end the process; the 80 % are to prevent that.

    Raises TypeError or ValueError for an invalid argument, such as a budget above the free memory, and ValueError if
    the smaller probe does not fit or the system does not report memory. Errors of `step` are passed on, except those
    for lack of memory.

    >>> found = fd.max_batch(lambda n: torch.ones(n, 1 << 24), most=4, budget=1 << 28, device="cpu")  # 64 MiB each
    >>> 3 <= found.n <= 4
    True
    """
    require_int("most", most, minimum=1)
    smallest, *larger = _checked_probes(probes, most)
    where = _checked_device(device)
    gc.collect()
    free, start = free_bytes(where), _held_bytes(where)
    if budget is None:
        budget = int(_BUDGET_SHARE * free)
    elif require_int("budget", budget, minimum=1, maximum=1 << 62) > free:
        raise ValueError(f"budget must be within the {bytes_text(free)} that are free; got {bytes_text(budget)}")
    trials: list[Trial] = []

    def fits(n: int) -> bool:
        peak = _peak_bytes(step, n, where)
        trials.append(Trial(n, None if peak is None else peak - start))
        return peak is not None and peak - start <= budget

    if _peak_bytes(step, smallest, where) is None or not fits(smallest):
        took = f"it took {bytes_text(trials[0].peak)}" if trials and trials[0].peak else "it ran out of memory"
        raise ValueError(
            f"step({smallest}), the smaller probe, must fit into the budget of {bytes_text(budget)}; {took}: give a "
            "larger budget, a smaller probe, or a smaller model"
        )
    good, bad = smallest, most + 1
    for n in larger:
        good, bad = (n, bad) if fits(n) else (good, n)
    first, last = trials[0], trials[-1]
    assert first.peak is not None, "the smaller probe fits"
    growth = 0.0 if last.peak is None or last.n == first.n else max(0, last.peak - first.peak) / (last.n - first.n)
    largest = first.n + int((budget - first.peak) / growth) if growth else most
    candidate = min(max(largest, good), bad - 1)
    good, bad = (candidate, candidate + 1) if candidate == good or fits(candidate) else (good, candidate)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    measured = next(trial.peak for trial in reversed(trials) if trial.n == good and trial.peak is not None)
    return MaxBatch(good, round(first.peak + growth * (good - first.n)), measured, budget, tuple(trials))


def _checked_probes(probes: Sequence[int], most: int) -> list[int]:
    """Return the probes that do not exceed `most`, one or two.

    Raises TypeError or ValueError unless they are two ascending sizes of which the first does not exceed `most`.
    """
    if not isinstance(probes, Sequence) or isinstance(probes, str) or len(probes) != 2:
        raise ValueError(f"probes must be two sizes, such as (1, 2); got {probes!r:.80}")
    first, second = (require_int(f"probes[{place}]", n, minimum=1) for place, n in enumerate(probes))
    if not first < second or first > most:
        raise ValueError(f"probes must ascend, and the first must not exceed most; got {tuple(probes)} and {most=}")
    return [first, second] if second <= most else [first]


def _checked_device(device: torch.device | str | None) -> torch.device:
    """Return the device, with its index on CUDA; None: the current CUDA device, or the CPU if CUDA is not available.

    Raises ValueError for a device that is neither a CUDA device nor the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    kind = device_kind(found)
    if not (kind.on_host or kind.is_cuda):
        raise ValueError(f"device must be 'cpu' or a CUDA device, whose peaks are known; got {found}")
    if kind.is_cuda and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _peak_bytes(step: Callable[[int], object], n: int, device: torch.device) -> int | None:
    """Return the peak bytes of this process during step(n), bytes held before included; None if memory runs out.

    On CUDA the peak is that of tensors. On CPU it is Linux's high-water mark of resident memory: writing 5 to
    clear_refs resets it to the current value. Raises ValueError where that is not possible.
    """
    is_cuda, found = device_kind(device).is_cuda, None
    if is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _return_freed_pages()
        try:
            (_ROOT / "proc/self/clear_refs").write_text("5", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"peaks on CPU are read from Linux's /proc, where they cannot be reset: {error}"
            ) from error
    try:
        step(n)
        if is_cuda:
            torch.cuda.synchronize(device)
        found = (
            torch.cuda.max_memory_allocated(device) if is_cuda else _bytes_in_field(_ROOT / "proc/self/status", "VmHWM")
        )
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "DefaultCPUAllocator: can't allocate memory" not in str(error):  # torch has no specific class for it
            raise
    # Outside the handler: the error's frames no longer hold the failed step's tensors.
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
    return found


def _held_bytes(device: torch.device) -> int:
    """Return the current bytes of this process: allocated by tensors on CUDA, resident on CPU."""
    if device_kind(device).is_cuda:
        return torch.cuda.memory_allocated(device)
    _return_freed_pages()
    return _bytes_in_field(_ROOT / "proc/self/status", "VmRSS")


def _return_freed_pages() -> None:
    """Make glibc return the freed pages that it keeps, which would count as held; do nothing without glibc."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate; on CUDA including the unused memory of torch's allocator.

    On CPU: the machine's available memory, or less if the limits of the process's control groups leave less.

    Raises ValueError if the system does not report the available memory.
    """
    if device_kind(device).is_cuda:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([_bytes_in_field(_ROOT / "proc/meminfo", "MemAvailable"), *_bytes_left_in_groups()])


def _bytes_in_field(file: Path, name: str) -> int:
    """Return, in bytes, the field `name` of a file in /proc that states it in kB; ValueError if it cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"memory on CPU is read from Linux's {file}, which cannot be read: {error}") from error
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"memory on CPU is read from Linux's {file}, which has no field {name} here")


def _bytes_left_in_groups() -> Iterator[int]:
    """Yield the bytes left under the limit of each control group around this process, in cgroup versions 1 and 2.

    Droppable pages of files count as free, as in MemAvailable. Groups without a limit, and groups whose files this
    process cannot read, are skipped.
    """
    file = _ROOT / "proc/self/cgroup"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = _ROOT / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, usage, droppable = _CGROUP_V1 if controllers else _CGROUP_V2
        inner = top / path.lstrip("/")
        for group in (each for each in (inner, *inner.parents) if each.is_relative_to(top)):
            try:
                most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            if most != "max":
                yield max(0, int(most) - used + int(stat.get(droppable, 0)))
