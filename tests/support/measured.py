"""Results made up for tests of pages: what each file holds beside its rows, and cells of a table."""

import json
from pathlib import Path
from typing import Any

MEASURED = {
    "machine": {"cpu": "a CPU", "cores": 2, "threads": 1, "memory_gib": 4},
    "versions": {"python": "3.11", "torch": "2.13", "flexdilated": "0"},
    "commit": "abc",
    "date": "2026-01-02T03:04:05",
    "small": False,
}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows, **MEASURED}))


def cells(table: str, first: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip() for cell in line.strip("|").split("|")]
