"""The page on kernels without a device: tables of what ran in the interpreter, and of what machine code takes."""

from collections.abc import Iterable, Mapping
from typing import Any

from ._catalogue import ENTRIES
from ._report import Document, with_condition

Figures = Mapping[str, Any]


def interpreted(document: Document) -> str:
    """Of each result the largest share of its budget, by dtype."""
    cases = document["cases"].values()
    names = sorted({name for case in cases for name in case["shares"]}, key=_order)
    lines = []
    for dtype in sorted({case["dtype"] for case in cases}):
        mine = [case for case in cases if case["dtype"] == dtype]
        dims = ", ".join(str(dim) for dim in sorted({case["head_dim"] for case in mine}))
        lines.append((dtype, str(len(mine)), dims, *(_largest(name, mine) for name in names)))
    return with_condition(lines, ("dtype", "cases", "head dims", *names), document)


def _order(name: str) -> tuple[bool, bool, str]:
    return name not in ("out", "lse"), name not in ("out", "lse", "dq", "dk", "dv"), name


def _largest(name: str, cases: Iterable[Figures]) -> str:
    return f"{max((case['shares'].get(name, 0.0) for case in cases), default=0.0):.2f}"


def counted(document: Document) -> str:
    """What was counted of the program, and what it may be."""
    lines = [(key, f"≤ {case['target']:g}", f"{case['figure']:g}") for key, case in document["cases"].items()]
    return with_condition(lines, ("", "target", "found"), document)


def code(document: Document) -> str:
    """Bytes spilled by forward and backward of each pattern."""
    cases, lines = document["cases"], []
    columns = list(dict.fromkeys((key.split(", ")[0], key.rsplit(", ", 1)[1]) for key in cases))
    columns.sort(key=lambda each: (each[0] != "sm_90", int(each[1])))
    for entry in ENTRIES:
        found = [cases.get(f"{device}, {entry.name}, {dim}") for device, dim in columns]
        lines.append((entry.name, *(_spills(each) for each in found)))
    headers = ("pattern", *(f"{device}, head dim {dim}" for device, dim in columns))
    return with_condition(lines, headers, document)


def _spills(figures: Figures | None) -> str:
    if figures is None:
        return "not made"
    return ", ".join(f"{figures[way]['spill_stores']:,}" for way in ("forward", "backward"))
