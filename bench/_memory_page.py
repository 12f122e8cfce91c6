"""The figures of docs/memory.md: peaks, checkpointing, and what fits, from the files of results."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexdilated.cli._sizes import bytes_text, tokens_text

from ._table import Document, with_condition

MEMORY = Path("docs/memory.md")


def memory_parts(results: Path) -> dict[str, str]:
    """The parts between the page's marks; empty where nothing has been measured yet."""
    parts: dict[str, tuple[str, Callable[[Document], str]]] = {
        "against dense": ("C13.json", _against_dense),
        "predicted and measured": ("fits.json", _peaks),
        "checkpointing": ("checkpointing.json", _checkpointing),
        "what fits on cpu": ("fits.json", lambda document: _longest(document, "cpu")),
        "what fits on cuda": ("fits.json", lambda document: _longest(document, "cuda")),
    }
    return {
        name: f"\n{text(json.loads((results / file).read_text()))}\n" if (results / file).exists() else ""
        for name, (file, text) in parts.items()
    }


def _against_dense(document: Document) -> str:
    lines = [
        (
            row["measure"].partition(", forward")[0],
            bytes_text(row["detail"]["peak_bytes"]),
            bytes_text(row["detail"]["dense_peak_bytes"]),
            row["measured_text"],
        )
        for row in document["rows"]
    ]
    return with_condition(lines, ("forward + backward", "peak", "dense SDPA's", "ratio"), document)


def _peaks(document: Document) -> str:
    lines = [
        (
            _what(point),
            point["pattern"],
            point["dtype"],
            bytes_text(point["predicted_bytes"]),
            bytes_text(point["measured_bytes"]),
            f"{100 * (point['predicted_bytes'] / point['measured_bytes'] - 1):+.1f} %",
        )
        for row in document["rows"]
        for point in row["detail"]["peaks"]
    ]
    return with_condition(lines, ("", "pattern", "dtype", "predicted", "measured", "deviation"), document)


def _what(point: Mapping[str, Any]) -> str:
    if point["checkpoint"] is None:
        return "`attend`"
    return "LongNet, checkpointed" if point["checkpoint"] else "LongNet"


def _checkpointing(document: Document) -> str:
    memory, time = document["rows"]
    detail, timings = memory["detail"], {timing["name"]: timing["median_s"] for timing in time["timings"]}
    lines = [
        ("plain", bytes_text(detail["peak_bytes"]), bytes_text(detail["predicted_bytes"]), f"{timings['plain']:.3g} s"),
        (
            "with checkpointing",
            bytes_text(detail["checkpointed_peak_bytes"]),
            bytes_text(detail["predicted_checkpointed_bytes"]),
            f"{timings['checkpointed']:.3g} s",
        ),
        ("ratio", memory["measured_text"], "", time["measured_text"]),
    ]
    name = memory["measure"].partition(", forward")[0]
    return with_condition(lines, (name, "peak memory", "predicted", "a step"), document)


def _longest(document: Document, device: str) -> str:
    found = document["rows"][0]["detail"]["longest"][device]
    names = list(found["bytes_a_token"])
    lines = [("bytes a token", *(bytes_text(each) for each in found["bytes_a_token"].values()))]
    for each in found["longest"]:
        lines.append((bytes_text(each["budget_bytes"]), *(tokens_text(each[name]) for name in names)))
    return with_condition(lines, ("", *names), document)
