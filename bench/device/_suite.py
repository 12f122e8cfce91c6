"""The rows of the suite, how long each may take, and the run: correctness first, then row by row, each apart.

An error on the device poisons the process that met it, so nothing is measured in the process of another row. Caches
of compiled kernels on disk are shared: many small processes cost little more than one.
"""

import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch.nn.attention

from .._jobs import say
from .._machine import conditions
from .._measures import Gap, Target
from .._processes import DiedApart, TookTooLong, run_apart
from . import _parts, _ranks, _rows  # noqa: F401  (importing the rows registers them)
from ._correctness import QUESTION, Trial, Verdict, failure, judge, run_device_tests, summary, trials
from ._device import REGISTERED, DeviceRow, Where, ways

Document = dict[str, Any]

CORRECTNESS = "gpu_correctness"
SUITE: dict[str, DeviceRow] = {row.name: row for row in sorted(REGISTERED, key=lambda row: int(row.code[1:]))}
NAMES = (CORRECTNESS, *SUITE)
CODES = {"G0": CORRECTNESS, **{row.code: name for name, row in SUITE.items()}}

_CASE_LIMIT_S, _REHEARSAL_LIMIT_S = 120.0, 150.0
_WORKERS = {True: 12, False: 2}  # on CUDA compilation keeps them busy, not the device
_DRY_RUN_FACTOR = 30  # a CPU that others share builds C++ slowly
_LEAST_S = 5.0  # with less left, a row is not begun


@dataclass(frozen=True)
class Failure:
    """Why a process gave no result."""

    reason: str


class Clock:
    """How much is left of the whole suite's time."""

    def __init__(self, total_s: float) -> None:
        self._end = perf_counter() + total_s

    def left_s(self, most: float) -> float:
        """Seconds that something may take which should take no more than `most`."""
        return min(most, self._end - perf_counter())


@dataclass(frozen=True)
class Suite:
    """Where to run which rows, small or in full, and which commit that is if there is no git to ask."""

    where: Where
    small: bool
    names: tuple[str, ...]
    flash_impl: str | None = None
    commit: str | None = None

    def run(self, total_s: float, keep: Callable[[Document], None]) -> None:
        """Measure every row and hand its document to `keep` as soon as there is one."""
        clock = Clock(total_s)
        shared = self._conditions()
        spoiled: dict[str, list[str]] = {}
        if CORRECTNESS in self.names:
            verdicts, tests, seconds = self._beforehand(clock)
            for verdict in verdicts.values():
                for figure in verdict.spoils:
                    spoiled.setdefault(figure, []).append(verdict.row.measure)
            rows = [row.to_data() for row in (*summary(list(verdicts.values())), tests)]
            named = {"name": CORRECTNESS, "question": QUESTION, "config": {}}
            keep({**named, "rows": rows, "seconds": seconds, **shared})
        for name in self.names:
            if name in SUITE:
                keep({**self._measure(name, clock, spoiled), **shared})

    def _beforehand(self, clock: Clock) -> tuple[dict[Trial, Verdict], Any, float]:
        """The odd cases, and on CUDA a rehearsal of the rows that fills the caches of compiled kernels."""
        start = perf_counter()
        found = self._apart(trials, self.where, limit_s=clock.left_s(self._seconds(_CASE_LIMIT_S)))
        if isinstance(found, Failure):
            raise SystemExit(f"nothing runs on {self.where.device}: {found.reason}")
        names = [name for name in self.names if self.where.is_cuda and name in SUITE]
        rehearsals = [(name, options) for name in names for options in SUITE[name].rehearsals(small=self.small)]
        with ThreadPoolExecutor(_WORKERS[self.where.is_cuda]) as pool:
            judged = [pool.submit(self._judge, trial, clock) for trial in found]
            tests = pool.submit(run_device_tests, self.where, clock.left_s(self._seconds(_CASE_LIMIT_S)))
            list(pool.map(lambda rehearsal: self._rehearse(rehearsal[0], rehearsal[1], clock), rehearsals))
            verdicts = dict(zip(found, (each.result() for each in judged), strict=True))
            return verdicts, tests.result(), perf_counter() - start

    def _judge(self, trial: Trial, clock: Clock) -> Verdict:
        found = self._apart(judge, trial, self.where, limit_s=clock.left_s(self._seconds(_CASE_LIMIT_S)))
        verdict = failure(trial, found.reason) if isinstance(found, Failure) else found
        say(f"{CORRECTNESS}: {trial.measure}: {verdict.row.to_data()['measured_text']}")
        return verdict

    def _rehearse(self, name: str, options: dict[str, Any], clock: Clock) -> None:
        """Its numbers mean nothing, and what fails here fails again when it counts."""
        start, where = perf_counter(), replace(self.where, rehearsing=True)
        self._apart(rehearse, name, options, where, limit_s=clock.left_s(_REHEARSAL_LIMIT_S))
        say(f"{name} rehearsed: {perf_counter() - start:.0f} s")

    def _measure(self, name: str, clock: Clock, spoiled: dict[str, list[str]]) -> Document:
        row = SUITE[name]
        document = {"name": name, "question": row.question, "config": {}}
        limit_s = clock.left_s(self._seconds(row.limit_s))
        start = perf_counter()
        if limit_s < _LEAST_S:
            found: Any = Failure("the suite's time was up")
        else:
            say(f"{name}: {row.question}")
            found = self._apart(answer, name, self.small, self.where, limit_s=limit_s)
        seconds = perf_counter() - start
        if isinstance(found, Failure):
            say(f"{name} failed: {found.reason}")
            blank = Gap(row.question, Target("≥", 0), found.reason).to_data() | {"target": ""}
            return document | {"rows": [blank], "seconds": seconds}
        say(f"{name}: {seconds:.0f} s")
        rows = [marked(each, row.needs, spoiled, found["ways"]) for each in found["rows"]]
        return document | found | {"rows": rows, "seconds": seconds}

    def _seconds(self, on_a_device: float) -> float:
        """A limit here, where that of a device is stated."""
        return on_a_device if self.where.is_cuda else on_a_device * _DRY_RUN_FACTOR

    def _apart(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        try:
            return run_apart(_guarded, self.flash_impl, function, args, limit_s=max(limit_s, 0.0))
        except TookTooLong as error:
            return Failure(str(error))
        except DiedApart as error:
            return Failure(f"{error}; its last words are above")

    def _conditions(self) -> Document:
        here = self._apart(conditions, self.where.device, limit_s=self._seconds(_CASE_LIMIT_S))
        if isinstance(here, Failure):
            raise SystemExit(f"nothing runs on {self.where.device}: {here.reason}")
        return {"small": self.small, "points": [], **here, "commit": self.commit or here["commit"]}


def answer(name: str, small: bool, where: Where) -> Document:
    """Configuration and rows of one measure, as plain data, and the ways that there are."""
    return SUITE[name].answer_on(where, small=small) | {"ways": [way.name for way in ways(where)]}


def rehearse(name: str, options: dict[str, Any], where: Where) -> None:
    """A part of a measure, once."""
    list(SUITE[name].run(where, **options))


def _guarded(flash_impl: str | None, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result, or a Failure for whatever was raised: here every error is a line in a report."""
    try:
        if flash_impl is not None:
            torch.nn.attention.activate_flash_attention_impl(flash_impl)
        return function(*args)
    except Exception as error:
        traceback.print_exc()
        return Failure(f"{type(error).__name__}: {error}")


def marked(row: Document, needs: Iterable[str], spoiled: dict[str, list[str]], names: list[str]) -> Document:
    """The row, with the failed cases that its figures depend on: those of its way, by default the first."""
    named = [way for way in names if f", {way}:" in row["measure"]]
    way = named[0] if named else row["detail"].get("best", names[0])
    failed = [case for need in needs for case in spoiled.get(need, []) if case.endswith(f", {way}")]
    if row["measured"] is None or not failed:
        return row
    return row | {"not_verified": [*row.get("not_verified", []), *dict.fromkeys(failed)]}
