"""Bad input raises what errors.md beside this file says; wrong calls are answered by what to write."""

import builtins
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flexdilated as fd
from flexdilated import masks

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


# Made by the library, or called without arguments.
_MADE_HERE = {"Bound", "Layout", "Machine", "BlockRates", "Mixture", "Pattern", "Selection"}
_BARE = {"cache", "machine", "stats"}
ROOMS = {"fd": fd, "masks": masks, "masks.recipes": masks.recipes, "fd.selection.recipes": fd.selection.recipes}
CALLED = {
    f"{room}.{name}": value
    for room, module in ROOMS.items()
    for name in module.__all__
    if callable(value := getattr(module, name)) and name not in _MADE_HERE | _BARE
}


@pytest.mark.parametrize("name", CALLED)
def test_an_unknown_keyword_is_answered(name: str) -> None:
    with pytest.raises(TypeError, match=r"has no argument no_such_option: (it takes|write) |^LongNet needs config: "):
        CALLED[name](no_such_option=1)


@pytest.mark.parametrize("name", CALLED)
def test_missing_arguments_are_named_with_a_call_that_has_them(name: str) -> None:
    function: Any = CALLED[name]
    parameters = inspect.signature(function).parameters.values()
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if not needed:
        return
    with pytest.raises(TypeError) as caught:
        function()
    lacks, _, write = str(caught.value).partition(": ")
    *others, last = needed
    assert lacks.endswith(f"needs {', '.join(others)} and {last}" if others else f"needs {last}")
    assert "(" in write


@pytest.mark.parametrize("keyword", ["is_causal", "scael"])
def test_a_compiled_graph_keeps_the_text(keyword):
    q = torch.randn(1, 2, 16, 16)
    attend = torch.compile(
        lambda q: fd.attend(q, q, q, masks.causal(), **{keyword: True}), fullgraph=True, backend="eager"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"attend has no argument {keyword}"):
        attend(q)
