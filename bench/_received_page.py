"""The figures of docs/attention_received.md: what it costs beside a forward pass, from its file of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._table import with_condition

RECEIVED = Path("docs/attention_received.md")
_MIB = 1 << 20


def received_parts(results: Path) -> dict[str, str]:
    """The part between the page's marks; empty where nothing has been measured yet."""
    file = results / "received.json"
    if not file.exists():
        return {"received": ""}
    document = json.loads(file.read_text())
    rows = document["rows"]
    headers = ("", "forward", "attention received", "peak memory of the two", "an N x M matrix")
    lines = [_line(time) for time in rows[::2]]
    return {"received": f"\n{with_condition(lines, headers, document)}\n"}


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    """From the row of times, whose detail holds the peaks too."""
    forward, received = (f"{timing['median_s']:.3g} s" for timing in row["timings"])
    peaks = " and ".join(f"{row['detail']['peak_bytes'][name] / _MIB:.0f} MiB" for name in ("forward", "received"))
    matrix = f"{row['detail']['matrix_bytes'] / _MIB:,.0f} MiB"
    return row["measure"].partition(": attention_received")[0], forward, received, peaks, matrix
