"""The path of a call, as docs/concepts/engines.md tells it: each function is called, below the one above it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call, Features, flex
from flexdilated.engines.flex import _flex
from flexdilated.engines.flex._program import tables_of
from tests.engines.test_flex import dense_flex

Called = tuple[str, str]  # a function and its file

PAGE = Path(__file__).parents[2] / "docs/concepts/engines.md"
PATTERN = masks.longnet((16, 64), (1, 4)) & masks.causal()


def told(page: str) -> list[list[tuple[Called, ...]]]:
    """The paths of each block of the page's section: a function after those that lead to it."""
    section = page.partition("## The path of a call")[2].partition("\n## ")[0]
    found = []
    for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL):
        paths: list[tuple[Called, ...]] = []
        for line in block.splitlines():
            name, file = line.split()[:2]
            depth = (len(line) - len(line.lstrip())) // 2
            above = next((path for path in reversed(paths) if len(path) == depth), ())
            paths.append((*above, (name, file)))
        found.append(paths)
    return found


def followed(run: Callable[[], Any], ends: set[Called]) -> set[tuple[Called, ...]]:
    """The stacks that led to these functions, the outermost first."""
    stacks: set[tuple[Called, ...]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and called(frame) in ends:
            stack, above = [], frame
            while above is not None:
                stack.append(called(above))
                above = above.f_back
            stacks.add(tuple(reversed(stack)))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return stacks


def called(frame: FrameType) -> Called:
    return frame.f_code.co_name, Path(frame.f_code.co_filename).name


def is_within(path: tuple[Called, ...], stack: tuple[Called, ...]) -> bool:
    """Whether the stack ends at the path's last function and has the others above it, in this order."""
    rest = iter(stack)
    return stack[-1] == path[-1] and all(each in rest for each in path)


def uncompiled(steps, tables, enter, q, k, v, *features):
    """The flex engine's function before it is compiled, around a dense kernel."""
    found = [tables_of(each) for each in steps]
    given = _flex.read_flat(*features)._replace(return_lse=True)
    return _flex._run(steps, found, enter, q, k, v, given, dense_flex)


def on_cpu() -> None:
    q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
    torch.autograd.grad(fd.attend(q, k, v, PATTERN).sum(), (q, k, v))


def as_elsewhere() -> None:
    """From the engine on: `attend` takes it on accelerators."""
    x = torch.randn(1, 2, 70, 16)
    key = Call(PATTERN.text, 2, 2, 70, 70, 0, 0, 0, 2, 1, ())
    flex(x, x, x, [], key, Features(1.0))


def by_portable() -> None:
    q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
    torch.autograd.grad(fd.attend(q, k, v, PATTERN, dropout_p=0.1).sum(), (q, k, v))


RUNS = {"aten": (0, on_cpu, 0), "flex": (1, as_elsewhere, 1), "portable": (2, by_portable, 0)}


@pytest.mark.parametrize(("block", "run", "skipped"), RUNS.values(), ids=RUNS)
def test_the_page_tells_the_path(block, run, skipped, monkeypatch):
    monkeypatch.setattr(_flex, "_compiled", lambda device, function: uncompiled)
    masks.cache().clear()
    _flex.compiled_flex.cache_clear()
    paths = [path[skipped:] for path in told(PAGE.read_text(encoding="utf-8"))[block]]
    paths = [path for path in paths if not skipped or path[:1] == (("flex", "_flex_op.py"),)]
    assert len(paths) > 8
    stacks = followed(run, {path[-1] for path in paths})
    for path in paths:
        assert any(is_within(path, stack) for stack in stacks), path
    _flex.compiled_flex.cache_clear()
