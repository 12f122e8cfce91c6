"""Plain JSON from outside: whatever the text holds, it is read or it is a ValueError."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def read_json(text: str | bytes) -> Any:
    """The data of a JSON text, bytes in UTF-8, in which each name comes once and each number is finite.

    Raises ValueError for anything else, also where it nests deeper than Python reads, or has an integer of thousands of
    digits. How deep the data nest otherwise is for the caller to check, who walks through them.
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
    if number - number:  # of an infinity that is no number
        raise ValueError(f"a number must be finite; got {text:.80}")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"a number must be finite; got {text}")
