"""Token counts: how many tokens each rank receives from each other, for all ranks at once and without their plans."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from jaxtyping import Int64
from torch import Tensor

from flexdilated.masks.core._pattern import Expression

from ._chunk_pairs import sort_pairs
from ._chunks import Chunks
from ._dilated_counts import as_branches, dilated_tokens
from ._kv_needs import HeadRule, KVNeeds
from ._sharding import Sharding

# W ranks, n chunks


def token_counts(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
) -> Int64[Tensor, "W W"]:
    """Entry (i, j): how many tokens rank i receives from rank j in an exchange, summed over KV heads.

    The sums of the plans that `ExchangePlan.of` makes for these arguments; it raises the same errors.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_offset": head_offset}
    tokens, chunks = tokens_by_chunk(pattern, sharding, **sizes, num_heads_global=num_heads_global)
    return chunks.by_source(tokens)


def tokens_by_chunk(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
) -> tuple[Int64[Tensor, "W n"], Chunks]:
    """(how many tokens of each chunk each rank needs, the chunks); those that a rank has itself mean nothing."""
    needs = KVNeeds.of(pattern, sharding.num_tokens, num_heads, num_kv_heads, head_offset, num_heads_global)
    chunks = Chunks.of(sharding)
    groups = Counter(needs.groups)
    dilated = {group: as_branches([rule for rule, _ in group]) for group in groups}
    known = dilated_tokens([(each, groups[group]) for group, each in dilated.items() if each], chunks)
    tokens = torch.zeros(sharding.num_ranks, len(chunks), dtype=torch.int64) if known is None else known
    for group, times in groups.items():
        if known is None or dilated[group] is None:
            tokens += times * _of_group(group, needs, chunks)
    return tokens, chunks


def _of_group(group: tuple[HeadRule, ...], needs: KVNeeds, chunks: Chunks) -> Int64[Tensor, "W n"]:
    """For one KV head. Bounds on chunks decide most pairs; what they leave in doubt is asked by rank and chunk."""
    tokens = torch.zeros(chunks.num_ranks, len(chunks), dtype=torch.int64)
    doubts: dict[tuple[int, int], list[tuple[HeadRule, range]]] = defaultdict(list)
    every = torch.zeros_like(tokens, dtype=torch.bool)
    for rule, head in group:
        full, doubtful = sort_pairs(rule, head, needs.num_heads_global, chunks)
        every |= chunks.by_target(full)
        for target, source in doubtful.tolist():
            doubts[int(chunks.rank[target]), source].append(((rule, head), chunks.runs[target]))
    torch.where(every, chunks.length, tokens, out=tokens)
    for (rank, source), asked in doubts.items():
        if rank != int(chunks.rank[source]) and not every[rank, source]:
            tokens[rank, source] = sum(map(len, needs.of_any(asked, (chunks.runs[source],))))
    return tokens
