"""A pattern as the page reads it: its own JSON, with how each part is written, and with run-time tensors as runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..masks.core._pattern import Pattern
from ..masks.core._spelling import shortened
from ..masks.patterns.run_time._documents import Documents
from ..masks.patterns.run_time._run_time import Table
from ..masks.patterns.run_time._spans import Spans
from ..masks.patterns.run_time._visible_keys import KeySet

_LONGEST_PHRASE = 160
_NO_JSON = (
    "a page holds the pattern's rule as JSON, and a custom function has none: write the rule with the patterns of "
    "masks, or list its blocks with masks.block_list"
)


def rule_data(written: Pattern, bound: Pattern) -> dict[str, Any]:
    """Plain data of a branch. `written` names its run-time tensors; in `bound`, otherwise alike, are their values.

    Raises ValueError for custom functions.
    """
    if isinstance(bound, Table):
        return {**_table_data(written, bound), "phrase": _phrase(written)}
    data: dict[str, Any] = {"kind": _kind(bound)} if hasattr(bound, "parts") else bound.to_data()
    if data["kind"] == "custom":
        raise ValueError(f"{_NO_JSON}; got {written!r}")
    if data["kind"] == "random_blocks":
        data["seed"] = str(data["seed"])  # JavaScript's numbers hold 53 bits
    for name in ("part", "spans"):
        if hasattr(bound, name):
            data[name] = rule_data(getattr(written, name), getattr(bound, name))
    if hasattr(bound, "parts"):
        pairs = zip(_parts(written), _parts(bound), strict=True)
        data["parts"] = [rule_data(one, other) for one, other in pairs]
    return {**data, "phrase": _phrase(written)}


def _parts(pattern: Any) -> Sequence[Pattern]:
    return pattern.parts


def _kind(pattern: Pattern) -> str:
    """The kind of what has parts, without the data of all of them."""
    return pattern.text.partition('"kind":"')[2].partition('"')[0]


def _phrase(pattern: Pattern) -> str:
    return shortened(pattern.phrase().text, _LONGEST_PHRASE)


def _table_data(written: Pattern, table: Table) -> dict[str, Any]:
    """A run-time tensor's values, as runs of positions: the gap before each, and its length."""
    if isinstance(table, Spans):
        word = "document" if isinstance(written, Documents) else "the real tokens, run"
        return {"kind": "spans", "word": word, **_runs(table.starts, table.stops)}
    assert isinstance(table, KeySet), "run-time tensors become spans or sets of keys"
    edges = torch.nn.functional.pad(table.only_row.int(), (1, 1)).diff()
    return {"kind": "visible_keys", **_runs((edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten())}


def _runs(starts: Tensor, stops: Tensor) -> dict[str, list[int]]:
    before = torch.nn.functional.pad(stops[:-1], (1, 0)) if len(stops) else stops
    return {"gaps": (starts - before).tolist(), "lengths": (stops - starts).tolist()}
