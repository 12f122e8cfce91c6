"""Canonical JSON: the one text of a value, so that equal texts mean equal patterns."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._pattern import Pattern


def canonical(value: Any) -> str:
    """JSON without spaces and with sorted keys, of plain data; written here, as a compiled graph may build patterns."""
    if isinstance(value, dict):
        return "{" + ",".join([f'"{key}":{canonical(value[key])}' for key in sorted(value)]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([canonical(each) for each in value]) + "]"
    if isinstance(value, str):
        return f'"{value}"'  # names, of letters and digits
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(index(value))  # a size that a graph has left open becomes a constant of it


def written_parts(kind: str, parts: tuple[Pattern, ...]) -> str:
    """The canonical JSON of a kind with parts, from their texts."""
    return f'{{"kind":"{kind}","parts":[{",".join([part.text for part in parts])}]}}'
