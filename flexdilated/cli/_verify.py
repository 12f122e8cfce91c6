"""`doctor --verify`: a small job for each engine and module, its result against float64, its memory and its time."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import fill
from time import perf_counter
from typing import Any

import torch
from tabulate import tabulate

from ..masks.core._bytes_text import bytes_text
from . import _verify_ranks
from ._machine import available_devices
from ._sizes import seconds_text
from ._verify_jobs import Job, jobs
from ._verify_measure import Measured

# A float32 result this far from the float64 one is wrong, not rounded.
LARGEST_ERROR = 1e-4


@dataclass(frozen=True)
class Verdict:
    """What became of a job: what was measured, or why nothing was; `skipped` says why it cannot be tried here."""

    name: str
    device: str
    measured: Measured | None = None
    failure: str | None = None
    skipped: str | None = None

    @property
    def cause(self) -> str | None:
        """What is wrong; None where nothing is."""
        if self.failure is None and self.measured is not None and not self.measured.error < LARGEST_ERROR:
            return f"is {self.measured.error:.1e} away from the float64 result, and {LARGEST_ERROR:.0e} is the most"
        return self.failure

    @property
    def word(self) -> str:
        """For the table."""
        if self.skipped is not None:
            return "skipped"
        return "right" if self.cause is None else "FAILED" if self.failure is not None else "WRONG"

    def to_data(self) -> dict[str, Any]:
        """As plain data; an infinite error as text."""
        numbers = asdict(self.measured) if self.measured is not None else {}
        if numbers and numbers["error"] == float("inf"):
            numbers["error"] = "inf"
        told = {"name": self.name, "device": self.device, "verdict": self.word.lower(), **numbers}
        return told | {"cause": self.skipped or self.cause}


def verify(*, as_json: bool) -> int:
    """Run all jobs and print what came out; 0 where all that could be tried is right, else 1."""
    begin, verdicts = perf_counter(), []
    for verdict in _verdicts():
        verdicts.append(verdict)
        _progress(f"{len(verdicts)} tried, {verdict.name} is {verdict.word}")
    _progress("")
    works = all(verdict.cause is None for verdict in verdicts)
    if as_json:
        print(json.dumps({"works": works, "jobs": [verdict.to_data() for verdict in verdicts]}, indent=1))
    else:
        print(_report(verdicts, perf_counter() - begin))
    return 0 if works else 1


def _progress(line: str) -> None:
    """In place of the line before; only for somebody who looks on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _verdicts() -> Iterator[Verdict]:
    for device in map(torch.device, available_devices()):
        yield from map(_tried, jobs(device))
    yield from _over_ranks()


def _tried(job: Job) -> Verdict:
    if job.skipped is not None:
        return Verdict(job.name, str(job.device), skipped=job.skipped)
    try:
        return Verdict(job.name, str(job.device), job.run(job.device))
    except Exception as error:  # whatever it is: to say what does not work is what a doctor is for
        return Verdict(job.name, str(job.device), failure=f"raises {_first_line(error)}")


def _over_ranks() -> Iterator[Verdict]:
    where = f"{_verify_ranks.RANKS} ranks"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        yield from (Verdict(name, where, skipped="this torch has no gloo") for name in _verify_ranks.JOBS)
        return
    results = _verify_ranks.on_ranks(tuple(_verify_ranks.JOBS.values()))
    for name, result in zip(_verify_ranks.JOBS, results, strict=True):
        if isinstance(result, Measured):
            yield Verdict(name, where, result)
        else:
            yield Verdict(name, where, failure=f"fails: {result}".partition("\n")[0])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _report(verdicts: list[Verdict], seconds: float) -> str:
    head = ("what", "where", "error", "memory", "forward", "backward")
    table = _table([_row(each) for each in verdicts], head)
    wrong = [each for each in verdicts if each.cause is not None]
    told = [*wrong, *(each for each in verdicts if each.skipped is not None)]
    width = shutil.get_terminal_size().columns
    lines = [_wrapped(f"{each.name} on {each.device} {_because(each)}", width) for each in told]
    tried = sum(each.skipped is None for each in verdicts)
    end = f"All {tried} that were tried are right" if not wrong else f"{len(wrong)} of {tried} are not right"
    return "\n\n".join([table, *(["\n".join(lines)] if lines else []), f"{end}, in {seconds_text(seconds)}."])


def _table(rows: list[tuple[str, ...]], head: tuple[str, ...]) -> str:
    """With a rule under the head, and as narrow as can be: tabulate would keep space around each heading."""
    rule = tuple("-" * max(map(len, column)) for column in zip(head, *rows, strict=True))
    align = ("left", "left", *["right"] * (len(head) - 2))
    return tabulate([head, rule, *rows], tablefmt="plain", disable_numparse=True, colalign=align)


def _because(verdict: Verdict) -> str:
    return f"is skipped: {verdict.skipped}" if verdict.skipped is not None else verdict.cause or "is right"


def _wrapped(text: str, width: int) -> str:
    return fill(text, width, initial_indent="* ", subsequent_indent="  ", break_long_words=False)


def _row(verdict: Verdict) -> tuple[str, ...]:
    found = verdict.measured
    if found is None:
        return verdict.name, verdict.device, verdict.word, "", "", ""
    memory = "" if found.memory_bytes is None else bytes_text(found.memory_bytes)
    backward = "" if found.backward_s is None else seconds_text(found.backward_s)
    times = (seconds_text(found.forward_s), backward)
    error = f"{found.error:.0e}" if verdict.cause is None else f"{verdict.word} {found.error:.0e}"
    return verdict.name, verdict.device, error, memory, *times
