"""Tiled lowering: a neighbourhood over a whole grid as one term, in tiles of a block's size."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import torch

from ...core import Bound, Pattern
from ...orders import Tiling
from ...patterns import Neighborhood
from ._lower import shared_terms
from ._term import Term

_TILE_TOKENS = 128  # a tile is a block, where tiles of that size divide the grid


def tiled_terms(branch: Pattern, multiplicity: int, bound: Bound) -> dict[tuple[int, ...], list[Term]]:
    """For each tile worth weighing, one term for all heads: where the branch is a neighbourhood of its whole grid."""
    everywhere = bound.num_queries == bound.num_keys and bound.q_offset == bound.k_offset == 0
    if not isinstance(branch, Neighborhood) or not everywhere or bound.num_queries != prod(branch.grid):
        return {}
    orders = [Tiling(branch.grid, tile) for tile in best_tiles(branch)]
    (term,) = shared_terms(branch, multiplicity, bound, 1)
    return {order.tile: [replace(term, q=order, k=order)] for order in orders if not order.is_natural}


def best_tiles(rule: Neighborhood) -> list[tuple[int, ...]]:
    """The tile whose windows reach over the fewest tokens in tiles; and the next best, where that is no exact count.

    Sides are powers of two, and a tile holds as many tokens as such tiles in this grid can, up to a block's.
    Where sides do not divide the grid, blocks lie across tiles.
    """
    sides = ([1 << power for power in range(min(length, _TILE_TOKENS).bit_length())] for length in rule.grid)
    tiles = [tile for tile in product(*sides) if prod(tile) <= _TILE_TOKENS]
    most = max(map(prod, tiles))
    best = sorted((tile for tile in tiles if prod(tile) == most), key=lambda tile: _reached(rule, tile))
    divides = all(length % side == 0 for length, side in zip(rule.grid, best[0], strict=True))
    return best[:1] if divides else best[:2]


def _reached(rule: Neighborhood, tile: tuple[int, ...]) -> int:
    """Pairs of a query and a token of any tile that some window of the query's tile touches."""
    return prod(_reached_along(*axis, side) for side, axis in zip(tile, rule.axes, strict=True))


def _reached_along(length: int, radius: int, rate: int, side: int) -> int:
    first = torch.arange(0, length, side)
    last = (first + side).clamp(max=length) - 1
    reach, window = radius * rate, (2 * radius + 1) * rate
    low = (first - reach).clamp(0, length - window) // side * side
    high = ((last + reach).clamp(window - 1, length - 1) // side * side + side).clamp(max=length)
    return int(((last - first + 1) * (high - low)).sum())
