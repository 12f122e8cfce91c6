"""The catalogue's page: every pattern and recipe has its section, its picture and its figures, none is left over."""

import json
import re
from pathlib import Path

import pytest

from bench import catalogue
from bench._catalogue import ENTRIES, MILLION, Entry
from bench._run import MEASURES
from bench.catalogue import OVERVIEW, draw_all, file_name
from flexdilated import masks
from flexdilated.masks.core._expression import CONSTRUCTORS

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/catalogue.md")
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
PICTURES = ROOT / "docs/images/catalogue"
RESULTS = ROOT / "bench/results"

PATTERNS = {name for name, made in CONSTRUCTORS.items() if made.__module__.startswith("flexdilated.masks.")}
# full is every; tensors or other patterns state the pairs of the rest.
PATTERNS = {name for name in PATTERNS if "." not in name} - {"full", "mask", "per_sample", "same_document"}
PATTERNS |= {"custom", "per_document"}
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def test_every_pattern_and_every_recipe_has_a_section_an_entry_and_pictures() -> None:
    """docs/contributing/adding_a_pattern.md says how to add one."""
    wanted = PATTERNS | {*masks.recipes.__all__}
    assert {entry.kind for entry in ENTRIES} == wanted
    assert set(re.findall(r"^### (\w+)$", TEXT, re.MULTILINE)) == wanted
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        prefix = {"per_document": ".", **dict.fromkeys(masks.recipes.__all__, "recipes.")}.get(entry.kind, "masks.")
        texts = entry.text, entry.small, entry.million or entry.text
        assert all(f"{prefix}{entry.kind}(" in text for text in texts), entry.name
    names = sorted(path.name for path in PICTURES.iterdir())
    assert names == sorted([*map(file_name, ENTRIES), OVERVIEW])
    assert f"(images/catalogue/{OVERVIEW})" in TEXT


@each_entry
def test_what_misses_its_target_has_its_reason(entry: Entry) -> None:
    """A reason that has become untrue goes, too."""
    figures = json.loads((RESULTS / "catalogue.json").read_text())["rows"][0]["detail"]["patterns"][entry.name]
    assert bool(entry.waste_why) == (not catalogue.WASTE.met_by(figures["waste"]))
    if entry.name in ("dilated", "fixed", "longformer", "longnet"):  # the figure is still the library's
        described = masks.describe(entry.pattern(65536), 65536, num_heads=entry.num_heads)
        assert described.waste == pytest.approx(figures["waste"])
    assert entry.largest == MILLION or entry.build_why


@pytest.mark.slow
def test_the_question_runs_at_small_sizes(tmp_path: Path) -> None:
    entries = MEASURES["catalogue"].small["entries"][:2]
    waste, seconds, megabytes = catalogue.catalogue(**{**MEASURES["catalogue"].small, "entries": entries})
    assert waste.detail["patterns"].keys() == {entry.name for entry in entries}
    assert waste.measured == max(each["waste"] for each in waste.detail["patterns"].values())
    assert 0 < seconds.measured < 2
    assert megabytes.met
    assert sorted(path.name for path in draw_all(tmp_path, entries)) == sorted([*map(file_name, entries), OVERVIEW])
