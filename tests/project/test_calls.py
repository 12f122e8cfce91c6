"""Wrong calls of public functions and classes are answered by what to write."""

import inspect
from typing import Any

import pytest
import torch

import flexdilated as fd
from flexdilated import masks

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
