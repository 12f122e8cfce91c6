"""Is what is measured right? Useful pairs and block lists of an entry against its mask, pair by pair."""

import torch
from jaxtyping import Bool
from torch import Tensor

from flexdilated import masks
from flexdilated.masks import Layout, Mixture, Pattern

from ._catalogue import Entry

# N tokens
_BLOCK = 128


def order(pattern: Pattern | Mixture, num_tokens: int, num_heads: int) -> Layout | None:
    """The one order of all tokens that comes nearest to the plan; None for the natural one."""
    described = masks.describe(pattern, num_tokens, num_heads=num_heads)
    chosen = {branch.options[0].layout for branch in described.branches}
    layout = masks.layout(pattern, num_tokens)
    return None if chosen & {"natural", "windows"} or layout.rate == 1 else layout


def check(entry: Entry, num_tokens: int) -> None:
    """AssertionError unless both are exact at this size, a multiple of the block."""
    pattern = entry.pattern(num_tokens)
    layout = order(pattern, num_tokens, entry.num_heads)
    listed = (
        masks.block_mask(pattern, num_tokens, num_heads=entry.num_heads, block_size=_BLOCK, layout=layout)
        .to_dense()[0]
        .bool()
    )
    useful = 0
    for head in range(entry.num_heads):
        branches = [dense(branch, head, entry.num_heads, num_tokens) for branch in pattern.branches()]
        useful += sum(int(mask.sum()) for mask in branches)
        anywhere = torch.stack(branches).any(0)
        slots = torch.arange(num_tokens) if layout is None else layout.positions()
        ordered = anywhere[slots][:, slots]
        touched = ordered.unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK)).any(3).any(1)
        assert torch.equal(listed[head], touched), f"{entry.name}, head {head}: the block list is not that of its mask"
    counted = masks.describe(pattern, num_tokens, num_heads=entry.num_heads).useful_pairs
    assert counted == useful, f"{entry.name}: {useful} useful pairs; describe counts {counted}"


def dense(pattern: Pattern, head: int, num_heads: int, num_tokens: int) -> Bool[Tensor, "N N"]:
    """One head's mask, pair by pair."""
    allowed = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens).mask_mod()
    zero, position = torch.zeros((), dtype=torch.int64), torch.arange(num_tokens)
    rows = [allowed(zero, zero + head, some[:, None], position[None, :]) for some in position.split(512)]
    return torch.cat(rows)
