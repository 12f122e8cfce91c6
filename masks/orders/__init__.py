"""Orders of tokens: residue-major, tiled over a grid, placed over ranks."""

from ._held import Held
from ._layout import Compact, Layout, Listed, Order, Permutation, Pieces, residue_rate
from ._padded import Padded
from ._placement import Part, Placement
from ._tiling import Tiled, Tiling
