"""Patterns that follow training: what blocks get, its moving average, the exchange of blocks."""

from ._block_mass import block_mass, pooled_scores
from ._importance_tracker import ImportanceTracker
from ._refine import Refinement, refine
