"""Which tests run which line, and how long each takes: recorded once for a tree, file of tests by file of tests."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ._child import Running, run_pytest, start
from ._plugins import Examples

# Their subject lies above the engines, or they start processes that no trace reaches.
_LEFT_OUT = {
    *("agreement", "claims", "codec", "compilations", "compile", "compiling_page", "docs", "doctor", "exchange"),
    *("buffers_over_ranks", "demo", "demo_parts", "demo_ranks", "device_rows", "device_suite", "distributed_attend"),
    *("distributed_modules", "distributed_page", "faults", "generate", "guard", "head_parallel", "house", "mutants"),
    *("plan_ranks", "planted_bugs", "pool", "pool_choice", "pool_lifetime", "pool_machine", "ranks", "ring", "ring_op"),
    *("results_page", "ring_transfers", "shard", "simulation"),
}


@dataclass(frozen=True)
class Recorded:
    """`tests[file][line]`: the tests that run the line; `seconds[test]`: how long each took under the trace."""

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    def running(self, file: str, line: int) -> list[str]:
        """The tests that run the line, the quickest first."""
        return self._in_order(self.tests.get(file, {}).get(line, []))

    def running_any(self, file: str) -> list[str]:
        """The tests that run some line of the file, the quickest first."""
        return self._in_order({test for tests in self.tests.get(file, {}).values() for test in tests})

    def _in_order(self, tests: Iterable[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self.seconds[test], test))


@dataclass
class _Contexts:
    """A plugin of pytest: the trace knows which test runs, and each test's time is kept."""

    trace: object
    seconds: dict[str, float] = field(default_factory=dict)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.trace.switch_context(nodeid)  # pyright: ignore[reportAttributeAccessIssue]
        self.started = time.perf_counter()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = time.perf_counter() - self.started
        self.trace.switch_context("")  # pyright: ignore[reportAttributeAccessIssue]


def test_files(tree: Path) -> list[str]:
    """The files whose tests may kill a mutant."""
    names = sorted(path.stem.removeprefix("test_") for path in (tree / "tests").glob("test_*.py"))
    return [f"tests/test_{name}.py" for name in names if name not in _LEFT_OUT and not name.startswith("bench")]


def _trace_file(test_file: str, tree: Path, target: Path) -> int:
    import coverage

    trace = coverage.Coverage(data_file=None, include=[f"{tree}/masks/*", f"{tree}/flexdilated/_*.py"])
    contexts = _Contexts(trace)
    trace.start()
    status = run_pytest([test_file], [contexts, Examples(15)])
    trace.stop()
    data = trace.get_data()
    lines = {
        str(Path(file).relative_to(tree.resolve())): data.contexts_by_lineno(file) for file in data.measured_files()
    }
    target.write_text(json.dumps({"status": status, "lines": lines, "seconds": contexts.seconds}))
    return 0


def record(tree: Path, names: Sequence[str], folder: Path, *, at_once: int, limit_s: float) -> None:
    """One JSON file for each file of tests, in the folder; those that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [name for name in names if not (folder / f"{Path(name).stem}.json").exists()]
    running: dict[str, Running] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            target = folder / f"{Path(name).stem}.json"
            running[name] = start(
                tree,
                lambda name=name, target=target: _trace_file(name, tree, target),
                log=folder / f"{Path(name).stem}.log",
                limit_s=limit_s,
            )
        for name, child in list(running.items()):
            ended = child.ended()
            if ended is not None:
                del running[name]
                print(f"{name}: {ended.status} after {ended.seconds:.0f} s", flush=True)
        time.sleep(0.05)


def read(folder: Path) -> Recorded:
    """What was recorded; files of tests that did not pass there count for nothing."""
    tests: dict[str, dict[int, list[str]]] = {}
    seconds: dict[str, float] = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if data["status"] != 0:
            continue
        seconds |= data["seconds"]
        for file, lines in data["lines"].items():
            known = tests.setdefault(file, {})
            for line, contexts in lines.items():
                known.setdefault(int(line), []).extend(context for context in contexts if context)
    return Recorded(tests, seconds)
