"""`python -m bench compare`: what counts as a change, what fails, and what cannot be compared."""

import copy
import json
import math
from pathlib import Path

import pytest

from bench.__main__ import main
from bench._compare import Change, Value, compare, read_results, values

MACHINE = {"cpu": "a processor", "cores": 4, "threads": 2, "memory_gib": 16.0, "system": "Linux"}
SPEED, ERROR = "times as fast as dense", "error"


def timing(name, median, spread=0.0, repeats=5):
    return {"name": name, "repeats": repeats, "median_s": median, "spread_s": spread}


def row(measure, target, measured, *timings, met=True):
    found = {"measure": measure, "target": target, "measured": measured, "met": met}
    return found | {"measured_text": str(measured), "timings": list(timings), "detail": {}}


def document(*rows, name="Q", points=(), **changes):
    about = {"name": name, "small": False, "config": {"tokens": 64}, "rows": list(rows), "points": list(points)}
    return about | {"machine": dict(MACHINE), "versions": {"torch": "2.13"}} | changes


@pytest.fixture
def before():
    speed = row(SPEED, "≥ 2 ×", 4.0, timing("dense SDPA", 4.0, 0.4), timing("flexdilated", 1.0, 0.1))
    return document(speed, row(ERROR, "≤ 1.15", 1.0))


@pytest.fixture
def run(tmp_path, capsys):
    """Status, stdout and stderr of the command on two documents."""

    def of(before, after, *options):
        paths = [tmp_path / f"{name}.json" for name in ("before", "after")]
        for path, each in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(each))
        return main(["compare", *map(str, paths), *options]), capsys.readouterr().out

    return of


def verdicts(out: str) -> list[str]:
    return [line.split()[-1] for line in out.splitlines() if line.startswith("Q ")]


@pytest.mark.parametrize(
    ("factor", "status", "words"), [(1, 0, ([], [])), (1.05, 0, ([], [])), (1.15, 0, (["worse"], ["better"])),
                                    (1.5, 1, (["WORSE"], ["better"]))]
)  # fmt: skip
@pytest.mark.parametrize("which", [SPEED, ERROR])
def test_a_figure_is_worse_in_its_own_direction(run, factor, status, words, which) -> None:
    """More of what is to be at least so much is better, less of what is to be at most."""
    both = document(row(SPEED, "≥ 2 ×", 4.0), row(ERROR, "≤ 1.15", 1.0))
    worse, better = copy.deepcopy(both), copy.deepcopy(both)
    index, sign = {SPEED: (0, -1), ERROR: (1, 1)}[which]
    worse["rows"][index]["measured"] *= factor**sign
    better["rows"][index]["measured"] *= factor**-sign
    found, out = run(both, worse)
    assert (found, verdicts(out)) == (status, words[0])
    assert run(both, worse, "--bound", "1.6")[0] == 0
    found, out = run(both, better)
    assert (found, verdicts(out)) == (0, words[1])
    assert f"{2 - len(words[0])} of 2 numbers are the same" in out


def test_noise_of_a_value(run) -> None:
    """Two spreads of 80 % of the median hide a factor of 1.5."""

    def noise(*timings):
        return values(document(row("m", "≤ 9", 1.0, *timings)))[("Q", "m", "figure")].noise

    assert noise() == noise(timing("x", 1.0)) == 0.05
    assert noise(timing("x", 1.0, repeats=1)) == 0.10
    assert noise(timing("x", 2.0, 0.4), timing("y", 1.0, 0.4)) == pytest.approx(0.3)
    for wide, status in ((0.8, 0), (0.1, 1)):
        both = [document(row("m", "≤ 9", 1.0 * f, timing("x", 1.0 * f, wide * f))) for f in (1.0, 1.5)]
        assert run(*both)[0] == status


def test_times_are_judged_after_the_drift_of_the_peers(before, run) -> None:
    """A machine that is twice as slow slows down all; a peer that is slower than the others never fails."""
    after = copy.deepcopy(before)
    for each in after["rows"][0]["timings"]:
        each["median_s"] *= 2
        each["spread_s"] *= 2
    status, out = run(before, after)
    assert (status, verdicts(out)) == (0, [])
    assert "the drift of the peers, 2.00" in out
    after["rows"][0]["timings"][1]["median_s"] *= 2
    status, out = run(before, after)
    assert status == 1
    assert "time of flexdilated" in out
    many = document(*(row(f"m{i}", "≤ 9", 1.0, timing("dense SDPA", 1.0)) for i in range(3)))
    after = copy.deepcopy(many)
    after["rows"][2]["timings"][0]["median_s"] = 3.0
    status, out = run(many, after)
    assert status == 0
    assert "peer worse" in out


def test_on_another_machine_times_are_not_compared(before, run) -> None:
    before["rows"].append(row("look-up", "≤ 20 µs", 10.0, timing("one look-up", 1e-5)))
    after = copy.deepcopy(before)
    after["machine"]["cpu"] = "another"
    after["rows"][0]["timings"][1]["median_s"] *= 9
    after["rows"][2]["measured"] *= 9
    status, out = run(before, after)
    assert status == 0
    assert "Q: different machines, so times are not compared: cpu a processor → another" in out
    assert "2 of 2 numbers are the same" in out
    after["rows"][0]["measured"] /= 2
    assert run(before, after)[0] == 1
    for unit, is_time in (("s", True), ("ms", True), ("µs", True), ("GFLOP/s", True), ("×", False), ("MB", False)):
        found = values(document(row("m", f"≤ 1,024 {unit}", 1.0), row("n", "≥ 2", 1.0)))
        assert (found[("Q", "m", "figure")].is_time, found[("Q", "n", "figure")].is_time) == (is_time, False)
    moment = {"memory_gib": 1, "sm_clock": "other", "memory_clock": "other"}
    assert "different machines" not in run(before, before | {"machine": MACHINE | moment})[1]


def test_what_else_is_said(before, run) -> None:
    after = copy.deepcopy(before) | {"versions": {"torch": "2.14"}, "config": {"tokens": 128}}
    after["rows"][0] |= {"measured": None, "met": None}
    after["rows"][1] |= {"measure": "another", "not_verified": ["the output"]}
    status, out = run(before, after)
    assert status == 0
    for text in (
        "- Q: different versions: torch 2.13 → 2.14",
        "- Q: different config: tokens 64 → 128",
        f"- Q, {ERROR}, figure: only in A",
        "- Q, another, figure: only in B",
        "- Q: another: not verified in B: the output",
        f"- Q: {SPEED}: the target ≥ 2 × was met, now not measured",
    ):
        assert text in out
    assert "- Q: not compared, one of them was measured at tiny sizes" in run(before, before | {"small": True})[1]


@pytest.mark.parametrize(
    ("numbers", "factor"),
    [((0.0, 0.0), 1.0), ((0.0, 1.0), math.inf), ((1.0, 0.0), 0.0), ((1.0, math.nan), math.inf), ((math.nan, 1.0), 1.0)],
)
def test_numbers_that_have_no_ratio(numbers, factor) -> None:
    found = Change(("Q", "m", "figure"), *(Value(number, 0.05) for number in numbers))
    assert found.worse_by == factor
    assert found.verdict(1.2) == {1.0: "same", math.inf: "WORSE", 0.0: "better"}[factor]
    more = (Value(number, 0.05, less_is_better=False) for number in (0.0, 1.0))
    assert Change(("Q", "m", "figure"), *more).verdict(1.2) == "better"


def test_rows_of_one_name_points_and_order(run) -> None:
    found = values(document(row("m", "≤ 9", 1.0), row("m", "≤ 9", 2.0)))
    assert {key[1]: value.number for key, value in found.items()} == {"m": 1.0, "m (2)": 2.0}

    def sweep(factor):
        point = {"num_tokens": 4096, "attention": "flexdilated", "peak_bytes": 100.0 * factor}
        return document(points=[point | {"forward": timing("f", 1.0), "backward": timing("b", factor * factor)}])

    status, out = run(sweep(1.0), sweep(1.5))
    assert status == 1
    assert out.index("time of backward") < out.index("peak bytes")  # the worst first
    assert "time of forward" not in out
    assert "time of forward" in run(sweep(1.0), sweep(1.5), "--all")[1]


def test_a_folder_is_compared_measure_by_measure(before, tmp_path, capsys) -> None:
    """Files that are no results are skipped."""
    for folder, factor in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder).mkdir()
        rows = [row(ERROR, "≤ 9", factor), row("the same", "≤ 9", 1.0)]
        for each in (document(*rows, name="Q"), document(*rows, name="R")):
            (tmp_path / folder / f"{each['name']}.json").write_text(json.dumps(each))
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "other.json").write_text("{}")
    assert main(["compare", str(one), f"{one}/Q.json"]) == 0
    assert "- R: only in A" in capsys.readouterr().out
    changes, _ = compare(read_results(one), read_results(two))
    assert {change.key[:2] for change in changes if change.verdict(1.2) == "WORSE"} == {("Q", ERROR), ("R", ERROR)}


BAD = {
    "a result must be as `python -m bench` writes it; nowhere: FileNotFoundError": ("nowhere", None),
    "a folder of results must hold at least one; empty has none": ("empty", None),
    "writes it; text.json: JSONDecodeError": ("text.json", b"no"),
    "writes it; bytes.json: UnicodeDecodeError": ("bytes.json", b"\xff\xfe\x00"),
    "writes it; list.json": ("list.json", b"[]"),
    "writes it; half.json: ValueError('it has no config, machine, points": ("half.json", b'{"name": "Q", "rows": []}'),
    "target.json: ValueError(\"a target must begin with": ("target.json", json.dumps(document(row("m", "= 3", 1.0)))),
    "the two need a measure in common; got Q and P": ("other.json", json.dumps(document(name="P"))),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_result_is_refused(message, before, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name, content = BAD[message]
    Path("empty").mkdir()
    Path("good.json").write_text(json.dumps(before))
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "good.json", name])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("bound", ["0.9", "nan", "inf", "x", "-2"])
def test_a_bound_must_be_a_number(bound, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "a", "b", f"--bound={bound}"])
    assert f"a bound must be a number of at least 1; got '{bound}'" in capsys.readouterr().err
