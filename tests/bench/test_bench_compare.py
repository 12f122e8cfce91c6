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
    return {
        "measure": measure, "target": target, "measured": measured, "measured_text": str(measured), "met": met,
        "timings": list(timings), "detail": {},
    }  # fmt: skip


def document(*rows, name="Q", points=()):
    return {
        "name": name, "question": "How fast?", "small": False, "config": {"tokens": 64}, "rows": list(rows),
        "points": list(points), "machine": dict(MACHINE), "versions": {"torch": "2.13"}, "commit": "c" * 40,
        "date": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


@pytest.fixture
def before():
    return document(
        row(SPEED, "≥ 2 ×", 4.0, timing("dense SDPA", 4.0, 0.4), timing("flexdilated", 1.0, 0.1)),
        row(ERROR, "≤ 1.15", 1.0),
    )


@pytest.fixture
def run(tmp_path, capsys):
    """Status, stdout and stderr of the command on two documents."""

    def of(before, after, *options):
        paths = [tmp_path / f"{name}.json" for name in ("before", "after")]
        for path, each in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(each))
        return main(["compare", *map(str, paths), *options]), capsys.readouterr().out

    return of


def test_equal_results_are_the_same(before, run) -> None:
    status, out = run(before, before)
    assert status == 0
    assert "4 of 4 numbers are the same within their noise; the bound is 1.2." in out
    assert "Peers took 1.00 times as long" in out
    assert "worse" not in out.lower()


@pytest.mark.parametrize(("factor", "status", "word"), [(1.05, 0, None), (1.15, 0, "worse"), (1.5, 1, "WORSE")])
@pytest.mark.parametrize("which", [SPEED, ERROR])
def test_a_figure_is_worse_in_its_own_direction(before, run, factor, status, word, which) -> None:
    """More of what is to be at least so much is better, less of what is to be at most."""
    before["rows"] = [row(SPEED, "≥ 2 ×", 4.0), row(ERROR, "≤ 1.15", 1.0)]
    worse, better = copy.deepcopy(before), copy.deepcopy(before)
    index, sign = {SPEED: (0, -1), ERROR: (1, 1)}[which]
    worse["rows"][index]["measured"] *= factor**sign
    better["rows"][index]["measured"] *= factor**-sign
    found, out = run(before, worse)
    assert found == status
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("Q ")] == [word] * (word is not None)
    assert run(before, worse, "--bound", "1.6")[0] == 0
    found, out = run(before, better)
    assert found == 0
    verdicts = [line.split()[-1] for line in out.splitlines() if line.startswith("Q ")]
    assert verdicts == ["better"] * (word is not None)


def test_a_change_within_the_noise_does_not_count(before, run) -> None:
    """A spread of 80 % of the median is a noise of 40 %; two of them hide a factor of 1.5."""
    for wide, status in ((0.8, 0), (0.1, 1)):
        both = [document(row("m", "≤ 9", 1.0 * f, timing("x", 1.0 * f, wide * f))) for f in (1.0, 1.5)]
        assert run(*both)[0] == status


def test_noise_of_a_value() -> None:
    def noise(*timings):
        return values(document(row("m", "≤ 9", 1.0, *timings)))[("Q", "m", "figure")].noise

    assert noise() == noise(timing("x", 1.0)) == 0.05
    assert noise(timing("x", 1.0, repeats=1)) == 0.10
    assert noise(timing("x", 2.0, 0.4), timing("y", 1.0, 0.4)) == pytest.approx(0.3)


def test_times_are_judged_after_the_drift_of_the_peers(before, run) -> None:
    """A machine that is twice as slow slows down all: the figure is the same, and so are the times."""
    after = copy.deepcopy(before)
    for each in after["rows"][0]["timings"]:
        each["median_s"] *= 2
        each["spread_s"] *= 2
    status, out = run(before, after)
    assert status == 0
    assert "Peers took 2.00 times as long" in out
    after["rows"][0]["timings"][1]["median_s"] *= 2
    status, out = run(before, after)
    assert status == 1
    assert "time of flexdilated" in out


def test_a_peer_never_fails(before, run) -> None:
    """All peers but one drift by 1: that one is reported, and is not the library's fault."""
    before["rows"] = [row(f"m{i}", "≤ 9", 1.0, timing("dense SDPA", 1.0)) for i in range(3)]
    after = copy.deepcopy(before)
    after["rows"][2]["timings"][0]["median_s"] = 3.0
    status, out = run(before, after)
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


def test_what_is_a_time_and_what_is_another_machine(before, run) -> None:
    for unit, is_time in (("s", True), ("ms", True), ("µs", True), ("GFLOP/s", True), ("×", False), ("MB", False)):
        found = values(document(row("m", f"≤ 1,024 {unit}", 1.0), row("n", "≥ 2", 1.0)))
        assert (found[("Q", "m", "figure")].is_time, found[("Q", "n", "figure")].is_time) == (is_time, False)
    moment = {"memory_gib": 1, "sm_clock": "other", "memory_clock": "other"}
    assert "different machines" not in run(before, before | {"machine": MACHINE | moment})[1]


def test_what_else_is_said(before, run) -> None:
    after = copy.deepcopy(before)
    after["versions"] = {"torch": "2.14"}
    after["config"] = {"tokens": 128}
    after["rows"][0]["met"] = False
    after["rows"][1]["measure"] = "another"
    after["rows"][1]["not_verified"] = ["the output"]
    status, out = run(before, after)
    assert status == 0
    for text in (
        "- Q: different versions: torch 2.13 → 2.14",
        "- Q: configured differently in tokens; rows of equal names are compared",
        f"- Q: {ERROR}, figure: only in A",
        "- Q: another, figure: only in B",
        "- Q: another: not verified in B: the output",
        f"- Q: {SPEED}: the target ≥ 2 × was met, now missed",
    ):
        assert text in out


def test_a_row_that_is_not_measured_any_more(before, run) -> None:
    after = copy.deepcopy(before)
    after["rows"][1] |= {"measured": None, "met": None, "measured_text": "not measured: no device"}
    status, out = run(before, after)
    assert status == 0
    assert f"- Q: {ERROR}: the target ≤ 1.15 was met, now not measured" in out


def test_tiny_sizes_are_not_set_beside_full_ones(before, run) -> None:
    status, out = run(before, before | {"small": True})
    assert status == 0
    assert "- Q: not compared, one of them was measured at tiny sizes" in out
    assert "0 of 0 numbers" in out


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


def test_rows_of_one_name_stay_apart() -> None:
    found = values(document(row("m", "≤ 9", 1.0), row("m", "≤ 9", 2.0)))
    assert {key[1]: value.number for key, value in found.items()} == {"m": 1.0, "m (2)": 2.0}


def test_points_are_compared(run) -> None:
    def sweep(factor):
        point = {"num_tokens": 4096, "attention": "flexdilated", "peak_bytes": 100.0 * factor}
        return document(points=[point | {"forward": timing("f", 1.0), "backward": timing("b", factor)}])

    status, out = run(sweep(1.0), sweep(1.5))
    assert status == 1
    assert "peak bytes" in out
    assert "time of backward" in out
    assert "time of forward" not in out
    assert "time of forward" in run(sweep(1.0), sweep(1.5), "--all")[1]


def test_worst_come_first(before, run) -> None:
    names = ("a", "b", "c")
    both = [
        document(*(row(name, "≤ 9", f) for name, f in zip(names, fs, strict=True))) for fs in ((1, 1, 1), (2, 4, 3))
    ]
    out = run(*both)[1]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("Q ")] == ["b", "c", "a"]


def test_a_folder_is_compared_question_by_question(tmp_path, capsys) -> None:
    """With itself, with one of its files, and with one in which the library takes twice the time; and beside others."""
    for folder, seconds in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder).mkdir()
        speed = row(SPEED, "≥ 2 ×", 4.0, timing("dense SDPA", 4.0), timing("flexdilated", seconds))
        other = row("the peer alone", "≥ 2 ×", 4.0, timing("dense SDPA", 4.0))
        for each in (document(speed, other, name="Q"), document(speed, row(ERROR, "≤ 1.15", 1.0), name="R")):
            (tmp_path / folder / f"{each['name']}.json").write_text(json.dumps(each))
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "other.json").write_text("{}")
    assert main(["compare", str(one), str(one)]) == 0
    out = capsys.readouterr().out
    assert "9 of 9 numbers are the same" in out
    assert f"- {one}/other.json: no result" in out
    assert main(["compare", str(one), f"{one}/Q.json"]) == 0
    assert "- R: only in A" in capsys.readouterr().out
    changes = compare(read_results(one)[0], read_results(two)[0]).changes
    assert {change.key[:2] for change in changes if change.fails(1.2)} == {("Q", SPEED), ("R", SPEED)}


BAD = {
    "results must be a file or a folder; there is no nowhere": "nowhere",
    "a folder of results must hold at least one; empty has none": "empty",
    "a folder must hold one result a measure; twice has two of Q": "twice",
    "a result must be JSON; text.json is not: Expecting value": "text.json",
    "a result must be JSON; bytes.json is not: 'utf-8' codec": "bytes.json",
    "as `python -m bench` writes it; list.json: TypeError": "list.json",
    "as `python -m bench` writes it; half.json: KeyError: 'points'": "half.json",
    "as `python -m bench` writes it; rows.json: KeyError: 'timings'": "rows.json",
    "target.json: ValueError: a target must begin with ≥ or ≤; got '= 3'": "target.json",
    "machine.json: TypeError: machine must be a dict; got str": "machine.json",
    "the two need a measure in common; got Q and P": "other.json",
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_result_is_refused(message, before, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps(before)
    for folder in ("empty", "twice"):
        Path(folder).mkdir()
    for path in ("good.json", "twice/a.json", "twice/b.json"):
        Path(path).write_text(text)
    Path("text.json").write_text("no")
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    Path("list.json").write_text("[]")
    Path("half.json").write_text(json.dumps({k: v for k, v in before.items() if k != "points"}))
    Path("rows.json").write_text(json.dumps(before | {"rows": [{"measure": "m", "measured": 1.0, "met": True}]}))
    Path("target.json").write_text(json.dumps(document(row("m", "= 3", 1.0))))
    Path("machine.json").write_text(json.dumps(before | {"machine": "mine"}))
    Path("other.json").write_text(json.dumps(document(name="P")))
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "good.json", BAD[message]])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("bound", ["0.9", "nan", "inf", "x", "-2"])
def test_a_bound_must_be_a_number(bound, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "a", "b", f"--bound={bound}"])
    assert f"a bound must be a number of at least 1; got '{bound}'" in capsys.readouterr().err


def test_results_from_before_measures_had_names_are_read(tmp_path) -> None:
    text = (Path("bench/results") / "vs_branch_loop.json").read_text(encoding="utf-8")
    (tmp_path / "C4.json").write_text(text.replace('"name": "vs_branch_loop"', '"name": "C4"', 1), encoding="utf-8")
    assert list(read_results(tmp_path)[0]) == ["vs_branch_loop"]
