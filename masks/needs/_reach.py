"""Reach: which keys later queries can still see, and whether a rule is causal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..blocks import Rule, build_blocks
from ..core import And, Box, Or, Pattern, Progression, plans
from ..orders import Layout
from ..patterns import Causal
from ._row import RowSource

# R runs of keys

FOREVER = 1 << 30  # queries to come, where their number is not known
_TRIED = 2048  # positions over which a rule is searched whose form does not tell
_BLOCK = 64


def visible(
    sources: Sequence[RowSource],
    firsts: Int64[Tensor, " R"],
    lengths: Int64[Tensor, " R"],
    query: int,
    num_queries: int,
) -> Bool[Tensor, " R"]:
    """Whether any of the queries from `query` on may see a key of each run, by any of the rules; False is certain."""
    seen = torch.zeros(len(firsts), dtype=torch.bool)
    for source in sources:
        left = (~seen).nonzero().squeeze(1)
        if len(left) == 0:
            break
        each = torch.ones_like(left)
        queries = Progression(each * query, 1, each * num_queries)
        box = Box(each * source.head, queries, Progression(firsts[left], 1, lengths[left]))
        seen[left] = source.rule.count(box, num_heads=source.num_heads).high > 0
    return seen


@plans
def later_pair(source: RowSource) -> tuple[int, int] | None:
    """A query and a later key that it sees; None if there is none among the first 2048 positions."""
    if causal_by_form(source.rule):
        return None
    tokens = Layout(_TRIED).pieces(0)
    ahead = Rule(And.of(source.rule, ~Causal()), source.num_heads, (source.head,), tokens, tokens)
    blocks = build_blocks(ahead, q_block=_BLOCK, k_block=_BLOCK)
    if len(blocks.row) == 0:
        return None
    q = int(blocks.row[0]) * _BLOCK + torch.arange(_BLOCK)[:, None]
    k = int(blocks.column[0]) * _BLOCK + torch.arange(_BLOCK)
    query, key = ahead.allowed(torch.zeros_like(q), q, k).nonzero()[0].tolist()
    return int(q[query]), int(k[key])


def causal_by_form(rule: Pattern) -> bool:
    """Whether the rule is causal because it is an intersection with causal order, or a union of such."""
    if isinstance(rule, And):
        return any(causal_by_form(part) for part in rule.parts)
    if isinstance(rule, Or):
        return all(causal_by_form(part) for part in rule.parts)
    return isinstance(rule, Causal)
