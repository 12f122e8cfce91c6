"""The documentation's site: each public name is on an API page, once."""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = {page.stem: page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md"))}
SHOWN = [path for text in API.values() for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
NAMED = {path for text in API.values() for path in re.findall(r"`(flexdilated[\w.]*)`", text)}  # modules, and constants

# What users import from.
ROOMS = (
    *(
        "flexdilated",
        "flexdilated.masks",
        "flexdilated.masks.recipes",
        "flexdilated.masks.extend",
        "flexdilated.distributed",
    ),
    *(
        "flexdilated.selection.recipes",
        "flexdilated.biases",
        "flexdilated.schedules",
        "flexdilated.testing",
        "flexdilated.viewer",
    ),
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
