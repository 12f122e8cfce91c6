"""Patterns as JSON: what a checkpoint stores and a custom op receives."""

import json
from collections.abc import Callable
from typing import Any

from ._algebra import And, Every, Not, Or
from ._causal import Causal
from ._dilated import Dilated
from ._local_window import LocalWindow
from ._pattern import Expression, Mixture, Pattern, require_expression
from ._per_head import HeadGroups, PerHead


def to_json(pattern: Expression) -> str:
    """Canonical JSON of a pattern or mixture; `from_json` gives an equal value back."""
    return require_expression(pattern).text


def from_json(text: str) -> Pattern | Mixture:
    """The pattern or mixture that `to_json` wrote. Raises ValueError for anything else, naming the fault."""
    if not isinstance(text, str):
        raise TypeError(f"a pattern's JSON must be a string; got {type(text).__name__}")
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"a pattern must be JSON as to_json writes it; got {text[:80]!r}: {error}") from error
    return _read(data, depth=0)


_MAX_DEPTH = 64


def _read(data: Any, *, depth: int) -> Pattern | Mixture:
    if depth > _MAX_DEPTH:
        raise ValueError(f"a pattern must nest at most {_MAX_DEPTH} deep")
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"a pattern is an object whose kind is one of {', '.join(_FIELDS)}; got {data!r:.80}")
    build, fields = _FIELDS[kind]
    if set(data) != {"kind", *fields}:
        raise ValueError(f"a pattern of kind {kind!r} has the fields {list(fields)}; got {sorted(data)}")
    values = [_value(data[field], field, depth) for field in fields]
    try:
        return build(*values)
    except TypeError as error:
        raise ValueError(f"a pattern of kind {kind!r} has wrong values: {error}") from error


def _value(value: Any, field: str, depth: int) -> Any:
    if field == "part":
        return _read(value, depth=depth + 1)
    if field == "parts":
        if not isinstance(value, list):
            raise ValueError(f"parts must be a list of patterns; got {value!r:.80}")
        return tuple(_read(part, depth=depth + 1) for part in value)
    return value


_FIELDS: dict[str, tuple[Callable[..., Pattern | Mixture], tuple[str, ...]]] = {
    "causal": (Causal, ()),
    "dilated": (Dilated, ("segment", "rate", "offset")),
    "local_window": (LocalWindow, ("left", "right")),
    "every": (Every, ()),
    "and": (And, ("parts",)),
    "or": (Or, ("parts",)),
    "not": (Not, ("part",)),
    "per_head": (PerHead, ("parts",)),
    "head_groups": (HeadGroups, ("parts",)),
    "mixture": (Mixture, ("parts",)),
}
