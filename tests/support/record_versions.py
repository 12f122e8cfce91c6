"""`make test ARGS=--record`: what the suite finds with this torch, kept in bench/results/ and in the pages."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "bench/results/versions.json"
_PACKAGES = ("transformers", "triton")
_began = pytest.StashKey[tuple[float, str | None]]()  # time, and commit: a run takes minutes, in which it may change


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="record what the whole suite finds with this torch")


def pytest_configure(config: pytest.Config) -> None:
    named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr
    if config.getoption("--record") and named:
        raise pytest.UsageError("--record is for the whole suite: choose no tests with it")


def pytest_sessionstart(session: pytest.Session) -> None:
    begun = None
    if session.config.getoption("--record"):
        from bench._machine import commit

        begun = commit()
    session.config.stash[_began] = perf_counter(), begun


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--record"):
        return
    import torch

    from bench.__main__ import main

    start, commit = config.stash[_began]
    about = {"commit": commit, "seconds": round(perf_counter() - start)}
    write(FILE, torch.__version__.partition("+")[0], found(terminalreporter.stats) | about)
    main(["pages"])


def found(reports: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """How many tests passed, which failed, how many were left out for each reason; and with what."""
    import torch

    from bench._machine import conditions

    failed = sorted({report.nodeid for kind in ("failed", "error") for report in reports.get(kind, ())})
    left_out = Counter(re.sub(r"^Skipped: ", "", report.longrepr[2]) for report in reports.get("skipped", ()))
    packages = {name: _version(name) for name in _PACKAGES}
    counts = {"passed": len(reports.get("passed", ())), "failed": failed, "left_out": dict(left_out.most_common())}
    return {**conditions(), "cuda": torch.version.cuda, "packages": packages, **counts}


def write(file: Path, version: str, entry: dict[str, Any]) -> None:
    """Replace what the file holds of this version."""
    known = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() else {}
    cases = dict(sorted((known | {version: entry}).items(), key=lambda each: tuple(map(int, each[0].split(".")))))
    document = {"name": file.stem, "small": False, "cases": cases}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
