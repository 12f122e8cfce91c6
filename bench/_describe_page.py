"""The figures of docs/describe.md: how long it takes at a million tokens, from its file of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._markdown import markdown
from ._table import condition

DESCRIBE = Path("docs/describe.md")


def describe_parts(results: Path) -> dict[str, str]:
    """The part between the page's marks; empty where nothing has been measured yet."""
    file = results / "describe.json"
    if not file.exists():
        return {"describe": ""}
    document = json.loads(file.read_text())
    patterns = document["rows"][0]["detail"]["patterns"]
    headers = ("", "heads", "plan and blocks", "heads, overlap, gaps", "receptive field", "layers", "pairs reached")
    table = markdown([_line(name, figure) for name, figure in patterns.items()], headers)
    return {"describe": f"\n{table}\n\nOne thread. {condition(document)}\n"}


def _line(name: str, figure: Mapping[str, Any]) -> tuple[str, ...]:
    times = (f"{figure['parts'][part]:.2f} s" for part in ("plan", "pairs", "field"))
    if not figure.get("exact", True):
        return name, str(figure["heads"]), *times, f"at least {figure['layers']:,}", "sampled"
    return name, str(figure["heads"]), *times, f"{figure['layers']:,}", f"{figure['reached']:.2%}"
