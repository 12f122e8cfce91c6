"""The path of a call, as docs/concepts/engines.md shows it: each function is where the page says."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_names_functions_that_are_there() -> None:
    page = (ROOT / "docs/concepts/engines.md").read_text(encoding="utf-8")
    section = page.partition("## The path of a call")[2].partition("\n## ")[0]
    shown = re.findall(r"^ *(\w+) +(\w+\.py)", section, re.MULTILINE)
    sources = [file for room in ("flexdilated", "masks") for file in ROOT.joinpath(room).rglob("*.py")]
    defined = {(name, file.name) for file in sources for name in re.findall(r"def (\w+)\(", file.read_text("utf-8"))}
    assert len(shown) > 30
    assert set(shown) <= defined
