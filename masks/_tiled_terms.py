"""Tiled lowering: a neighbourhood over a whole grid as one term, in tiles of a block's size."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import torch

from ._bound import Bound
from ._lower import shared_terms
from ._neighborhood import Neighborhood
from ._pattern import Pattern
from ._term import Term
from ._tiling import Tiling

_TILE_TOKENS = 128  # a tile is a block, where tiles of that size divide the grid


def tiled_terms(branch: Pattern, multiplicity: int, bound: Bound) -> list[Term] | None:
    """One term for all heads in tiled order; None unless the branch is a neighbourhood of all tokens of its grid.

    None as well where the best tiles are the lines that the natural order has already.
    """
    if not isinstance(branch, Neighborhood):
        return None
    everywhere = bound.num_queries == bound.num_keys == prod(branch.grid)
    if not everywhere or bound.q_offset or bound.k_offset:
        return None
    order = Tiling(branch.grid, best_tile(branch))
    if order.is_natural:
        return None
    return [replace(term, q=order, k=order) for term in shared_terms(branch, multiplicity, bound, 1)]


def best_tile(rule: Neighborhood) -> tuple[int, ...]:
    """The tile whose windows reach over the fewest tokens of other tiles.

    Its sides are powers of two, and it holds as many tokens as such tiles in this grid can, up to a block's.
    """
    sides = ([1 << power for power in range(min(length, _TILE_TOKENS).bit_length())] for length in rule.grid)
    tiles = [tile for tile in product(*sides) if prod(tile) <= _TILE_TOKENS]
    most = max(map(prod, tiles))
    return min((tile for tile in tiles if prod(tile) == most), key=lambda tile: _computed_pairs(rule, tile))


def _computed_pairs(rule: Neighborhood, tile: tuple[int, ...]) -> int:
    """About how many pairs are computed where a tile is a block."""
    *outer, inner = (_reached(side, *axis) for side, axis in zip(tile, rule.axes, strict=True))
    if rule.grid[-1] % tile[-1]:
        # The last tile of a row is smaller: the blocks after it lie in two tiles each, and reach over two more.
        inner += 2 * tile[-1] * rule.grid[-1]
    return prod(outer) * inner


def _reached(side: int, length: int, radius: int, rate: int) -> int:
    """Pairs along one axis of a query and a token in any tile that some window of the query's tile touches."""
    first = torch.arange(0, length, side)
    last = (first + side).clamp(max=length) - 1
    reach, window = radius * rate, (2 * radius + 1) * rate
    low = (first - reach).clamp(0, length - window) // side * side
    high = ((last + reach).clamp(window - 1, length - 1) // side * side + side).clamp(max=length)
    return int(((last - first + 1) * (high - low)).sum())
