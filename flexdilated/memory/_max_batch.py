"""max_batch: the largest batch, or length, whose step fits into memory, from two probes and steps that verify it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..masks.core import advises, bytes_text, device_kind, require_int
from ._free_memory import free_bytes, held_bytes, peak_bytes

_SHARE = 0.8  # of free memory, if no budget is given


@dataclass(frozen=True)
class Trial:
    """One step that was run: its size, and its peak bytes; None if it ran out of memory."""

    n: int
    peak: int | None


@dataclass(frozen=True)
class MaxBatch:
    """The largest `n` that fits, and the evidence; all bytes are on top of what was held at the start.

    predicted: peak of a step of n by the line through the probes. measured: peak of one that was run. budget: the
    bound. trials: all measured steps, the probes first.
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
    verifies it. If that step does not fit, the midpoint to the largest step that fitted is tried, and so on by
    bisection. If memory does not grow between the probes, `most` is tried at once. For lengths, choose probes longer
    than the pattern's segments, from where memory grows in proportion to the tokens.

    step: runs one whole step for n, such as forward, backward and the optimizer's; its result is dropped. It must
        leave no memory behind that grows with n, and may run for any n up to `most`.
    budget: bytes that a step may hold on top of what is held at the call; None takes 80 % of the memory free then. On
        CUDA free memory is that of the device and the unused part of the allocator's; on CPU the available memory that
        Linux reports, within the limits of the process's control groups.
    probes: two sizes, ascending; one above `most` is not run.
    device: "cpu" or a CUDA device; None takes the current CUDA device, if any. On CUDA a peak is that of the allocator,
        and a step that runs out of memory does not fit. On CPU a peak is resident memory of the whole process by
        Linux's high-water mark, so it includes other threads and pages that glibc keeps within a step. If a step
        exceeds the machine's memory, Linux may end the process; the 80 % are to prevent that.

    Raises ValueError for an invalid budget, probes or device, and if not even the smaller probe fits.

    >>> found = fd.max_batch(lambda n: torch.ones(n, 1 << 24), most=4, budget=1 << 28, device="cpu")  # 64 MiB each
    >>> 3 <= found.n <= 4
    True
    """
    require_int("most", most, minimum=1)
    smallest, *larger = _checked_probes(probes, most)
    where = _checked_device(device)
    gc.collect()
    free, start = free_bytes(where), held_bytes(where)
    if budget is None:
        budget = int(_SHARE * free)
    elif require_int("budget", budget, minimum=1, maximum=1 << 62) > free:
        raise ValueError(f"budget must be within the {bytes_text(free)} that are free; got {bytes_text(budget)}")
    trials: list[Trial] = []

    def fits(n: int) -> bool:
        peak = _peak(step, n, where)
        trials.append(Trial(n, None if peak is None else peak - start))
        return peak is not None and peak - start <= budget

    if _peak(step, smallest, where) is None or not fits(smallest):
        took = f"it took {bytes_text(trials[0].peak)}" if trials and trials[0].peak else "it ran out of memory"
        raise ValueError(
            f"step({smallest}), the smaller probe, must fit into the budget of {bytes_text(budget)}; {took}: give a "
            "larger budget, a smaller probe, or a smaller model"
        )
    good, bad = smallest, most + 1
    for n in larger:
        good, bad = (n, bad) if fits(n) else (good, n)
    line = _Line.through(trials)
    candidate = min(max(line.largest(budget), good), bad - 1)
    good, bad = (candidate, candidate + 1) if candidate == good or fits(candidate) else (good, candidate)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    measured = next(trial.peak for trial in reversed(trials) if trial.n == good and trial.peak is not None)
    return MaxBatch(good, line.at(good), measured, budget, tuple(trials))


@dataclass(frozen=True)
class _Line:
    """Line of bytes by size: `peak` at size `n`, and `each` more per unit."""

    n: int
    peak: int
    each: float

    @classmethod
    def through(cls, trials: Sequence[Trial]) -> _Line:
        """Line through the two probes; flat for one probe."""
        first, last = trials[0], trials[-1]
        assert first.peak is not None, "the smaller probe fits"
        if last.peak is None or last.n == first.n:
            return cls(first.n, first.peak, 0.0)
        return cls(first.n, first.peak, max(0.0, (last.peak - first.peak) / (last.n - first.n)))

    def at(self, n: int) -> int:
        return round(self.peak + self.each * (n - self.n))

    def largest(self, budget: int) -> int:
        """Largest size within the budget; unbounded if the line does not grow."""
        return self.n + int((budget - self.peak) / self.each) if self.each else torch.iinfo(torch.int64).max


def _peak(step: Callable[[int], object], n: int, device: torch.device) -> int | None:
    """Peak bytes of a step; None if it runs out of memory."""
    try:
        found = peak_bytes(lambda: step(n), device)
    except (torch.OutOfMemoryError, MemoryError):
        found = None
    except RuntimeError as error:
        if "DefaultCPUAllocator: can't allocate memory" not in str(error):  # torch has no specific class for it
            raise
        found = None
    # Outside the handler: the error's frames no longer hold the failed step's tensors.
    gc.collect()
    if device_kind(device).is_cuda:
        torch.cuda.empty_cache()
    return found


def _checked_probes(probes: Sequence[int], most: int) -> list[int]:
    """The probes that do not exceed `most`, one or two."""
    if not isinstance(probes, Sequence) or isinstance(probes, str) or len(probes) != 2:
        raise ValueError(f"probes must be two sizes, such as (1, 2); got {probes!r:.80}")
    first, second = (require_int(f"probes[{place}]", n, minimum=1) for place, n in enumerate(probes))
    if not first < second or first > most:
        raise ValueError(f"probes must ascend, and the first must not exceed most; got {tuple(probes)} and {most=}")
    return [first, second] if second <= most else [first]


def _checked_device(device: torch.device | str | None) -> torch.device:
    """A CPU or CUDA device with its index."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    kind = device_kind(found)
    if not (kind.on_host or kind.is_cuda):
        raise ValueError(f"device must be 'cpu' or a CUDA device, whose peaks are known; got {found}")
    if kind.is_cuda and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
