"""FLEXDILATED_PROFILE: what is recorded, by whom, into which files; and `python -m flexdilated profile`."""

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from bench._jobs import Job, interleave
from flexdilated.cli import main
from flexdilated.observe import _profile
from flexdilated.observe._profile import VARIABLE, folder_from_environment, named_under, recorded, recorded_steps
from flexdilated.observe._profile_file import TABLE, TRACE, Operator, Recording, file_stem, read_recording
from tests.test_house import ROOT

pytestmark = pytest.mark.skipif(
    VARIABLE in os.environ, reason="a test that is recorded itself can record nothing: torch has one profiler"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Not there yet, as a user may name it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "profiles"))
    monkeypatch.setattr(_profile, "_names", type(_profile._names)())
    return tmp_path / "new" / "profiles"


def recordings(folder: Path) -> dict[str, Recording]:
    found = [read_recording(path) for path in folder.glob(f"*{TABLE}")] if folder.exists() else []
    return {each.name: each for each in found}


def calls(recording: Recording) -> dict[str, int]:
    return {each.name: each.calls for each in recording.operators}


def test_a_recording_has_every_operator_with_its_calls_time_and_memory(folder) -> None:
    x = torch.randn(1000, 1000)
    with recorded("three products"):
        kept = [x @ x for _ in range(3)]
    (found,) = recordings(folder).values()
    assert found.name == "three products"
    by_name = {each.name: each for each in found.operators}
    assert by_name["aten::mm"].calls == by_name["aten::matmul"].calls == len(kept)
    assert by_name["aten::matmul"].self_us < by_name["aten::matmul"].total_us
    assert by_name["aten::matmul"].total_us >= by_name["aten::mm"].total_us > 1
    assert sum(each.memory_bytes for each in found.operators) >= 3 * 4_000_000
    assert 1e6 * found.seconds >= by_name["aten::matmul"].total_us


def test_the_trace_beside_it_is_a_chrome_trace(folder) -> None:
    with recorded("one sum"):
        torch.ones(10).sum()
    (found,) = recordings(folder).values()
    assert found.trace == f"{file_stem('one sum')}{TRACE}"
    events = json.loads(gzip.decompress((folder / found.trace).read_bytes()))["traceEvents"]
    assert "aten::sum" in {event.get("name") for event in events}
    assert "[memory]" in {event.get("name") for event in events}
    assert len(list(folder.iterdir())) == 2  # and nothing is left of the writing


def test_a_trace_that_is_too_long_is_left_out(folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr("flexdilated.observe._profile_file._MOST_EVENTS", 1)
    with recorded("long"):
        torch.ones(10).sum()
    assert recordings(folder)["long"].trace is None
    assert [path.name for path in folder.iterdir()] == [f"long{TABLE}"]
    main(["profile", str(folder)])
    assert "too many for a trace" in capsys.readouterr().out


def test_without_the_variable_nothing_is_made(monkeypatch, tmp_path) -> None:
    for value in (None, ""):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv(VARIABLE, raising=False) if value is None else monkeypatch.setenv(VARIABLE, value)
        monkeypatch.setattr(_profile, "_profiler", lambda **options: pytest.fail("a profiler was made"))
        with recorded("x"), recorded_steps("y") as step:
            step()
        assert folder_from_environment() is None
    assert list(tmp_path.iterdir()) == []


def test_names_are_numbered_and_prefixed(folder) -> None:
    for _ in range(2):
        with named_under("outer"), named_under("inner"), recorded("thing"):
            torch.ones(1)
    with recorded("thing"):
        torch.ones(1)
    assert sorted(recordings(folder)) == ["outer inner thing", "outer inner thing 2", "thing"]


def test_a_later_process_replaces_what_an_earlier_one_recorded(folder, monkeypatch) -> None:
    for size in (1, 2):
        monkeypatch.setattr(_profile, "_names", type(_profile._names)())
        with recorded("thing"):
            for _ in range(size):
                torch.ones(1)
    assert calls(recordings(folder)["thing"])["aten::ones"] == 2


def test_file_names_say_what_and_tell_apart() -> None:
    assert file_stem("bench-C6") == "bench-C6"
    names = ["test tests/a.py::test_x[1-2]", "test tests/a.py::test_x[1 2]", "x" * 300, "x" * 301, "…", "a/../../b"]
    stems = [file_stem(name) for name in names]
    assert stems[0].startswith("test-tests-a.py-test_x-1-2-")
    assert len(set(stems)) == len(names)
    assert all(len(stem) < 140 and "/" not in stem and not stem.startswith(".") for stem in stems)


def test_steps_after_the_first_are_recorded(folder) -> None:
    for total in (2, 4, 9):
        with recorded_steps(f"{total} steps") as step:
            for number in range(total):
                torch.ones(1) if number else torch.zeros(1)
                step()
    found = recordings(folder)
    assert [calls(found[f"{total} steps"])["aten::ones"] for total in (2, 4, 9)] == [1, 3, 3]
    assert all("aten::zeros" not in calls(each) for each in found.values())


def test_one_step_is_too_few_and_that_is_said(folder, caplog) -> None:
    with recorded_steps("a run") as step:
        step()
    assert recordings(folder) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "nothing of 'a run' was recorded: the first step never is, and there was no other"
    ]


def test_within_each_other_and_in_other_threads_the_first_alone_is_made(folder) -> None:
    def beside() -> None:
        with recorded("in a thread"):
            torch.ones(2)

    with recorded("outer"):
        with recorded("inner"), recorded_steps("steps") as step:
            step()
        worker = threading.Thread(target=beside)
        worker.start()
        worker.join()
    assert list(recordings(folder)) == ["outer"]
    with recorded("after"):
        pass
    assert sorted(recordings(folder)) == ["after", "outer"]


def test_an_error_passes_and_the_next_recording_is_made(folder) -> None:
    for record in (recorded, recorded_steps):
        with pytest.raises(ZeroDivisionError), record("broken"):
            raise ZeroDivisionError
    with recorded("whole"):
        torch.ones(1)
    assert list(recordings(folder)) == ["whole"]


def test_a_folder_that_cannot_be(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv(VARIABLE, str(bad))
        message = f"FLEXDILATED_PROFILE must name a folder that can be written; got '{bad}'"
        for use in (folder_from_environment, lambda: recorded("x").__enter__()):
            with pytest.raises(ValueError, match="must name a folder") as caught:
                use()
            assert str(caught.value) == message


def test_a_folder_that_goes_away(folder) -> None:
    rule = r"FLEXDILATED_PROFILE must name a folder that can be written; .*: ."
    with pytest.raises(ValueError, match=rule), recorded("x"):
        folder.parent.write_text("a file where the folder was to be")


def test_the_demo_says_so_before_it_begins(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "out")]) == 2
    assert "FLEXDILATED_PROFILE must name a folder that can be written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_demo_records_its_training(folder, tmp_path, capsys) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(10):
        (text / f"{index}.py").write_text("x = 1\n" * 400)
    sizes = ["--context", "256", "--steps", "3", "--data", str(text), "--out", str(tmp_path / "out")]
    assert main(["demo", *sizes]) == 0
    found = recordings(folder)
    assert list(found) == ["demo training"]
    assert calls(found["demo training"])["flexdilated::tiles_backward"] % 2 == 0
    assert calls(found["demo training"])["flexdilated::tiles"] > 0


def test_bench_runs_each_job_once_more(folder) -> None:
    runs: list[str] = []
    jobs = [Job(name, lambda given, name=name: runs.append(name) or torch.ones(1)) for name in ("a", "b")]
    with named_under("bench C0"):
        interleave(jobs, repeats=2)
    assert runs == ["a", "b", "a", "b", "a", "b"]
    found = recordings(folder)
    assert sorted(found) == ["bench C0 a", "bench C0 b"]
    assert all(calls(each)["aten::ones"] == 1 for each in found.values())


def test_bench_runs_nothing_more_without_the_variable(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    runs: list[int] = []
    interleave([Job("a", lambda given: runs.append(1))], repeats=2)
    assert len(runs) == 2


@pytest.mark.slow
def test_tests_are_recorded_one_file_each(folder) -> None:
    """In a run of their own, as a user starts one."""
    which, chosen = "tests/test_merge.py", "order_of_parts"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", which, "-k", chosen]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = recordings(folder)
    assert len(found) == 2
    assert all(name.startswith(f"test {which}::test_") for name in found)


@pytest.fixture
def two(folder) -> Path:
    """Two recordings whose numbers are known."""
    folder.mkdir(parents=True)
    operators = (
        [Operator("aten::mm", 2, 3000.0, 3500.0, 0.0, 1024), Operator("aten::add", 9, 100.0, 100.0, 0.0, -4096)],
        [Operator("aten::mm", 1, 1000.0, 1000.0, 0.0, 1024), Operator("aten::" + "x" * 90, 1, 50.0, 60.0, 0.0, 0)],
    )
    for name, seconds, rows in zip(("first thing", "second"), (0.5, 1.5), operators, strict=True):
        data = {
            **{"format": "flexdilated profile", "version": 1, "name": name, "seconds": seconds, "torch": "2"},
            **{"events": 1234, "trace": None, "operators": [vars(row) for row in rows]},
        }
        (folder / f"{file_stem(name)}{TABLE}").write_text(json.dumps(data))
    return folder


def rows(printed: str, begin: str = "aten::") -> list[list[str]]:
    return [line.split() for line in printed.splitlines() if line.startswith(begin)]


def test_operators_are_summed_over_recordings_and_sorted(two, capsys) -> None:
    assert main(["profile", str(two)]) == 0
    printed = capsys.readouterr().out
    assert rows(printed)[0] == ["aten::mm", "3", "4", "ms", "4.5", "ms", "2", "KiB"]
    assert rows(printed)[1] == ["aten::add", "9", "100", "us", "100", "us", "-4", "KiB"]
    assert printed.startswith(f"2 recordings in {two}, 2 s in all\n")
    assert printed.index("second") < printed.index("first thing")  # the longest first
    for sort, first in (("memory", "aten::add"), ("calls", "aten::add"), ("time", "aten::mm")):
        main(["profile", str(two), "--sort", sort, "--top", "1"])
        ((name, *_),) = rows(capsys.readouterr().out)
        assert name == first


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(two, capsys, monkeypatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["profile", str(two)])
    lines = capsys.readouterr().out.splitlines()[1:]  # the first names the folder
    assert max(map(len, lines)) <= columns
    assert any("…" in line for line in lines)


def test_names_that_begin_alike_stay_apart(two, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = two / f"second{TABLE}"
    data = json.loads(path.read_text())
    names = [f"aten::{'long_' * 15}{end}" for end in ("forward", "backward")]
    data["operators"] = [vars(Operator(name, 1, 1.0, 1.0, 0.0, 0)) for name in names]
    path.write_text(json.dumps(data))
    main(["profile", str(two)])
    shown = [name for name, *_ in rows(capsys.readouterr().out) if "…" in name]
    assert sorted(shown) == sorted(set(shown))
    assert [name.partition("…")[2][-8:] for name in sorted(shown)] == ["backward", "_forward"]


def test_only_some_recordings(two, capsys) -> None:
    assert main(["profile", str(two), "--only", "first"]) == 0
    assert rows(capsys.readouterr().out)[0] == ["aten::mm", "2", "3", "ms", "3.5", "ms", "1", "KiB"]


def test_an_accelerator_has_a_column_and_decides(two, capsys) -> None:
    path = two / f"second{TABLE}"
    data = json.loads(path.read_text())
    data["operators"][1]["device_us"] = 2_000_000.0
    path.write_text(json.dumps(data))
    main(["profile", str(two)])
    printed = capsys.readouterr().out
    assert "device" in printed
    assert rows(printed)[0][-4:] == ["2", "s", "0", "B"]


def test_json(two, capsys) -> None:
    assert main(["profile", str(two), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["recordings"]] == ["second", "first thing"]
    assert found["recordings"][0]["operators"] == 2
    assert found["operators"][0] == {
        **{"name": "aten::mm", "calls": 3, "self_us": 4000.0, "total_us": 4500.0, "device_us": 0.0},
        **{"memory_bytes": 2048},
    }
    assert len(found["operators"]) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "holds no profile of this version: "),
        ("[]", "holds no profile of this version: "),
        ('{"format": "flexdilated profile", "version": 2}', "needed 'flexdilated profile', version 1"),
        ('{"format": "flexdilated profile", "version": 1}', "holds no profile of this version: 'operators'"),
    ],
)
def test_a_file_that_is_no_profile(two, capsys, content: str, message: str) -> None:
    (two / f"bad{TABLE}").write_text(content)
    assert main(["profile", str(two)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"bad{TABLE}" in error


@pytest.mark.parametrize(("field", "value"), [("calls", "3"), ("self_us", None), ("name", 7), ("memory_bytes", True)])
def test_a_row_with_a_wrong_value(two, capsys, field: str, value: object) -> None:
    path = two / f"second{TABLE}"
    data = json.loads(path.read_text())
    data["operators"][0][field] = value
    path.write_text(json.dumps(data))
    assert main(["profile", str(two)]) == 2
    assert f"{field} must be a " in capsys.readouterr().err


def test_bad_usage(two, tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ([str(tmp_path / "missing")], "DIR must be a folder that can be read; "),
        ([str(tmp_path / "file")], "DIR must be a folder that can be read; "),
        ([str(tmp_path / "empty")], "DIR must hold profiles, as FLEXDILATED_PROFILE="),
        ([str(two), "--top", "0"], "--top must be at least 1; got 0"),
        ([str(two), "--only", "third"], "--only must be part of a recording's name; got 'third', and there are "),
    ):
        assert main(["profile", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_bytes_that_are_no_text(two, capsys) -> None:
    (two / f"bad{TABLE}").write_bytes(b"\xff\xfe\x00")
    assert main(["profile", str(two)]) == 2
    assert f"bad{TABLE} holds no profile of this version" in capsys.readouterr().err


def test_the_doctor_knows_the_variable(folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr("flexdilated.cli._doctor.available_devices", lambda: ("cpu",))
    assert main(["doctor"]) == 0
    assert f"is read as {folder}" in capsys.readouterr().out
    folder.parent.write_text("a file")
    assert main(["doctor"]) == 0  # attention works all the same
    assert f"does not parse: FLEXDILATED_PROFILE must name a folder that can be written; got '{folder}'" in (
        capsys.readouterr().out
    )


def stored(folder: Path, name: str = "a", **changes) -> Path:
    """A recording as it is stored, with one operator, and other numbers for these fields of either."""
    operator = {"name": "aten::mm", "calls": 3, "self_us": 5.0, "total_us": 5.0, "device_us": 0.0, "memory_bytes": 9}
    operator |= {key: value for key, value in changes.items() if key in operator}
    data = {"format": "flexdilated profile", "version": 1, "name": name, "seconds": 1.0, "torch": "x", "events": 0}
    data |= {"trace": None, "operators": [operator]} | {key: changes[key] for key in changes if key not in operator}
    path = folder / f"{name}{TABLE}"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_recording_without_operators_is_shown(tmp_path, capsys) -> None:
    stored(tmp_path, operators=[])
    assert main(["profile", str(tmp_path)]) == 0
    assert "0 of 0 operators" in capsys.readouterr().out


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e308, -1e308, 2**64])
@pytest.mark.parametrize("field", ["seconds", "events", "calls", "self_us", "total_us", "device_us", "memory_bytes"])
def test_numbers_that_no_recording_has_are_refused(field, value, tmp_path, capsys) -> None:
    stored(tmp_path, **{field: value})
    assert main(["profile", str(tmp_path), "--json"]) == 2
    assert "holds no profile of this version" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["seconds", "events", "calls", "self_us", "total_us", "device_us"])
def test_only_memory_may_be_negative(field, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"{field} must be from 0"):
        read_recording(stored(tmp_path, **{field: -1}))
    assert read_recording(stored(tmp_path, memory_bytes=-5)).operators[0].memory_bytes == -5
