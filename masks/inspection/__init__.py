"""Inspect patterns: `describe` counts pairs and predicts costs; `explain` says why a pair is allowed or not.

`plot` and `show` draw a pattern as an image or as text. `count_cells` counts the allowed pairs in each cell of a grid.
"""

from ._cells import Cells, count_cells
from ._describe import MOST_DESCRIBED, Description, describe, describe_plan
from ._explain import explain
from ._plot import plot
from ._receptive_field import ReceptiveField
from ._show import LEAST_COLUMNS, LEAST_LINES, MOST_CELLS, HeatMap, show

__all__ = [
    "LEAST_COLUMNS",
    "LEAST_LINES",
    "MOST_CELLS",
    "MOST_DESCRIBED",
    "Cells",
    "Description",
    "HeatMap",
    "ReceptiveField",
    "count_cells",
    "describe",
    "describe_plan",
    "explain",
    "plot",
    "show",
]
