"""Patterns as JSON, for checkpoints and custom ops."""

import json
from typing import Any, NoReturn

from ..core import DEEPEST, KINDS, QUOTED, Expression, Mixture, Pattern, advises, require_expression, shortened


@advises()
def to_json(pattern: Expression) -> str:
    """Canonical JSON of a pattern or mixture; `from_json` gives an equal value back.

    Raises TypeError for a pattern with a custom function: code has no JSON.

    >>> masks.to_json(masks.causal())
    '{"kind":"causal"}'
    """
    text = require_expression(pattern).text
    if _NAMES_A_FUNCTION in text:
        raise TypeError(f"a custom function has no JSON: store what it is made from, and make it anew; got {pattern!r}")
    return text


@advises()
def from_json(text: str) -> Pattern | Mixture:
    """Read the pattern or mixture that `to_json` wrote. Raises ValueError for any other text, with the reason.

    >>> masks.from_json(masks.to_json(masks.causal()))
    causal()
    """
    pattern = read_text(text)
    if _NAMES_A_FUNCTION in pattern.text:
        raise ValueError(f"a custom function has no JSON: make it anew with masks.custom; got {pattern!r}")
    return pattern


def read_text(text: str) -> Pattern | Mixture:
    """Pattern of a JSON text of this process, in which digests name custom functions."""
    if not isinstance(text, str):
        raise TypeError(f"a pattern's JSON must be a string; got {type(text).__name__}")
    try:
        data = read_json(text)
    except ValueError as error:
        raise ValueError(f"a pattern must be JSON as to_json writes it; got {text[:80]!r}: {error}") from error
    try:
        return _read(data, depth=0)
    except RecursionError:
        raise ValueError(f"a pattern must nest at most {DEEPEST} levels; got {text[:80]!r}") from None


def kept_functions(text: str) -> object:
    """Reference that keeps the custom functions of this text alive while the text is in use; None without any."""
    return read_text(text) if _NAMES_A_FUNCTION in text else None


_NAMES_A_FUNCTION = '"kind":"custom"'


def _read(data: Any, *, depth: int) -> Pattern | Mixture:
    if depth > DEEPEST:
        raise ValueError(f"a pattern must nest at most {DEEPEST} levels")
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"a pattern is an object whose kind is one of {', '.join(sorted(KINDS))}; got {data!r:.80}")
    made = KINDS[kind]
    if kind == "custom":
        return made.from_data(data)
    if not {"kind", *made.stored} - made.optional <= set(data) <= {"kind", *made.stored}:
        raise ValueError(f"a pattern of kind {kind!r} has the fields {list(made.stored)}; got {sorted(data)!r:.200}")
    values = {name: _value(data[name], name, depth) for name in made.stored if name in data}
    try:
        return made.from_data(values)
    except (TypeError, ValueError) as error:
        says = shortened(str(error), QUOTED)
        raise ValueError(f"a pattern of kind {kind!r} has wrong values: {says}") from error


def _value(value: Any, field: str, depth: int) -> Any:
    if field == "parts":
        if not isinstance(value, list):
            raise ValueError(f"parts must be a list of patterns; got {value!r:.80}")
        return tuple(_read(part, depth=depth + 1) for part in value)
    if field in ("part", "spans") or (isinstance(value, dict) and "kind" in value):
        return _read(value, depth=depth + 1)
    return value


def read_json(text: str | bytes) -> Any:
    """Data of a JSON text (bytes are UTF-8) with unique names in each object and finite numbers.

    Raises ValueError for any other text, and for nesting or integers beyond the limits of Python's parser. The caller
    checks other limits on nesting.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"an object names {twice!r:.80} twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if number - number:  # nan if the number is infinite
        raise ValueError(f"a number must be finite; got {text:.80}")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"a number must be finite; got {text}")
