"""Orders of tokens: residue-major, tiled over a grid, or placed over devices."""

from ._layout import Compact, Folded, Layout, Listed, Order, Permutation, Pieces, residue_rate
from ._placement import Held, Padded, Part, Placement
from ._tiling import Tiled, Tiling
