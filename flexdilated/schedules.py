"""Schedules of whole numbers over training steps, such as how many blocks a query sees, of few distinct values."""

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
    """A whole number for each step, from `start` to `end`, never back: see `linear`, `cosine` and `cubic`.

    It is called with a step and has no state: a run that is resumed finds the same number at the same step.

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
        """The number at this step, counted from 0. Raises TypeError or ValueError for what is no step."""
        time = (require_int("step", step, minimum=0) - self.begin) / self.steps
        done = _CURVES[self.curve](min(max(time, 0.0), 1.0))
        return self._value(floor(done * self._levels + 0.5))

    @property
    def values(self) -> tuple[int, ...]:
        """All numbers that can come, from `start` to `end`: at most `widths`, each once."""
        return tuple(dict.fromkeys(map(self._value, range(self._levels + 1))))

    @property
    def _levels(self) -> int:
        """Steps from one value to the next; no more than there are whole numbers."""
        return min(self.widths - 1, abs(self.end - self.start))

    def _value(self, level: int) -> int:
        """Level 0 is `start`, the last one `end`; between them they are evenly apart, rounded."""
        last = max(1, self._levels)
        return self.start + (2 * (self.end - self.start) * level + last) // (2 * last)


@advises()
def linear(start: int, end: int, steps: int, *, begin: int = 0, widths: int = 8) -> Schedule:
    """From `start` to `end` at a constant rate: start until step `begin`, end from step begin + steps on.

    start, end: whole numbers from 0 on, either one the larger. steps: how many the change takes, from 1 on.
    begin: the step at which it starts. widths: most distinct values, from 2 on, start and end among them; if
        each value is compiled for, so many compilations.
    Raises TypeError or ValueError for other numbers.

    >>> [fd.schedules.linear(0, 4, 8)(step) for step in range(10)]
    [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    """
    return Schedule("linear", start, end, steps, begin, widths)


@advises()
def cosine(start: int, end: int, steps: int, *, begin: int = 0, widths: int = 8) -> Schedule:
    """From `start` to `end` along half a period of a cosine, slow at both ends: RigL's annealing, arXiv 1911.11134.

    The value is end + (start - end) * (1 + cos(pi * t)) / 2 with t = (step - begin) / steps, rounded to one of the
    values. Arguments and errors: as for `linear`.

    >>> fd.schedules.cosine(32, 8, 100)(10), fd.schedules.cosine(32, 8, 100)(90)
    (32, 8)
    """
    return Schedule("cosine", start, end, steps, begin, widths)


@advises()
def cubic(start: int, end: int, steps: int, *, begin: int = 0, widths: int = 8) -> Schedule:
    """From `start` to `end`, fast at first: end + (start - end) * (1 - t)^3 with t = (step - begin) / steps.

    Source: Zhu and Gupta, arXiv 1710.01878, section 3. The value is rounded to one of the schedule's. Arguments and
    errors: as for `linear`.

    >>> fd.schedules.cubic(64, 8, 100)(20), fd.schedules.linear(64, 8, 100)(20)
    (40, 56)
    """
    return Schedule("cubic", start, end, steps, begin, widths)
