"""API for patterns in other packages: base classes, pair counts of boxes, and registration.

docs/howto/own_patterns.md has an example, and the entry point by which `masks.parse` and `masks.from_json` find the
patterns of a package.
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
