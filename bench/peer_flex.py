"""Peer: compiled FlexAttention in natural token order, with create_block_mask and the rule as plain closures.

On CPU it has a forward only.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ._longnets import LongNet, same_branch
from ._problem import Attention


def union_mask_mod(spec: LongNet) -> Callable[..., Tensor]:
    """(b, h, q, k) -> bool: a pair that any branch allows."""
    branches, causal = spec.branches, spec.causal

    def mask_mod(b, h, q, k):
        (length, rate), *rest = branches
        allowed = same_branch(h, q, k, length=length, rate=rate)
        for length, rate in rest:
            allowed = allowed | same_branch(h, q, k, length=length, rate=rate)
        return allowed & (k <= q) if causal else allowed

    return mask_mod


def multiplicity_score_mod(spec: LongNet) -> Callable[..., Tensor]:
    """score + log m, where m branches allow the pair; for pairs that at least one allows."""
    branches = spec.branches

    def score_mod(score, b, h, q, k):
        count = torch.zeros_like(score)
        for length, rate in branches:
            count = count + same_branch(h, q, k, length=length, rate=rate)
        return score + count.log()

    return score_mod


def natural_block_mask(spec: LongNet, *, num_heads: int, num_tokens: int) -> BlockMask:
    """The union of the branches as PyTorch builds it, from N x N cells a head, blocks of 128."""
    return create_block_mask(union_mask_mod(spec), None, num_heads, num_tokens, num_tokens, device="cpu")


def natural_attention(spec: LongNet, block_mask: BlockMask, *, mixture: bool) -> Attention:
    """(q, k, v) -> out; with `mixture` a pair counts once for every branch, else once."""
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    score_mod = multiplicity_score_mod(spec) if mixture else None
    return partial(compiled, score_mod=score_mod, block_mask=block_mask)
