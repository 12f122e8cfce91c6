"""A sample of the mutants, tried some at a time until it is done or time is up."""

import re
import shutil
import sys
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._child import run_pytest, start
from ._coverage import Recorded, test_files
from ._journal import Entry, Journal
from ._mutants import Mutant, compiles
from ._trial import Effort, Trial, begin, chosen_tests, restore

# Quick tests and few examples catch most; what is left alive is tried with more, drawn as often as CI draws them.
EFFORTS = (Effort(seconds=20, examples=15), Effort(seconds=60, examples=60), Effort(seconds=300, examples=60))
# So often the tests run on the tree as it is. They must pass: a mutant that dies must die of itself.
CONTROL_EVERY = 40


@dataclass(frozen=True)
class Job:
    """A mutant and how hard to try; as a control, its tests run on the tree as it is."""

    mutant: Mutant
    effort: int = 0
    is_control: bool = False
    round: int = 0

    @property
    def name(self) -> str:
        return f"control {self.mutant.name}" if self.is_control else self.mutant.name


def compile_once(tree: Path) -> None:
    """Have Python keep what it compiles of the tree, the tests with their rewritten assertions too."""

    def collect() -> int:
        sys.dont_write_bytecode = False
        return run_pytest(["--collect-only", *test_files(tree)], [])

    child = start(tree, collect, log=tree.parent / "collect.log", limit_s=300)
    while (ended := child.ended()) is None:
        time.sleep(0.05)
    assert ended.status == 0, f"the tests cannot be read; see {tree.parent / 'collect.log'}"


def copies_of(tree: Path, folder: Path, count: int) -> list[Path]:
    """Copies with the times of the files: what was compiled stays valid."""
    copies = [folder / f"copy{number}" for number in range(count)]
    for copy in copies:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tree, copy, symlinks=True)
    return copies


def jobs_of(order: Sequence[Mutant], tree: Path, journal: Journal, explained: Container[str] = ()) -> Iterator[Job]:
    """What is still to be tried, in order, and then what survived unexplained, harder; only what is Python."""
    for place, mutant in enumerate(order):
        if not compiles(mutant.applied((tree / mutant.file).read_bytes())):
            continue
        control, job = Job(mutant, is_control=True), Job(mutant)
        if place % CONTROL_EVERY == 0 and journal.newest(control.name) is None:
            yield control
        if journal.newest(job.name) is None:
            yield job
    for mutant in order:
        tried = journal.newest(mutant.name)
        alive = tried is not None and tried["verdict"] == "survived" and mutant.name not in explained
        if tried is not None and alive and tried["effort"] + 1 < len(EFFORTS):
            yield Job(mutant, tried["effort"] + 1)


def survivors_of(order: Sequence[Mutant], journal: Journal) -> Iterator[Job]:
    """Those that nothing caught so far."""
    for mutant in order:
        tried = journal.newest(mutant.name)
        if tried is not None and tried["verdict"] in ("survived", "untested"):
            yield Job(mutant, tried["effort"], round=tried["round"] + 1)


def try_all(
    jobs: Iterator[Job], recorded: Recorded, tree: Path, copies: Sequence[Path], journal: Journal, until: float
) -> None:
    """Try each in whichever copy is free; none is begun once it is `until`."""
    running: dict[Path, tuple[Job, Trial]] = {}
    while True:
        for copy in copies:
            if copy not in running and time.time() < until:
                job = next(jobs, None)
                if job is not None:
                    running[copy] = job, _begin(job, recorded, tree, copy)
        if not running:
            return
        for copy, (job, trial) in list(running.items()):
            ended = trial.verdict()
            if ended is None:
                continue
            del running[copy]
            restore(job.mutant, copy, tree)
            entry = _entry(job, trial, *ended)
            if trial.tests or not job.round:  # later tests that do not meet it say nothing of it
                journal.add(entry)
            print(f"{entry['verdict']:9} {entry['seconds']:6.1f} s  {job.name}", flush=True)
        time.sleep(0.02)


def _begin(job: Job, recorded: Recorded, tree: Path, copy: Path) -> Trial:
    effort = EFFORTS[job.effort]
    tests = chosen_tests(job.mutant, recorded, effort)
    # Recorded with few examples, under a trace that costs about what more examples do.
    expected = sum(recorded.seconds[test] for test in tests) * max(1.0, effort.examples / 30)
    mutant = None if job.is_control else job.mutant
    return begin(mutant, tests, copy, tree, effort, expected, copy.with_suffix(".log"))


def _entry(job: Job, trial: Trial, verdict: str, seconds: float) -> Entry:
    said = trial.log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return {
        "name": job.name,
        "verdict": verdict if trial.tests else "untested",
        "effort": job.effort,
        "round": job.round,
        "seconds": round(seconds, 2),
        "tests": len(trial.tests),
        "by": failed.group(1) if failed and verdict == "killed" else None,
    }
