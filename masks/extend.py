"""Names for a pattern in a package of your own: its base classes, boxes and counts of their pairs, and its registry.

docs/howto/own_patterns.md writes one, and says how the package makes it known to `masks.parse` and `masks.from_json`.
"""

from .core import (
    Bounds,
    Box,
    Extent,
    MaskMod,
    OnePart,
    Pair,
    Pattern,
    Progression,
    Ranges,
    Reason,
    among,
    at_least,
    both_bounds,
    clip,
    constructor,
    count_between,
    count_multiples,
    count_residue,
    count_runs,
    count_within,
    parameters,
    pattern_kind,
)
from .patterns import RunTime, Table, of_tensor

__all__ = [
    "Bounds",
    "Box",
    "Extent",
    "MaskMod",
    "OnePart",
    "Pair",
    "Pattern",
    "Progression",
    "Ranges",
    "Reason",
    "RunTime",
    "Table",
    "among",
    "at_least",
    "both_bounds",
    "clip",
    "constructor",
    "count_between",
    "count_multiples",
    "count_residue",
    "count_runs",
    "count_within",
    "of_tensor",
    "parameters",
    "pattern_kind",
]
