"""The documentation's site: each page has one place in it, each public name is on an API page, docstrings are read."""

import re
import runpy
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = {page.stem: page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md"))}
SHOWN = [path for text in API.values() for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
NAMED = {path for text in API.values() for path in re.findall(r"`(flexdilated[\w.]*)`", text)}  # modules, and constants

# What users import from.
ROOMS = (
    *("flexdilated", "flexdilated.masks", "flexdilated.masks.recipes", "flexdilated.distributed"),
    *("flexdilated.selection.recipes", "flexdilated.schedules", "flexdilated.testing", "flexdilated.viewer"),
    *(f"flexdilated.integrations{each}" for each in ("", ".convert", ".torchscale", ".transformers")),
)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_on_an_api_page(room: str) -> None:
    public = {f"{room}.{name}" for name in import_module(room).__all__}
    assert public - {*SHOWN, *NAMED} == set()
    assert {path for path in SHOWN if path.rpartition(".")[0] == room} <= public


def test_an_api_page_shows_what_is_public_and_shows_it_once() -> None:
    assert {path: times for path, times in Counter(SHOWN).items() if times > 1} == {}
    assert {path.rpartition(".")[0] for path in SHOWN} <= set(ROOMS)


def test_every_page_has_one_place() -> None:
    _, _, places = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    made = ["CONTRIBUTING.md", "CHANGELOG.md", "results.md"]  # by docs/_pages.py
    assert sorted(re.findall(r"[\w/]+\.md", places)) == sorted([*pages, *made])


DOCSTRING = """
The rule. Sentences may hold a colon: this one goes on, at a
margin: as it is.

left, right: keys on each side,
    counted from the query. rate: tokens from one
    to the next.
mesh,
device: where.
A line at the margin below goes on with its entry.
Raises ValueError for the rest.
Source: a paper.

>>> two(1)  # rate: 1
2
"""

MARKDOWN = """
The rule. Sentences may hold a colon: this one goes on, at a
margin: as it is.

- `left`, `right`: keys on each side, counted from the query.

- `rate`: tokens from one to the next.

- `mesh`, `device`: where. A line at the margin below goes on with its entry.

Raises ValueError for the rest.

Source: a paper.

```pycon
>>> two(1)  # rate: 1
2
```
"""


def test_docstrings_become_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """griffe lies in a folder of its own, if at all; reading the file takes only the class that it extends."""
    griffe = ModuleType("griffe")
    griffe.Extension = object
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    as_markdown = runpy.run_path(str(DOCS / "_docstrings.py"))["as_markdown"]
    assert as_markdown(DOCSTRING.strip()) == MARKDOWN.strip()
