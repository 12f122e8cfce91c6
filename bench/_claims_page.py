"""The page of claims: its table and its notes, from the file of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._claims import CLAIMS, Claim
from ._markdown import markdown
from ._result import with_unit
from ._table import condition

PAGE = Path("docs/claims.md")
_TEXTS = ("claimed", "source")
_UNITS = {"bytes": (2**20, "MiB"), "percent": (1, "%")}


def claims_parts(results: Path) -> dict[str, str]:
    """The table, and for each claim what was measured and where it stands."""
    document = json.loads((results / "claims.json").read_text())
    rows = {row["measure"]: row for row in document["rows"]}
    numbered = [(number, claim, rows[claim.says]) for number, claim in enumerate(CLAIMS, start=1)]
    headers = ("", "claim", "claimed", "here", "reached")
    lines = [
        (str(number), claim.says, claim.claimed, row["measured_text"], "yes" if row["met"] else "**no**")
        for number, claim, row in numbered
    ]
    table = markdown(lines, headers)
    notes = "\n".join(f"{number}. {_note(claim, row)}" for number, claim, row in numbered)
    return {"claims": f"\n{table}\n\n{condition(document)}\n", "notes": f"\n{notes}\n"}


def _note(claim: Claim, row: Mapping[str, Any]) -> str:
    times = [f"{timing['name']} {with_unit(timing['median_s'] * 1e3, 'ms')}" for timing in row["timings"]]
    beside = [_beside(name, value) for name, value in row["detail"].items() if name not in _TEXTS]
    return f"{_sentence(claim.here)} {_sentence('; '.join((*times, *beside)))} Source: {claim.source}."


def _beside(name: str, value: float | str) -> str:
    """A detail in words: its name, and its value in the unit that the name holds."""
    words = name.replace("_", " ")
    if isinstance(value, str):
        return f"{words}: {value}"
    for word, (size, unit) in _UNITS.items():
        if word in name.split("_"):
            return f"{' '.join(words.replace(word, '').split())}: {with_unit(value / size, unit)}"
    return f"{words}: {value:,}" if isinstance(value, int) else f"{words}: {value:.3g}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
