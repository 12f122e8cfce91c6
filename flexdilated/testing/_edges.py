"""Where a pattern's rule changes: the numbers around whose multiples lengths are tried."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Any

from ..masks import Mixture, Pattern

_NO_LENGTHS = ("seed", "head", "rows")


def edges_of(pattern: Pattern | Mixture) -> tuple[int, ...]:
    """Segments, rates, strides, widths of windows and so on, in ascending order.

    They are read off the pattern's data; of a function nothing is known but its period.
    """
    periods = {leaf.period() or 0 for leaf in pattern.leaves() if leaf.to_data()["kind"] == "custom"}
    return tuple(sorted((_edges(pattern.to_data()) | periods) - {0}))


def _edges(data: Mapping[str, Any]) -> set[int]:
    inner = set().union(*(_edges(part) for part in _parts(data)))
    own = {number for name, value in data.items() if name not in _NO_LENGTHS for number in _numbers(value)}
    kind, block = data.get("kind"), data.get("block", 1)
    if kind in ("local_window", "dilated_window"):
        own.add((data["left"] + data["right"]) * data.get("rate", 1) + 1)
    if kind == "neighborhood":
        own |= set(accumulate(reversed(data["grid"]), mul))
    if kind == "block_list":
        own.add(block * len(data["rows"]))
    return own | inner | {block * edge for edge in inner}


def _parts(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*data.get("parts", ()), *(data[name] for name in ("part", "spans") if name in data)]


def _numbers(value: object) -> list[int]:
    several = value if isinstance(value, list | tuple) else [value]
    return [number for number in several if isinstance(number, int) and not isinstance(number, bool)]
