"""Timing side by side: the jobs take turns in one process, so that drift of the machine hits all alike."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from ._result import Timing


@dataclass(frozen=True)
class Job:
    """`run` is timed; it receives what `prepare`, untimed, returns before every run (None without one)."""

    name: str
    run: Callable[[Any], object]
    prepare: Callable[[], Any] | None = None

    def seconds(self, clock: Callable[[], float] = perf_counter) -> float:
        """Of one run, by this clock."""
        given = self.prepare() if self.prepare else None
        start = clock()
        self.run(given)
        return clock() - start


class Timed(Protocol):
    """Something with a name that can be run and timed: a Job, or one by another clock."""

    @property
    def name(self) -> str:
        """What the timing is called."""
        ...

    def seconds(self) -> float:
        """Of one run."""
        ...


def interleave(jobs: Sequence[Timed], *, repeats: int) -> tuple[Timing, ...]:
    """Run every job once a round for `repeats` rounds; a Timing a job.

    There is no warm-up: the caller has verified each job's output, and so run it.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1; got {repeats=}")
    rounds: list[list[float]] = []
    for index in range(repeats):
        rounds.append([job.seconds() for job in jobs])
        times = ", ".join(f"{job.name} {seconds:.3g} s" for job, seconds in zip(jobs, rounds[-1], strict=True))
        say(f"round {index + 1} of {repeats}: {times}")
    return tuple(Timing(job.name, tuple(seconds)) for job, seconds in zip(jobs, zip(*rounds, strict=True), strict=True))


def ratio(slower: Timing, faster: Timing) -> float:
    """How many times as fast the second is, by medians."""
    return slower.median_s / faster.median_s


def say(text: str) -> None:
    """Progress, on stderr: stdout holds the table alone."""
    print(f"  {text}", file=sys.stderr, flush=True)
