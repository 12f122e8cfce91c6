"""Masks of partial blocks, deduplicated; blocks that the rule shows to be alike are evaluated once."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..masks.blocks import Blocks, Rule, alike, evaluate

# n problems, E listed blocks, U distinct masks

_MASK_BYTES = 64 << 20  # most bytes of distinct masks that are kept; above, each call evaluates its masks


def distinct_masks(rule: Rule, blocks: Blocks) -> tuple[Int64[Tensor, " E"], Bool[Tensor, "U q_block k_block"] | None]:
    """(mask index of each block, distinct masks); mask 0 allows every pair. None for masks above _MASK_BYTES."""
    partial = (~blocks.full).nonzero().squeeze(1)
    distinct = [torch.ones(1, blocks.q_block, blocks.k_block, dtype=torch.bool)]
    limit = _MASK_BYTES // distinct[0].nbytes
    known: dict[int, int] = {}
    codes: list[int] = []
    look_of, first = alike(rule, blocks.places(partial), blocks.shape)
    looked_at = partial[first]
    for tiles in evaluate(rule, blocks.places(looked_at), blocks.shape):
        found = _fingerprints(tiles).tolist()
        for index, code in enumerate(found):
            if code not in known:
                known[code] = len(distinct)
                distinct.append(tiles[index : index + 1])
        codes += found
        if len(distinct) > limit:
            return torch.zeros(len(blocks.full), dtype=torch.int64), None
    ids = torch.zeros(len(blocks.full), dtype=torch.int64)
    ids[partial] = torch.tensor([known[code] for code in codes], dtype=torch.int64)[look_of]
    return ids, torch.cat(distinct)


def added(allowed: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Additive mask for the kernels: 0 where a pair is allowed, -inf elsewhere."""
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype))


def random_numbers(shape: tuple[int, ...]) -> Int64[Tensor, "..."]:
    """64-bit random numbers from a fixed seed; sums of them are fingerprints of sets."""
    bounds = torch.iinfo(torch.int64)
    return torch.randint(bounds.min, bounds.max, shape, generator=torch.Generator().manual_seed(0))


def _fingerprints(tiles: Bool[Tensor, "n q_block k_block"]) -> Int64[Tensor, " n"]:
    """64-bit fingerprint of each mask; unequal masks collide once in 2^64 pairs."""
    return torch.where(tiles, random_numbers(tiles.shape[1:]), 0).sum((1, 2))
