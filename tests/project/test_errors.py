"""Bad input raises what errors.md beside this file says: before any work, by its rule and what came."""

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from .test_docs import run

ERRORS = Path(__file__).with_name("errors.md")

# A cell of code, a built-in exception, and its message, in which ... stands for any text.
ROW = re.compile(r"^\| `(?P<code>.+?)` \| `(?P<error>\w+)` \| `(?P<message>.+?)` \|$", re.MULTILINE)


def rows() -> list[dict[str, str]]:
    return [row.groupdict() for row in ROW.finditer(ERRORS.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def errors_namespace() -> dict[str, Any]:
    return run(ERRORS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["code"])
def test_bad_input(row: dict[str, str], errors_namespace: dict[str, Any]) -> None:
    message = ".*".join(map(re.escape, row["message"].replace(r"\|", "|").split("...")))
    with pytest.raises(getattr(builtins, row["error"]), match=rf"(?s)\A{message}\Z") as caught:
        eval(row["code"].replace(r"\|", "|"), errors_namespace)
    assert type(caught.value) is getattr(builtins, row["error"])


def test_every_row_is_read() -> None:
    cells = [line for line in ERRORS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(cells) == len(rows()) > 40
