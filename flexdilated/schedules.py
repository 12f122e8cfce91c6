"""Schedules: an integer for each training step, such as the number of blocks per query, with few distinct values."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, pi, sin

from .masks.core import advises, require_choice, require_int

__all__ = ["Schedule", "cosine", "cubic", "linear"]

_CURVES = {
    "linear": lambda time: time,
    "cosine": lambda time: sin(pi / 2 * time) ** 2,  # (1 - cos(pi * time)) / 2
    "cubic": lambda time: 1 - (1 - time) * (1 - time) * (1 - time),
}


@dataclass(frozen=True)
class Schedule:
    """Function from a training step to an integer between `start` and `end`, such as a number of blocks per query.

    Call it with a step, counted from 0: the result is `start` up to step `begin`, `end` from step begin + steps on, and
    monotone in between, along the curve. It has no state, so a resumed run gets equal values at equal steps. Made by
    `linear`, `cosine` and `cubic`.

    curve: "linear", "cosine" or "cubic".
    start, end, steps, begin: as in `linear`.
    widths: maximum number of distinct values, including start and end, at least 2.

    Raises TypeError or ValueError for other values.

    >>> schedule = fd.schedules.linear(64, 8, 1000, widths=8)
    >>> schedule(0), schedule(500), schedule(10_000), schedule.values
    (64, 32, 8, (64, 56, 48, 40, 32, 24, 16, 8))
    """

    curve: str
    start: int
    end: int
    steps: int
    begin: int = 0
    widths: int = 8

    def __post_init__(self) -> None:
        require_choice("curve", self.curve, tuple(_CURVES))
        for name, minimum in (("start", 0), ("end", 0), ("steps", 1), ("begin", 0), ("widths", 2)):
            require_int(name, getattr(self, name), minimum=minimum)

    def __call__(self, step: int) -> int:
        """Return the value at this step, counted from 0.

        Raises TypeError or ValueError unless `step` is an integer >= 0.
        """
        time = (require_int("step", step, minimum=0) - self.begin) / self.steps
        done = _CURVES[self.curve](min(max(time, 0.0), 1.0))
        return self._value(floor(done * self._last_level + 0.5))

    @property
    def values(self) -> tuple[int, ...]:
        """Values to which the curve is rounded, at most `widths`, from `start` to `end`; a fast curve may skip some."""
        return tuple(dict.fromkeys(map(self._value, range(self._last_level + 1))))

    @property
    def _last_level(self) -> int:
        """Number of the level whose value is `end`, at most `widths` - 1; level 0 has the value `start`."""
        return min(self.widths - 1, abs(self.end - self.start))

    def _value(self, level: int) -> int:
        """Return the value of a level: evenly spaced from `start` (level 0) to `end` (`_last_level`), then rounded."""
        last = max(1, self._last_level)
        return self.start + (2 * (self.end - self.start) * level + last) // (2 * last)


@advises()
def linear(start: int, end: int, steps: int, *, begin: int = 0, widths: int = 8) -> Schedule:
    """Make a `Schedule`: `start` up to training step `begin`, `end` from step begin + steps on, linear in between.

    The `Schedule` is a function from a step, counted from 0, to an integer.

    start, end: integers, at least 0; either may be the larger.
    steps: number of steps of the change, at least 1.
    begin: step at which the change starts.
    widths: maximum number of distinct values, including start and end, at least 2; it bounds the number of compilations
        if each value needs one.

    Raises TypeError or ValueError for other values.

    >>> [fd.schedules.linear(0, 4, 8)(step) for step in range(10)]
    [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    """
    return Schedule("linear", start, end, steps, begin, widths)


@advises()
def cosine(start: int, end: int, steps: int, *, begin: int = 0, widths: int = 8) -> Schedule:
    """Make a `Schedule` along half a period of a cosine, slow at both ends: RigL's annealing, arXiv 1911.11134.

    The `Schedule` is a function from a training step to an integer. The value is end + (start - end) * (1 + cos(pi *
    t)) / 2 with t = (step - begin) / steps, clamped to [0, 1], rounded to one of the schedule's `values`. Arguments and
    errors are those of `linear`.

    >>> fd.schedules.cosine(32, 8, 100)(10), fd.schedules.cosine(32, 8, 100)(90)
    (32, 8)
    """
    return Schedule("cosine", start, end, steps, begin, widths)


@advises()
def cubic(start: int, end: int, steps: int, *, begin: int = 0, widths: int = 8) -> Schedule:
    """Make a `Schedule` along a cubic, fast at first: end + (start - end) * (1 - t)^3, t = (step - begin) / steps.

    The `Schedule` is a function from a training step to an integer. t is clamped to [0, 1], and the value is rounded to
    one of the schedule's `values`. Arguments and errors are those of `linear`.
    Source: Zhu and Gupta, arXiv 1710.01878, section 3.

    >>> fd.schedules.cubic(64, 8, 100)(20), fd.schedules.linear(64, 8, 100)(20)
    (40, 56)
    """
    return Schedule("cubic", start, end, steps, begin, widths)
