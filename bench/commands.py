"""The two commands of the README: how long each takes once its environment is there."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from xml.etree import ElementTree

from ._measures import Row, at_most, measure

_ROOT = Path(__file__).parents[1]
_REPORT = "import sys; open(sys.argv[1], 'w').write('<testsuite><testcase name=\"nothing\" time=\"0\"/></testsuite>')"


@measure(
    demo=(sys.executable, "-c", "pass"),
    test=(sys.executable, "-c", _REPORT, "{report}"),
)
def commands(
    demo: tuple[str, ...] = ("make", "demo", "ARGS=--out {folder}"),
    test: tuple[str, ...] = ("make", "test", "ARGS=--junitxml={report}"),
) -> Iterator[Row]:
    """How long do `make demo` and `make test` take, their environments there, and the slowest test?"""
    with TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        yield Row("make demo", at_most(240, "s"), _seconds(demo, folder, report))
        yield Row("make test", at_most(360, "s"), _seconds(test, folder, report))
        cases = list(ElementTree.parse(report).iter("testcase"))
    slowest = max(cases, key=_time)
    name = f"{slowest.get('classname', '')}.{slowest.get('name', '')}"
    yield Row("the slowest test", at_most(30, "s"), _time(slowest), detail={"name": name, "tests": len(cases)})


def _seconds(command: tuple[str, ...], folder: str, report: Path) -> float:
    filled = [part.format(folder=folder, report=report) for part in command]
    start = perf_counter()
    ended = subprocess.run(filled, cwd=_ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(filled)} ended with status {ended.returncode}:\n{ended.stdout[-4000:]}")
    return perf_counter() - start


def _time(case: ElementTree.Element) -> float:
    return float(case.get("time", 0))
