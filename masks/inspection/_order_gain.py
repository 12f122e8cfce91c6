"""Number of blocks that hold a matrix's pairs, compared with their number after sorting neighbours together."""

from __future__ import annotations

import torch

from ..core import Bound
from ..patterns import MaskTable, SparseTable

_SIDE = 128  # tokens of a block
_MOST_PAIRS = 1 << 24  # of a matrix; sorting more takes seconds


def order_gain(bound: Bound) -> float | None:
    """Return `Description.order_gain` of a bound pattern, whether or not its layouts have block lists."""
    matrices = {leaf for leaf in bound.pattern.leaves() if isinstance(leaf, SparseTable | MaskTable)}
    if len(matrices) != 1 or not bound.is_self_attention or bound.q_offset:
        return None
    (matrix,) = matrices
    tokens = bound.num_queries
    if matrix.rows.shape[:2] != (1, 1) or (isinstance(matrix, MaskTable) and matrix.rows.shape[2:] != (tokens, tokens)):
        return None
    try:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import reverse_cuthill_mckee
    except ImportError:
        return None
    query, key = matrix.pairs()
    if not 0 < len(query) <= _MOST_PAIRS:
        return None
    graph = coo_array((torch.ones(len(query)).numpy(), (query.numpy(), key.numpy())), shape=(tokens, tokens)).tocsr()
    order = torch.from_numpy(reverse_cuthill_mckee((graph + graph.T).tocsr()).copy()).long()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(tokens))
    return _num_blocks(query, key) / _num_blocks(place[query], place[key])


def _num_blocks(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the number of 128 x 128 blocks that contain a pair (query[i], key[i])."""
    blocks = int(torch.maximum(query, key).max()) // _SIDE + 1
    return len((query // _SIDE * blocks + key // _SIDE).unique())
