"""Volumes: how many tokens' keys the ranks get from one another in an exchange, in a ring, and in an all-gather.

Tokens are counted once for each KV head. tokens[i, j] are those that rank i gets from rank j.
"""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from ._chunks import Chunks

# W ranks, R groups of them, n chunks

_SHARDS_HELD = 2  # by a ring: the one that is computed with, and the one on its way


def ring_tokens(needed: Int64[Tensor, "W n"], chunks: Chunks, *, num_kv_heads: int) -> Int64[Tensor, "W W"]:
    """Whole chunks, of which something is needed by these numbers of tokens."""
    return chunks.by_source(torch.where(needed > 0, num_kv_heads * chunks.length, 0))


def all_gather_tokens(lengths: Int64[Tensor, " W"], *, num_kv_heads: int) -> Int64[Tensor, "W W"]:
    """All shards."""
    return (num_kv_heads * lengths).repeat(len(lengths), 1).fill_diagonal_(0)


def held_in_ring(tokens: Int64[Tensor, "W W"]) -> Int64[Tensor, " W"]:
    """The two largest that come of one rank each."""
    return tokens.topk(min(_SHARDS_HELD, len(tokens)), dim=1).values.sum(1)


def in_groups(matrix: Int64[Tensor, "W W"], most: int) -> tuple[int, Int64[Tensor, "R R"]]:
    """(ranks of a group, sums over pairs of groups) of at most so many groups of consecutive ranks."""
    each = -(-len(matrix) // most)
    if each == 1:
        return 1, matrix
    group = torch.arange(len(matrix)) // each
    rows = matrix.new_zeros(int(group[-1]) + 1, len(matrix)).index_add_(0, group, matrix)
    return each, matrix.new_zeros(len(rows), len(rows)).index_add_(1, group, rows)
