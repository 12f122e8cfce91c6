"""The figures of docs/compiling.md: from the files of results, and from nowhere else."""

import json
from pathlib import Path
from typing import Any

from bench._compiling_page import compiling_parts

MEASURED = {
    "machine": {"cpu": "a CPU", "cores": 2, "threads": 1, "memory_gib": 4},
    "versions": {"python": "3.11", "torch": "2.13", "flexdilated": "0"},
    "commit": "abc",
    "date": "2026-01-02T03:04:05",
    "small": False,
}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows, **MEASURED}))


def cells(table: str, first: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_nothing_measured_is_nothing_shown(tmp_path: Path) -> None:
    assert compiling_parts(tmp_path) == {"first step": "", "lengths": ""}
    write(tmp_path, "C11", [{"measure": "x: y", "detail": {"lengths": [3]}}])
    assert compiling_parts(tmp_path)["lengths"] == ""


def test_first_steps(tmp_path: Path) -> None:
    detail = {
        "flexdilated": {"first_s": 12.34, "later_s": 0.01, "parts_s": {}},
        "torch's own attention": {"first_s": 11.0, "later_s": 0.02, "parts_s": {}},
    }
    cold = {"measure": "a model: cold first step, over that with torch's own attention", "detail": detail}
    write(tmp_path, "first_step", [cold, {"measure": "import", "measured_text": "0.2 s", "detail": {}}])
    shown = compiling_parts(tmp_path)["first step"]
    assert cells(shown, "a model") == ["a model: cold first step", "12.3 s", "11 s", "0.01 s"]
    assert "* import: 0.2 s" in shown
    assert "a CPU, 2 cores" in shown


def test_lengths(tmp_path: Path) -> None:
    ways = {
        name: {"compilations": n, "seconds_of_all_steps": 9.87, "seconds_of_steps_that_nowhere_compile": 1.25}
        for name, n in (("as they come", 2), ("padded", 4))
    }
    detail = {"lengths": [5, 6, 7], "steps_that_nowhere_compile": 1, "ways": ways}
    write(tmp_path, "C11", [{"measure": "a net, 3 lengths: compilations", "detail": detail}])
    shown = compiling_parts(tmp_path)["lengths"]
    assert cells(shown, "lengths")[2:] == ["all 3 steps", "the 1 steps that nowhere compile"]
    assert cells(shown, "as they come") == ["as they come", "2", "9.87 s", "1.25 s"]
    assert cells(shown, "padded")[1] == "4"
    assert "a net, 3 lengths: a CPU" in shown
