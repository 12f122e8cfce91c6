"""Pages of results, from results made up here, and of the catalogue: nothing that falls short is hidden."""

import json
import re
import shutil
from pathlib import Path

import pytest

from bench import _guard, _report, catalogue
from bench.__main__ import main
from bench._catalogue import ENTRIES, MILLION, Entry
from bench._measures import Gap, Row, at_least, at_most
from bench._pages import PAGES
from bench._run import MEASURES
from bench.catalogue import OVERVIEW, draw_all, file_name
from flexdilated import masks
from flexdilated.masks.core._expression import CONSTRUCTORS

MEASURED = {
    "machine": {"cpu": "a CPU", "cores": 2, "threads": 1, "memory_gib": 4},
    "versions": {"python": "3.11", "torch": "2.13", "flexdilated": "0"},
    **{"commit": "abc", "date": "2026-01-02T03:04:05", "small": False},
}
FAST, MISSED = (Row(f"LongNet, {n}K: times as fast", at_least(1.5, "×"), x) for n, x in ((1, 9), (3, 1.4954)))
GAP = Gap("LongNet, 4K: times as fast", at_least(1.5, "×"), "out of memory")
SMALL = Row("LongNet, 1K: peak memory", at_most(512, "MB"), 3.0)
UNCHECKED = Row("LongNet, 1K: peak memory", at_most(512, "MB"), 3.0, not_verified=("gradients",))


@pytest.fixture
def written(tmp_path: Path):
    """Writes rows as the answer to vs_branch_loop, and returns the folder."""

    def write(*rows: Row | Gap) -> Path:
        about = {"name": "vs_branch_loop", "question": "How fast?", "config": {}, **MEASURED}
        document = {**about, "rows": [row.to_data() for row in rows], "points": []}
        (tmp_path / "vs_branch_loop.json").write_text(json.dumps(document))
        return tmp_path

    return write


def part(results: Path, name: str, page: str = "docs/performance.md") -> str:
    return PAGES[Path(page)][name](results).strip()


def test_what_falls_short_is_said_in_full(written) -> None:
    """On the page of performance; README says how many."""
    results = written(FAST, MISSED, GAP, UNCHECKED)
    assert part(results, "missed", "README.md").startswith("3 of 4 figures miss their target: [which")
    assert part(results, "short").splitlines() == [
        "* `vs_branch_loop`: LongNet, 3K: times as fast: **1.495 ×**, target ≥ 1.5 ×",
        "* `vs_branch_loop`: LongNet, 4K: times as fast: **not measured: out of memory**, target ≥ 1.5 ×",
        "* `vs_branch_loop`: LongNet, 1K: peak memory: **3 MB, not verified**, target ≤ 512 MB",
    ]


def test_pages_are_written_between_their_marks(tmp_path: Path, monkeypatch, capsys) -> None:
    """No number without its file: `python -m bench pages` makes each page what it is, from results of full size.

    A part whose result is not there stays as it is, and that is said.
    """
    root = Path.cwd()
    results = root / "bench/results"
    assert not any(json.loads(path.read_text()).get("small") for path in results.glob("*.json"))
    pages = {path: (root / path).read_text(encoding="utf-8") for path in PAGES}
    shutil.copytree(results, tmp_path / "bench/results")
    for path, text in pages.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(_report._MARK.sub(r"\1old\n\3", text), "utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["pages"]) == 0
    assert {path: path.read_text(encoding="utf-8") for path in pages} == pages
    Path("bench/results/fits.json").unlink()
    capsys.readouterr()
    assert main(["pages"]) == 0
    said = "docs/howto/choosing.md, what fits on cpu: stays as it is; bench/results/fits.json is not there"
    assert said in capsys.readouterr().err
    assert {path: path.read_text(encoding="utf-8") for path in pages} == pages


def test_words_of_pages() -> None:
    """Bounds and durations in words are those of the code and of the results."""
    text = Path("docs/contributing/benchmarks.md").read_text(encoding="utf-8")
    assert f"It may be {_guard.BOUND:g} times the ratio" in text
    found = json.loads(Path("bench/results/commands.json").read_text())["rows"]
    rows = {row["measure"]: row["measured"] for row in found}
    for page in ("README.md", "docs/index.md"):
        text = Path(page).read_text(encoding="utf-8")
        for command in ("make demo", "make test"):
            (line,) = (line for line in text.splitlines() if line.startswith(f"{command}  #"))
            assert line.endswith(f"in {rows[command] / 60:.0f} minutes")


ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/catalogue.md")
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
PICTURES = ROOT / "docs/images/catalogue"
RESULTS = ROOT / "bench/results"

PATTERNS = {name for name, made in CONSTRUCTORS.items() if made.__module__.startswith("flexdilated.masks.")}
# full is every, selected_keys are selected_blocks of one token; tensors or other patterns state the pairs of the rest.
OTHERS = {"full", "selected_keys", "sparse", "mask", "per_sample", "same_document"}
PATTERNS = {name for name in PATTERNS if "." not in name} - OTHERS
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


@pytest.mark.thorough
def test_the_question_runs_at_small_sizes(tmp_path: Path) -> None:
    entries = MEASURES["catalogue"].small["entries"][:1]
    waste, seconds, megabytes = catalogue.catalogue(**{**MEASURES["catalogue"].small, "entries": entries})
    assert waste.detail["patterns"].keys() == {entry.name for entry in entries}
    assert waste.measured == max(each["waste"] for each in waste.detail["patterns"].values())
    assert 0 < seconds.measured < 2
    assert megabytes.met
    assert sorted(path.name for path in draw_all(tmp_path, entries)) == sorted([*map(file_name, entries), OVERVIEW])
