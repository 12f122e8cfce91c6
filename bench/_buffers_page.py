"""The figures of docs/communication_buffers.md: what a pool and the codecs bring, from the files of results."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexdilated.cli._sizes import bytes_text

from ._markdown import markdown
from ._table import Document, condition, with_condition

BUFFERS = Path("docs/communication_buffers.md")


def buffers_parts(results: Path) -> dict[str, str]:
    """The parts between the page's marks; empty where nothing has been measured yet."""
    parts: dict[str, tuple[str, Callable[[Document], str]]] = {
        "reuse": ("D6.json", _reuse),
        "single buffers": ("pool.json", _single_buffers),
        "pool claims": ("pool.json", _claims),
        "codec bytes": ("codec.json", _bytes),
        "codec errors": ("codec.json", _errors),
        "codec choice": ("codec.json", _choice),
    }
    return {
        name: f"\n{text(json.loads((results / file).read_text()))}\n" if (results / file).exists() else ""
        for name, (file, text) in parts.items()
    }


def _reuse(document: Document) -> str:
    lines = [
        (row["measure"], row["target"], row["measured_text"])
        for row in document["rows"]
        if "leases_a_step" in row["detail"]
    ]
    details = {json.dumps(row["detail"]): row for row in document["rows"] if "leases_a_step" in row["detail"]}
    notes = [
        f"{row['measure'].split(', forward')[0].split(', ')[-1]}: {detail['leases_a_step']:.0f} leases a step, "
        f"{bytes_text(detail['peak_bytes'])} held at the peak, {detail['held_over_leased_at_peak']:.2f} times what "
        "was leased then"
        for row in details.values()
        for detail in (row["detail"],)
    ]
    return f"{markdown(lines, ('', 'target', 'measured'))}\n\n{'; '.join(notes)}.\n\n{condition(document)}"


def _single_buffers(document: Document) -> str:
    (detail,) = (row["detail"] for row in document["rows"] if "sizes" in row["detail"])
    lines = [
        (
            bytes_text(each["bytes"]),
            f"{1e6 * each['leased_s']:,.0f} µs",
            f"{1e6 * each['made_s']:,.0f} µs",
            f"{100 * (1 - each['leased_s'] / each['made_s']):+.0f} %",
        )
        for each in detail["sizes"]
    ]
    from_there = detail["break_even_bytes"]
    pays = f"from {bytes_text(from_there)}" if from_there <= 1 << 26 else "at no size up to 64 MiB"
    table = markdown(lines, ("size", "leased", "made by torch", "time saved"))
    return f'{table}\n\nBy its own, quicker measurement there, "auto" leased {pays}.\n\n{condition(document)}'


def _claims(document: Document) -> str:
    lines = [_claim(row) for row in document["rows"] if "claimed" in row["detail"]]
    sources = dict.fromkeys(row["detail"]["source"] for row in document["rows"] if "claimed" in row["detail"])
    listed = "\n".join(f"* {source}" for source in sources)
    headers = ("claim", "claimed", "here", "reached")
    return f"{markdown(lines, headers)}\n\nSources:\n\n{listed}\n\n{condition(document)}"


def _claim(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["measure"], row["detail"]["claimed"], row["measured_text"], "yes" if row["met"] else "**no**"


def _bytes(document: Document) -> str:
    rows = [row for row in document["rows"] if "claimed" in row["detail"]]
    lines = [
        (
            f"`{row['detail']['codec']}`",
            row["measured_text"],
            f"{row['detail']['percent_saved_of_bfloat16']:.3g} %",
            row["detail"]["claimed"],
            f"{bytes_text(row['detail']['pays_below_bytes_a_second'])}/s",
        )
        for row in rows
    ]
    headers = ("codec", "saved of float32", "saved of bfloat16", "claimed", "pays on links below")
    source = f"The claim: {rows[0]['detail']['source']}."
    return f"{markdown(lines, headers)}\n\n{source}\n\n{condition(document)}"


def _errors(document: Document) -> str:
    lines = [
        (f"`{row['measure'].partition(':')[0]}`", kind, *(_percent(figures[name]) for name in _ERRORS))
        for row in document["rows"]
        if "normal" in row["detail"]
        for kind, figures in row["detail"].items()
    ]
    headers = ("codec", "rows", *(name.replace("_", " ") for name in _ERRORS))
    return with_condition(lines, headers, document)


_ERRORS = ("mean_row_error", "largest_row_error", "proven_bound", "output_error")


def _choice(document: Document) -> str:
    lines = [
        (row["measure"], f"`{row['detail']['codec']}`", f"{row['detail']['percent_saved']:.3g} %", row["measured_text"])
        for row in document["rows"]
        if row["measure"].startswith('"auto"')
    ]
    return with_condition(lines, ("", "takes", "saved", "measured"), document)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
