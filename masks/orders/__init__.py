"""Orders of tokens: residue-major, tiled over a grid, or placed over devices."""

from ._layout import Compact, Folded, Layout, ListedOrder, Order, Permutation, Pieces, residue_rate
from ._placement import ActivePositions, Padded, Part, Placement
from ._tiling import Tiled, Tiling
