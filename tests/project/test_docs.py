"""The documentation: examples run and print what is shown, links lead on; each public name has its place, once."""

import doctest
import gc
import inspect
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import flexdilated
from flexdilated import biases, distributed, integrations, masks, schedules, selection, testing, viewer
from flexdilated.engines.flex._flex import compiled_flex
from tests.support.commands import make_memory_up
from tests.support.ranks import one_rank
from tests.support.vision import vision

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A Python block, the line its code starts after, and the text block right below it: what it prints."""

    code: str
    line: int
    printed: str


def examples(page: Path) -> list[Example]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    printed = {fence.start(): fence["text"] for fence in fences if fence["language"] == "text"}
    return [
        Example(fence["text"], text.count("\n", 0, fence.start("text")), printed.get(fence.end() + 1, ""))
        for fence in fences
        if fence["language"] == "python"
    ]


def run(page: Path) -> dict[str, Any]:
    """The page's examples, one after the other in one namespace; returns that namespace."""
    # torch.compile looks up the globals of what it traces by the name of their module.
    module = sys.modules[f"page_{page.stem}"] = ModuleType(f"page_{page.stem}")
    with torch.random.fork_rng(devices=[]):
        for example in examples(page):
            # Blank lines in front: a traceback points to the line of the page.
            code = compile("\n" * example.line + example.code, str(page), "exec")
            with redirect_stdout(io.StringIO()) as printed:
                exec(code, vars(module))
            where = f"{name(page)}, line {example.line + 1}"
            assert printed.getvalue() == example.printed, f"{where}: what is printed is not what is shown"
    return vars(module)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile traces, and builds no kernels: other tests hold what is made of the trace.

    Nor does `max_batch` look for garbage before each trial, among all that the suite holds.
    """
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model=None, **options: compiled(model, **{"backend": "eager", **options})
    )
    compiled_flex.cache_clear()
    yield
    compiled_flex.cache_clear()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_examples(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_kernels: None) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name in ("convert.md", "diffusers.md"):
        vision()  # timm and diffusers are found where the tests keep them
    if page.name == "choosing.md":
        make_memory_up(monkeypatch)  # it prints pairs of plans, and no bytes
    run(page)
    assert not list(tmp_path.iterdir())


def test_every_fence_is_read() -> None:
    """An indented or unclosed fence would hide an example from the test."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert 2 * len(FENCE.findall(text)) == text.count("```"), page


def links(page: Path) -> set[str]:
    """Links to files and headings of this repository."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    return {target for target in LINK.findall(prose) if not re.match(r"https?:", target)}


def anchors(page: Path) -> set[str]:
    """What the headings are called in links: lower case, spaces as hyphens, no other punctuation."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_errors_that_the_faq_quotes_are_raised_somewhere() -> None:
    quoted = re.findall(r'\*\*"([^"]+)"', (DOCS / "faq.md").read_text(encoding="utf-8"))
    rooms = [Path(package.__path__[0]) for package in (flexdilated, flexdilated.masks)]
    sources = [file.read_text(encoding="utf-8") for room in rooms for file in room.rglob("*.py")]
    said = re.sub(r'"\s*f?"', "", "".join(sources))  # a text in several lines
    assert [quote for quote in quoted if quote not in said] == []
    assert len(quoted) > 8


API = {page.stem: page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md"))}
SHOWN = [path for text in API.values() for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
NAMED = {path for text in API.values() for path in re.findall(r"`(flexdilated[\w.]*)`", text)}  # modules, and constants

# What users import from.
ROOMS = ["", ".masks", ".masks.recipes", ".masks.extend", ".distributed", ".selection.recipes", ".biases", ".schedules"]
ROOMS += [".flex_attention", ".testing", ".viewer"]
ROOMS += [f".integrations{each}" for each in ("", ".convert", ".torchscale", ".transformers")]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_on_an_api_page(room: str) -> None:
    room = f"flexdilated{room}"
    public = {f"{room}.{name}" for name in import_module(room).__all__}
    assert public - {*SHOWN, *NAMED} == set()
    assert {path for path in SHOWN if path.rpartition(".")[0] == room} <= public


def test_an_api_page_shows_what_is_public_and_shows_it_once() -> None:
    assert {path: times for path, times in Counter(SHOWN).items() if times > 1} == {}
    assert {path.rpartition(".")[0] for path in SHOWN} <= {f"flexdilated{room}" for room in ROOMS}


PACKAGES = (flexdilated, masks, masks.extend, biases, schedules)
PACKAGES += (distributed, integrations.torchscale, selection.recipes, testing, viewer)


@pytest.fixture  # for each test: a page's example makes a group of its own
def mesh() -> Iterator[DeviceMesh]:
    """One rank, as the examples of attention over ranks need."""
    with one_rank() as mesh:
        yield mesh


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_has_an_example_that_runs(package, mesh, tmp_path, monkeypatch, without_kernels) -> None:
    monkeypatch.chdir(tmp_path)
    make_memory_up(monkeypatch)  # no example prints a plan's bytes
    given = {"fd": flexdilated, "masks": masks, "mesh": mesh, "testing": testing, "torch": torch, "viewer": viewer}
    given["__name__"] = __name__  # the module of the functions that examples define
    printed: list[str] = []
    for name in package.__all__:
        made = getattr(package, name)
        if inspect.isclass(made) or inspect.isfunction(made):
            example = doctest.DocTestParser().get_doctest(inspect.getdoc(made) or "", dict(given), name, None, 0)
            assert example.examples, f"the docstring of {name} has no example"
            doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert printed == []
