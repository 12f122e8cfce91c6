"""The learning rate over a run, and where a run ends that its time limit cuts short."""

from __future__ import annotations

_WARMUP_STEPS = 10
# Steps of this run after which its pace is known.
_PACE_STEPS = 5


def learning_rate_factor(step: int, *, steps: int) -> float:
    """Share of the full rate at a step: up in a few steps, then down in a line to 0 at `steps`."""
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - step / steps)


def planned_steps(*, steps: int, done: int, ran: int, elapsed_seconds: float, limit_seconds: float) -> int:
    """How many steps the run will end with: all, or as many as the time limit allows at the pace so far.

    `done` counts all steps behind, `ran` those of this process. Where the result is below
    `steps`, the learning rate falls to 0 at the end in sight, and the run depends on the machine's pace.
    """
    if ran < _PACE_STEPS and elapsed_seconds < limit_seconds:
        return steps
    left = max(0.0, limit_seconds - elapsed_seconds)
    return min(steps, done + int(left * ran / elapsed_seconds))
