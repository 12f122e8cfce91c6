"""The runner of mutants: which changes it makes, that its sample is fair, what it counts, and that it stops."""

import json
import os
import time
from pathlib import Path

import pytest

from bench.mutants._child import start
from bench.mutants._coverage import Recorded
from bench.mutants._journal import Journal
from bench.mutants._mutants import Mutant, all_mutants, compiles, mutants_of
from bench.mutants._sample import sampling_order
from bench.mutants._score import interval, result, verdicts_in
from bench.mutants._trial import Effort, chosen_tests

ROOT = Path(__file__).resolve().parents[1]
SOURCE = b'''"""Of a window: 3 keys."""

_log = logging.getLogger("x")


def f(a: int, b: int = 2) -> list[int]:
    """At least 1."""
    if a < 0:
        raise ValueError(f"a must be at least {0}; got {a}")
    _log.debug("%d", 3)
    assert a != 7
    return [max(a, b) + 1, not a]
'''


def changed(source: bytes) -> dict[str, list[str]]:
    """By operator, the lines that its mutants have otherwise."""
    found: dict[str, list[str]] = {}
    for mutant in mutants_of("masks/_x.py", source):
        after = mutant.applied(source)
        assert compiles(after)
        pairs = zip(source.splitlines(), after.splitlines(), strict=True)
        (line,) = (new for old, new in pairs if new != old)
        found.setdefault(mutant.operator, []).append(line.decode().strip())
    return found


def test_what_is_changed_and_what_is_not() -> None:
    """Nothing in texts, annotations, the log or an assertion."""
    found = changed(SOURCE)
    assert found.pop("constant") == [
        "def f(a: int, b: int = 3) -> list[int]:",
        "def f(a: int, b: int = 1) -> list[int]:",
        "if a < 1:",
        "if a < -1:",
        "return [max(a, b) + 2, not a]",
        "return [max(a, b) + 0, not a]",
    ]
    assert found == {
        "condition": ["if True:", "if False:"],
        "comparison": ["if (a <= 0):"],
        "deleted": ["pass"],
        "returned": ["return None"],
        "arithmetic": ["return [(max(a, b) - 1), not a]"],
        "twin": ["return [min(a, b) + 1, not a]"],
        "boolean": ["return [max(a, b) + 1, a]"],
    }


@pytest.mark.parametrize(
    ("line", "operator", "after"),
    [
        ("x = a[-b]", "sign", ["x = a[b]"]),
        ("x = f(a, b, c=d, device=e)", "swapped", ["x = (f(b, a, c=d, device=e))"]),
        ("x = f(a, b, c=d, device=e)", "dropped", ["x = (f(a, b, device=e))"]),
        ("x = [y for y in z if y]", "condition", ["x = ([y for y in z])"]),
        ("x = a <= b < c", "comparison", ["x = (a < b < c)", "x = (a <= b <= c)"]),
        ("x = a and b", "boolean", ["x = (a or b)"]),
        ("x[0] = y", "deleted", ["pass"]),
        ("x += y", "arithmetic", ["x -= y"]),
        ("x = 0.5", "constant", ["x = 1.0"]),
        ("x = cast(int, 3)", "constant", []),
        ("x = max(a, b)", "swapped", []),
    ],
)
def test_operators(line, operator, after) -> None:
    assert changed(line.encode()).get(operator, []) == after


def test_rates_of_a_machine_are_left_alone() -> None:
    operators = {mutant.operator for mutant in mutants_of("masks/planning/machine/_machine.py", b"RATE = 3 + x(4.5)\n")}
    assert operators == {"arithmetic"}


def test_every_beginning_of_the_order_is_fair() -> None:
    mutants = all_mutants(ROOT)
    order = sampling_order(mutants, 0)
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert sorted(order) == sorted(mutants)
    assert order == sampling_order(mutants[::-1], 0) != sampling_order(mutants, 1)
    for number in (50, 500):
        for file in {mutant.file for mutant in mutants}:
            share = number * sum(mutant.file == file for mutant in mutants) / len(mutants)
            assert abs(sum(mutant.file == file for mutant in order[:number]) - share) <= 2


def mutant(name: str) -> Mutant:
    return Mutant(f"masks/core/{name}.py", 3, 0, "constant", 0, 0, 1, "1", "2")


def test_quick_tests_first_and_no_more_than_the_effort() -> None:
    names = ("tests/test_other.py::a", "tests/test_box.py::b", "tests/test_z.py::c", "tests/test_z.py::d")
    seconds = dict(zip(names, (1.0, 2.0, 3.0, 9.0), strict=True))
    recorded = Recorded({"masks/core/_box.py": {3: list(seconds), 9: ["tests/test_z.py::d"]}}, seconds)
    found = chosen_tests(mutant("_box"), recorded, Effort(6, 15))
    assert found == ["tests/test_box.py::b", "tests/test_other.py::a", "tests/test_z.py::c"]
    assert chosen_tests(mutant("_unknown"), recorded, Effort(6, 15)) == []
    elsewhere = Recorded({"masks/core/_box.py": {9: ["tests/test_z.py::d"]}}, seconds)
    assert chosen_tests(mutant("_box"), elsewhere, Effort(6, 15)) == ["tests/test_z.py::d"]


def test_the_result(tmp_path: Path) -> None:
    """A survivor that a later test caught counts in the second share, an explained one not in the third."""
    journal = Journal(tmp_path / "journal")
    order = [mutant(name) for name in ("a", "b", "c", "d", "e")]
    tries = [("a", "killed", 0), ("b", "timeout", 0), ("c", "survived", 0), ("d", "survived", 0), ("c", "killed", 1)]
    for name, verdict, number in tries:
        journal.add({"name": mutant(name).name, "verdict": verdict, "round": number, "by": f"test of {name}"})
    journal.add({"name": "control x", "verdict": "survived", "round": 0})
    verdicts = {mutant("d").name: {"is": "equivalent", "because": "1 is 2 here"}}
    found = result(order, Journal(tmp_path / "journal"), verdicts, seed=7)
    shares = [found[name] for name in ("at_first", "with_the_tests_since", "without_equivalent_ones")]
    assert [(each["caught"], each["tried"]) for each in shares] == [(2, 4), (3, 4), (3, 3)]
    assert found["controls"] == {"passed": 1, "run": 1}
    assert (found["seed"], found["out_of_time"], found["mutants"]) == (7, 1, 5)
    (survivor,) = found["survivors"]
    assert (survivor["file"], survivor["is"]) == ("masks/core/d.py", "equivalent")
    assert [(each["file"], each["by"]) for each in found["caught_since"]] == [("masks/core/c.py", "test of c")]
    assert found["by_operator"] == {"constant": {"caught": 3, "tried": 4}}


def test_an_interval_holds_its_share() -> None:
    low, high = interval(90, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert interval(0, 5)[0] == pytest.approx(0)
    assert interval(5, 5)[1] == pytest.approx(1)


def test_a_verdict_must_be_known(tmp_path: Path) -> None:
    (tmp_path / "verdicts.json").write_text(json.dumps({"x": {"is": "fine", "because": ""}}))
    with pytest.raises(ValueError, match=r"a verdict must be one of equivalent, .* got \{'x': 'fine'\}"):
        verdicts_in(tmp_path / "verdicts.json")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_runs_without_end_is_ended(tmp_path: Path) -> None:
    def endless() -> int:
        while True:
            time.sleep(0.01)

    running = start(tmp_path, endless, log=tmp_path / "log", limit_s=0.2)
    while (ended := running.ended()) is None:
        time.sleep(0.01)
    assert ended.status is None
    assert ended.seconds >= 0.2

    def speaking() -> int:
        os.write(1, Path.cwd().name.encode())
        return 3

    running = start(tmp_path, speaking, log=tmp_path / "log", limit_s=250)
    while (ended := running.ended()) is None:
        time.sleep(0.01)
    assert ended.status == 3
    assert (tmp_path / "log").read_text() == tmp_path.name
