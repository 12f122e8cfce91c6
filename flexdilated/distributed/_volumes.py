"""Volumes: how many tokens' keys each rank receives and holds in an exchange, in a ring, and in an all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

# W ranks

_SHARDS_HELD = 2  # by a ring: the one that is computed with, and the one on its way


@dataclass(frozen=True)
class Volume:
    """Tokens of other ranks, counted once for each KV head: those a rank receives, and those it holds at one time."""

    received: Int64[Tensor, " W"]
    held: Int64[Tensor, " W"]


def exchange_volume(counts: Int64[Tensor, "W W"]) -> Volume:
    """Exactly what is needed, all of it held. counts[i, j]: tokens that rank i needs of rank j, over KV heads."""
    received = foreign(counts).sum(1)
    return Volume(received, received)


def ring_volume(counts: Int64[Tensor, "W W"], lengths: Int64[Tensor, " W"], *, num_kv_heads: int) -> Volume:
    """Whole shards of which something is needed, two of them held."""
    shards = torch.where(foreign(counts) > 0, num_kv_heads * lengths, 0)
    return Volume(shards.sum(1), shards.topk(min(_SHARDS_HELD, len(lengths)), dim=1).values.sum(1))


def all_gather_volume(lengths: Int64[Tensor, " W"], *, num_kv_heads: int) -> Volume:
    """All shards, all of them held."""
    received = num_kv_heads * (lengths.sum() - lengths)
    return Volume(received, received)


def foreign(counts: Int64[Tensor, "W W"]) -> Int64[Tensor, "W W"]:
    """The counts without what a rank has itself."""
    return counts.clone().fill_diagonal_(0)
