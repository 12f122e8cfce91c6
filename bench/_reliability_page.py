"""The figures of docs/reliability.md: what millions of texts and thousands of steps did, from the files of results."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexdilated.cli._sizes import bytes_text

from ._markdown import markdown
from ._table import Document, with_condition

RELIABILITY = Path("docs/reliability.md")


def reliability_parts(results: Path) -> dict[str, str]:
    """The parts between the page's marks; empty where nothing has been measured yet."""
    parts: dict[str, tuple[str, Callable[[Document], str]]] = {
        "fuzz": ("fuzz.json", _fuzz),
        "soak": ("soak.json", _soak),
        "soak marks": ("soak.json", _marks),
    }
    return {
        name: f"\n{text(json.loads((results / file).read_text()))}\n" if (results / file).exists() else ""
        for name, (file, text) in parts.items()
    }


def _fuzz(document: Document) -> str:
    """One line a kind of text: its three rows stand one after the other."""
    rows = document["rows"]
    lines = [
        _kind(answered, slowest, memory)
        for answered, slowest, memory in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
    ]
    headers = ("texts", "drawn", "read as a pattern", "a clear error", "anything else", "slowest", "peak memory")
    return with_condition(lines, headers, document)


def _kind(answered: Mapping[str, Any], slowest: Mapping[str, Any], memory: Mapping[str, Any]) -> tuple[str, ...]:
    detail = answered["detail"]
    counts = [detail["texts"], *(detail["verdicts"].get(verdict, 0) for verdict in ("pattern", "ValueError"))]
    name = answered["measure"].partition(":")[0]
    return (
        name,
        *(f"{count:,}" for count in counts),
        answered["measured_text"],
        f"{1e3 * slowest['measured']:.3g} ms",
        memory["measured_text"],
    )


def _soak(document: Document) -> str:
    lines = [(row["measure"], row["target"], row["measured_text"]) for row in document["rows"]]
    return with_condition(lines, ("", "target", "measured"), document)


def _marks(document: Document) -> str:
    lines = [
        (
            f"{mark['steps']:,}",
            bytes_text(mark["resident_bytes"]),
            f"{mark['tensors']:,}",
            f"{mark['graphs']:,}",
            bytes_text(mark["cache_bytes"]),
            f"{mark['evictions']:,}",
        )
        for mark in document["rows"][0]["detail"]["marks"]
    ]
    return markdown(lines, ("steps", "resident", "tensors alive", "graphs compiled", "in the cache", "evicted"))
