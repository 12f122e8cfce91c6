"""Orders of tokens: residue-major, tiled over a grid, placed over ranks."""

from ._filled import Held, Padded
from ._layout import Compact, Folded, Layout, Listed, Order, Permutation, Pieces, residue_rate
from ._placement import Part, Placement
from ._tiling import Tiled, Tiling
