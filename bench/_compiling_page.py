"""The figures of docs/compiling.md: first steps, and lengths that change, from the files of results."""

import json
from collections.abc import Mapping
from pathlib import Path

from ._markdown import markdown
from ._table import Document, condition

COMPILING = Path("docs/compiling.md")
_OTHER = "torch's own attention"


def compiling_parts(results: Path) -> dict[str, str]:
    """The parts between the page's marks; empty where nothing has been measured yet."""
    parts = {"first step": ("first_step.json", _first_steps), "lengths": ("C11.json", _lengths)}
    return {
        name: table(json.loads((results / file).read_text())) if (results / file).exists() else ""
        for name, (file, table) in parts.items()
    }


def _first_steps(document: Document) -> str:
    """Seconds of each first step, and what is measured beside them in a line below."""
    rows = {row["measure"]: row for row in document["rows"]}
    lines = []
    for measure, row in rows.items():
        if _OTHER in row["detail"]:
            ours, theirs = row["detail"]["flexdilated"], row["detail"][_OTHER]
            name = measure.removesuffix(f", over that with {_OTHER}")
            lines.append((name, *(f"{each:.3g} s" for each in (ours["first_s"], theirs["first_s"], ours["later_s"]))))
    headers = ("", "flexdilated", f"with {_OTHER}", "a later step")
    others = [f"{measure}: {row['measured_text']}" for measure, row in rows.items() if _OTHER not in row["detail"]]
    return "\n".join(("", markdown(lines, headers), "", *(f"* {line}" for line in others), "", condition(document), ""))


def _lengths(document: Document) -> str:
    """The ways to deal with lengths."""
    detail = document["rows"][0]["detail"]
    if "ways" not in detail:  # measured before there were any
        return ""
    lines = [(way, found["compilations"], *_seconds(found)) for way, found in detail["ways"].items()]
    number = detail["steps_that_nowhere_compile"]
    headers = ("lengths", "graphs", f"all {len(detail['lengths'])} steps", f"the {number} steps that nowhere compile")
    name = document["rows"][0]["measure"].partition(":")[0]
    return "\n".join(("", markdown(lines, headers), "", f"{name}: {condition(document)}", ""))


def _seconds(found: Mapping[str, float]) -> tuple[str, ...]:
    names = ("seconds_of_all_steps", "seconds_of_steps_that_nowhere_compile")
    return tuple(f"{found[name]:.3g} s" for name in names)
