"""One mutant at a time: which tests are run on it, and whether they caught it."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ._child import Running, run_pytest, start
from ._coverage import Recorded
from ._mutants import Mutant
from ._plugins import Chosen, Examples

_NO_TESTS = 5  # a status of pytest


@dataclass(frozen=True)
class Effort:
    """How long the tests of one mutant may take, by their recorded times, and how many examples hypothesis draws."""

    seconds: float
    examples: int


def chosen_tests(mutant: Mutant, recorded: Recorded, effort: Effort) -> list[str]:
    """The tests that run the mutated lines, the quickest first, as many as the effort allows.

    What no test runs, such as what runs only on import, is tried with all that run another line of the file.
    """
    tests = recorded.running(mutant.file, mutant.line) or recorded.running_any(mutant.file)
    # Tests of the file's own subject first: they fail soonest.
    subject = Path(mutant.file).stem.strip("_")
    tests = sorted(tests, key=lambda test: not test.startswith(f"tests/test_{subject}"))
    chosen, spent = [], 0.0
    for test in tests:
        spent += recorded.seconds[test]
        if chosen and spent > effort.seconds:
            break
        chosen.append(test)
    return chosen


@dataclass
class Trial:
    """Some tests at work on a copy of the tree, with a mutant in it or without."""

    running: Running
    tests: list[str]
    log: Path

    def verdict(self) -> tuple[str, float] | None:
        """None while the tests run; then killed, timeout, survived or unclear, and the seconds.

        A mutant that ends the interpreter, or with which the tests cannot even be read, is killed like any other; where
        none of the tests was left to run, nothing is known.
        """
        ended = self.running.ended()
        if ended is None:
            return None
        if ended.status is None:
            return "timeout", ended.seconds
        return {0: "survived", _NO_TESTS: "unclear"}.get(ended.status, "killed"), ended.seconds


def begin(
    mutant: Mutant | None, tests: list[str], copy: Path, pristine: Path, effort: Effort, seconds: float, log: Path
) -> Trial:
    """Write the mutant into the copy, if one is named, and run the tests there; `seconds` are what they should take."""
    if mutant is not None:
        path = copy / mutant.file
        path.write_bytes(mutant.applied((pristine / mutant.file).read_bytes()))
        os.utime(path, (1, 1))  # not the time of what was compiled before, however coarse the clock

    def job() -> int:
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        return run_pytest(["-x", *files], [Examples(effort.examples), Chosen(tests)]) if tests else 0

    return Trial(start(copy, job, log=log, limit_s=40 + 6 * seconds), tests, log)


def restore(mutant: Mutant, copy: Path, pristine: Path) -> None:
    """The file as it was, its time too: what Python compiled of it is valid again."""
    shutil.copy2(pristine / mutant.file, copy / mutant.file)
