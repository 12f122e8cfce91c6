"""Work: the pairs that each rank computes, counted exactly and without looking at them one by one."""

from __future__ import annotations

from collections import Counter

import torch
from jaxtyping import Int64
from torch import Tensor

from ..masks.blocks._query_pairs import pairs_of_queries
from ..masks.core._pattern import Expression
from ._sharding import Sharding

# W ranks


def work_of_ranks(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
) -> Int64[Tensor, " W"]:
    """(query, key, head) pairs of each rank's queries, counted once for each branch that allows them.

    Over the batch entries that the pattern's tensors tell apart. Raises ValueError where the pattern does not bind.
    """
    tokens = sharding.num_tokens
    heads = {"num_heads": num_heads, "head_offset": head_offset, "num_heads_global": num_heads_global}
    bound = pattern.bind(num_queries=tokens, num_keys=tokens, **heads)
    ranges = [(rank, run) for rank in range(sharding.num_ranks) for run in sharding.ranges(rank)]
    rank = torch.tensor([rank for rank, _ in ranges])
    start, stop = (torch.tensor(ends) for ends in zip(*((run.start, run.stop) for _, run in ranges), strict=True))
    rules = Counter(
        branch.for_head(head, bound.num_heads_global)
        for entry in range(bound.batch)
        for branch in bound.entry(entry).pattern.branches()
        for head in range(head_offset, head_offset + num_heads)
    )
    work = torch.zeros(sharding.num_ranks, dtype=torch.int64)
    for rule, times in rules.items():
        work.index_add_(0, rank, times * pairs_of_queries(rule, start, stop, tokens))
    return work
