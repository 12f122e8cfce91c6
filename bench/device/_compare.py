"""Contestants side by side: first call, check against the definition, then timed in turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from .._oracle import Rule, check_forward, check_training
from .._problem import Attention, Problem, backward_job, forward_job, train, training_job
from .._result import Timing
from .._timing import Job, say
from ._where import Where

Part = Literal["forward", "backward", "forward + backward"]

_JOBS = {"forward": forward_job, "backward": backward_job, "forward + backward": training_job}


@dataclass(frozen=True, eq=False)
class Contestant:
    """An attention on a problem, and the rule it follows; a rule of None is not checked here."""

    name: str
    attention: Attention
    problem: Problem
    rule: Rule | None
    constant_weights: bool = False


@dataclass(frozen=True)
class Comparison:
    """Timings by name; the first calls, compilation included; what failed a check; what could not run, and why."""

    timings: dict[str, Timing]
    first_call_s: dict[str, float]
    objections: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)

    def median_s(self, name: str) -> float:
        return self.timings[name].median_s

    def missing(self, *names: str) -> str | None:
        """Why the first of these names that has no timing has none."""
        reasons = (f"{name}: {self.failed[name]}" for name in names if name not in self.timings)
        return next(reasons, None)


def compare(
    contestants: Sequence[Contestant], where: Where, *, part: Part, repeats: int, extra: Sequence[Job] = ()
) -> Comparison:
    """Time one part of every contestant's work in turns, with `extra` jobs between.

    What raises is left out and reported, what fails its check is timed and reported: figures of a function that
    computes something else are marked, not hidden.
    """
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    objections: list[str] = []

    def try_out(each: Contestant) -> None:
        say(f"first call of {each.name}")
        first[each.name] = where.seconds(lambda: _once(each, part))
        where.tidy()
        if not where.rehearsing:
            objections.extend(_objection(each, where, part))

    named = {job.name: job.seconds for job in extra} | {each.name: partial(try_out, each) for each in contestants}
    for name, work in named.items():
        try:
            work()
        except (RuntimeError, ValueError, TypeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"{name} fails: {failed[name].partition(chr(10))[0]}")
        where.tidy()
    jobs = [_JOBS[part](each.name, each.attention, each.problem) for each in contestants]
    timings = where.time([job for job in (*jobs, *extra) if job.name not in failed], repeats=repeats)
    return Comparison({timing.name: timing for timing in timings}, first, tuple(objections), failed)


def _once(each: Contestant, part: Part) -> None:
    if part == "forward":
        with torch.no_grad():
            each.attention(each.problem.q, each.problem.k, each.problem.v)
    else:
        train(each.attention, each.problem)


def _objection(each: Contestant, where: Where, part: Part) -> list[str]:
    """What a check against the definition in float64 finds wrong."""
    if each.rule is None:
        return []
    try:
        if part == "forward":
            check_forward(each.attention, each.problem, each.rule, tolerance=where.tolerance)
        else:
            options = {"constant_weights": each.constant_weights, "tolerance": where.tolerance}
            check_training(each.attention, each.problem, each.rule, **options)
    except AssertionError as error:
        say(f"{each.name}: {error}")
        return [f"{each.name}: {error}"]
    return []
