"""`make test-kernels`: the whole product with --all, and the record of it in bench/results/ and in the pages."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "bench/results"

_found: dict[str, dict[str, Any]] = {}


def file_of(name: str) -> Path:
    """Where results of this name are: the torch of constraints.txt has the plain file, each other one its own."""
    import torch

    version = torch.__version__.partition("+")[0]
    pinned = f"torch=={version}\n" in (RESULTS.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    return RESULTS / (f"{name}.json" if pinned else f"{name}_torch_{version}.json")


def recorded(name: str) -> dict[str, Any]:
    """The cases that were recorded with this torch."""
    file = file_of(name)
    return json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() else {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties if report.when == "call" and report.passed else ():
        file, _, key = name.partition(": ")
        _found.setdefault(file, {})[key] = value


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What passing tests noted as properties "file: key" is recorded, beside what is there unless all ran well."""
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("--all"):
        return
    from bench.__main__ import main
    from bench._machine import conditions

    some = exitstatus or config.getoption("keyword") or any("::" in each for each in config.args)
    for file, cases in _found.items():
        path, measured = file_of(file), conditions()
        measured["versions"]["triton"] = metadata.version("triton")
        cases = {key: {**value, "commit": (measured["commit"] or "")[:10]} for key, value in cases.items()}
        if some:
            cases = recorded(file) | cases
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(cases.items()))
        head = json.dumps({"name": path.stem, "small": False, **measured}, indent=1).removesuffix("\n}")
        path.write_text(f'{head},\n "cases": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    if _found:
        main(["pages"])
