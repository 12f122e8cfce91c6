"""Tokens that each rank needs from each other rank, and pairs that it computes, counted for all ranks at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks.blocks import pairs_of_queries
from ...masks.core import Expression, Pattern, Ranges, common_period, require_expression, require_int
from ...masks.needs import KeyQuery, keys_of_any, moved, rules_of_heads
from ...masks.patterns import missing, run_time_leaves
from ..group import Sharding
from ._chunks import Chunks
from ._dilated import as_branches, dilated_tokens

# W ranks, n chunks


def tokens_by_chunk(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
) -> tuple[Int64[Tensor, "W n"], Chunks]:
    """(tokens of each chunk that each rank needs, the chunks); counts of a rank's own chunks are undefined."""
    needs = KVNeeds.of(pattern, sharding.num_tokens, num_heads, num_kv_heads, head_offset, num_heads_global)
    chunks = Chunks.of(sharding)
    groups = Counter(needs.groups)
    dilated = {group: as_branches([rule for rule, _ in group]) for group in groups}
    tokens = dilated_tokens([(each, groups[group]) for group, each in dilated.items() if each], chunks)
    for group, times in groups.items():
        if dilated[group] is None:
            tokens += times * _of_group(group, needs, sharding, chunks)
    return tokens, chunks


def _of_group(group: tuple[HeadRule, ...], needs: KVNeeds, sharding: Sharding, chunks: Chunks) -> Int64[Tensor, "W n"]:
    """Number of tokens of each chunk that each rank needs in one KV head with this group of rules."""
    tokens = torch.zeros(sharding.num_ranks, len(chunks), dtype=torch.int64)
    for rank in range(sharding.num_ranks):
        queries = [(rule, run) for rule in group for run in sharding.ranges(rank)]
        if queries:
            tokens[rank] = chunks.holding(needs.of_any(queries, (range(sharding.num_tokens),)))
    return tokens


HeadRule = tuple[Pattern, int]  # a rule for one head, and the index of a head that follows it


@dataclass(frozen=True, eq=False)
class KVNeeds:
    """Keys that queries need in each KV head of this device, by the rules of the query heads in its group."""

    num_heads_global: int
    groups: tuple[tuple[HeadRule, ...], ...]  # the distinct rules of each KV head's query heads
    _known: dict[tuple[KeyQuery, ...], Ranges] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pattern: Expression,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_offset: int,
        num_heads_global: int | None,
    ) -> KVNeeds:
        """Raises ValueError for inconsistent sizes, sizes that the pattern refuses, and unbound run-time tensors."""
        for leaf in run_time_leaves(require_expression(pattern)):
            raise ValueError(missing(leaf.name))
        require_int("num_heads", num_heads, minimum=1)
        require_int("num_kv_heads", num_kv_heads, minimum=1)
        require_int("head_offset", head_offset, minimum=0)
        total = head_offset + num_heads if num_heads_global is None else num_heads_global
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads; got {num_heads=} and {num_kv_heads=}")
        if head_offset + num_heads > total:
            raise ValueError(
                f"heads {head_offset} to {head_offset + num_heads - 1} must lie within num_heads_global; "
                f"got num_heads_global={total}"
            )
        pattern.check_heads(total)
        pattern.check_tokens(range(num_tokens), range(num_tokens))
        size = num_heads // num_kv_heads
        firsts = range(head_offset, head_offset + num_heads, size)
        # Groups with equal rules must compare equal: each rule is paired with the first head of all that follows it.
        follower = rules_of_heads(pattern, range(head_offset, head_offset + num_heads), total)
        rules = (rules_of_heads(pattern, range(at, at + size), total) for at in firsts)
        groups = tuple(tuple((rule, follower[rule]) for rule in each) for each in rules)
        return cls(total, groups)

    def by_head(self, queries: Ranges, keys: Ranges) -> tuple[Ranges, ...]:
        """For each KV head, the positions among `keys` that some of `queries` need."""
        if not queries or not keys:
            return ((),) * len(self.groups)
        return tuple(self.of_any([(rule, run) for rule in rules for run in queries], keys) for rules in self.groups)

    def of_any(self, runs: Sequence[tuple[HeadRule, range]], keys: Ranges) -> Ranges:
        """Positions among `keys` that some of these queries need; each run of queries has its own rule."""
        # If all rules have a common period, so have the needs: shift by a multiple of it, so that results are reused.
        period = common_period(tuple(rule for (rule, _), _ in runs))
        least = min(keys[0].start, *(queries.start for _, queries in runs))
        shift = 0 if period is None else least // period * period
        questions = tuple(
            KeyQuery((rule,), moved(queries, -shift), moved(run, -shift), head, self.num_heads_global)
            for (rule, head), queries in runs
            for run in keys
        )
        if questions not in self._known:
            self._known[questions] = keys_of_any(questions)
        return tuple(moved(each, shift) for each in self._known[questions])


def work_of_ranks(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
) -> Int64[Tensor, " W"]:
    """Number of (query, key, head) pairs of each rank's queries, counted once for each branch that allows them.

    If run-time tensors give batch entries different rules, all entries are counted. Raises ValueError if the pattern
    does not bind.
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
