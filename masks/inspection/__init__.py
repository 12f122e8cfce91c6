"""Inspecting patterns: `describe` counts what one allows, costs and reaches, `explain` says why a pair is allowed.

`plot` draws one. Counts beyond the plan come from `_squares`: a pattern over all tokens as a quadtree whose equal parts
are held once. `count_cells` counts the pairs of the cells of a grid, within a budget.
"""

from ._cells import Cells, count_cells
from ._describe import MOST_DESCRIBED, Description, describe, describe_plan
from ._explain import explain
from ._fitted_table import fitted_facts, fitted_table
from ._picture import round_places
from ._plot import plot
from ._show import MOST_CELLS, HeatMap, show

__all__ = [
    "MOST_CELLS",
    "MOST_DESCRIBED",
    "Cells",
    "Description",
    "HeatMap",
    "count_cells",
    "describe",
    "describe_plan",
    "explain",
    "fitted_facts",
    "fitted_table",
    "plot",
    "round_places",
    "show",
]

from ._show import LEAST_COLUMNS, LEAST_LINES
