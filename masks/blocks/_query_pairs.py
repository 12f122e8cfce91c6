"""Exact numbers of allowed pairs of runs of queries; repeating parts of a rule are counted once."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import Box, Pattern, Progression, numbered
from ._pair_search import exact_pairs

# n runs of queries


def pairs_of_queries(
    rule: Pattern, start: Int64[Tensor, " n"], stop: Int64[Tensor, " n"], num_tokens: int
) -> Int64[Tensor, " n"]:
    """Allowed pairs of the queries [start, stop) of each run with the keys [0, num_tokens), for the rule of one head.

    Where no pair leaves its period, whole periods are counted once.
    """
    period = rule.period() if rule.confined() else None
    rows = num_tokens if period is None else min(period, num_tokens)
    first, last = start // rows, (stop - 1).clamp(min=0) // rows
    parts = [
        (first, start - first * rows, torch.minimum(stop - first * rows, torch.full_like(stop, rows)), 1),
        (first + 1, torch.zeros_like(start), torch.full_like(start, rows), last - first - 1),
        (last, torch.zeros_like(start), stop - last * rows, last > first),
    ]
    index, begin, end, times = (
        torch.cat([torch.as_tensor(each).expand_as(start) for each in column]) for column in zip(*parts, strict=True)
    )
    run = torch.arange(len(start)).repeat(len(parts))
    held = ((end > begin) & (times > 0)).nonzero().squeeze(1)
    # Each period equals the first, cut at num_tokens.
    keys = (num_tokens - index * rows).clamp(max=rows)
    begin, count, keys = begin[held], (end - begin)[held], keys[held]
    kind, one_of_each = numbered(begin, count, keys)
    q_first, q_count, k_count = (each[one_of_each] for each in (begin, count, keys))
    none = torch.zeros_like(q_first)
    pairs = exact_pairs(rule, Box(none, Progression(q_first, 1, q_count), Progression(none, 1, k_count)))
    return torch.zeros_like(start).index_add_(0, run[held], times[held].long() * pairs[kind])
