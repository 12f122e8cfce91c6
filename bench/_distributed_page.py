"""The figures of docs/distributed.md: bytes, errors, balance and a ring's memory, from the files of results."""

import json
from collections.abc import Callable
from pathlib import Path

from ._table import Document, with_condition

DISTRIBUTED = Path("docs/distributed.md")


def distributed_parts(results: Path) -> dict[str, str]:
    """The parts between the page's marks; empty where nothing has been measured yet."""
    parts: dict[str, tuple[str, Callable[[Document], str]]] = {
        "keys received": ("D1.json", _keys_received),
        "exactness": ("D3.json", _rows),
        "balance": ("D4.json", _balance),
        "ring memory": ("D5.json", _rows),
    }
    return {
        name: f"\n{text(json.loads((results / file).read_text()))}\n" if (results / file).exists() else ""
        for name, (file, text) in parts.items()
    }


def _keys_received(document: Document) -> str:
    """Of the rows that were counted without processes: what an exchange receives beside an all-gather."""
    lines = [
        (
            row["measure"].partition(", counted")[0],
            case,
            f"{_mean(figures['tokens_a_kv_head']):,.0f}",
            f"{figures['all_gather_tokens_a_kv_head']:,.0f}",
            f"{figures['all_gather_ratio']:.0f} ×",
        )
        for row in document["rows"]
        for case, figures in row["detail"].items()
        if "all_gather_ratio" in figures
    ]
    headers = ("", "order and heads", "needed, mean of ranks", "all-gather", "ratio")
    return with_condition(lines, headers, document)


def _balance(document: Document) -> str:
    """Most over mean work of a rank in either order."""
    lines = [
        (
            row["measure"].partition(", zigzag")[0],
            *(f"{row['detail'][order]['max_over_mean']:.3f}" for order in ("contiguous", "zigzag")),
        )
        for row in document["rows"]
    ]
    return with_condition(lines, ("", "contiguous", "zigzag"), document)


def _rows(document: Document) -> str:
    lines = [(row["measure"], row["target"], row["measured_text"]) for row in document["rows"]]
    return with_condition(lines, ("", "target", "measured"), document)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
