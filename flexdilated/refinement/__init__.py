"""Patterns that change during training: attention mass of blocks, its moving average, and refinement of block lists."""

from ._block_mass import block_mass, pooled_scores
from ._refine import ImportanceTracker, Refinement, refine
