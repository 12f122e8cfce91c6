"""Sizes that hypothesis draws: lengths at the edges, heads, packings, and how a sequence lies over ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..distributed import Sharding
from ..masks import Mixture, Pattern
from ..masks._check import require_int

_ORDERS: list[Literal["contiguous", "zigzag"]] = ["contiguous", "zigzag"]


def edges_of(pattern: Pattern | Mixture) -> tuple[int, ...]:
    """The numbers that a pattern is written with: segments, rates, strides. Around their multiples a rule changes."""
    return tuple(sorted({int(digits) for digits in re.findall(r"\d+", pattern.text)} - {0}))


def lengths(
    around: Pattern | Mixture | Iterable[int] = (), *, max_tokens: int = 48, blocks: Iterable[int] = ()
) -> st.SearchStrategy[int]:
    """Numbers of tokens from 1 on, biased to one less, as many and one more than multiples of an edge.

    around: edges, or a pattern, whose numbers they are. blocks: more of them, such as the side of blocks. They shrink
    towards 1.
    """
    require_int("max_tokens", max_tokens, minimum=1)
    own = edges_of(around) if isinstance(around, Pattern | Mixture) else tuple(around)
    edges = sorted({require_int("an edge", edge, minimum=1) for edge in (*own, *blocks)})
    special = {edge * times + step for edge in edges for times in range(1, 5) for step in (-1, 0, 1)}
    near = sorted(length for length in special if 1 <= length <= max_tokens)
    anything = st.integers(1, max_tokens)
    return st.one_of(anything, st.sampled_from(near)) if near else anything


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of one call: q (batch, num_heads, num_queries, head_dim), k and v (batch, num_kv_heads, num_keys, ...).

    Query i stands at position q_offset + i.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    q_offset: int = 0


@st.composite
def attention_sizes(
    draw: st.DrawFn,
    around: Pattern | Mixture | Iterable[int] = (),
    *,
    num_heads: int | None = None,
    max_heads: int = 4,
    max_batch: int = 2,
    max_tokens: int = 48,
    self_attention: bool = True,
) -> AttentionSizes:
    """Sizes with grouped heads: num_kv_heads divides num_heads. They shrink towards one of everything.

    around: as for `lengths`. num_heads: this many, not any number up to max_heads. self_attention=False: queries may
    be fewer or more than keys, and stand anywhere.
    """
    heads = draw(st.integers(1, max_heads)) if num_heads is None else require_int("num_heads", num_heads, minimum=1)
    groups = draw(st.sampled_from([number for number in range(1, heads + 1) if heads % number == 0]))
    keys = draw(lengths(around, max_tokens=max_tokens))
    queries, q_offset = keys, 0
    if not self_attention and draw(st.booleans()):
        queries, q_offset = draw(lengths(around, max_tokens=max_tokens)), draw(st.integers(0, max_tokens))
    batch, head_dim = draw(st.integers(1, max_batch)), draw(st.sampled_from([1, 2, 3, 8, 16]))
    return AttentionSizes(batch, heads, groups, queries, keys, head_dim, q_offset)


@st.composite
def document_lengths(draw: st.DrawFn, num_tokens: int, *, max_documents: int = 5) -> tuple[int, ...]:
    """Lengths of documents that fill `num_tokens`. They shrink towards one document."""
    require_int("num_tokens", num_tokens, minimum=1)
    most = min(max_documents, num_tokens)
    cuts = draw(st.sets(st.integers(1, num_tokens - 1), max_size=most - 1)) if most > 1 else set()
    borders = [0, *sorted(cuts), num_tokens]
    return tuple(after - before for before, after in pairwise(borders))


@st.composite
def document_ids(
    draw: st.DrawFn, num_tokens: int, *, batch: int = 1, max_documents: int = 5, padding: bool = True
) -> Tensor:
    """int64 (batch, num_tokens): the document of each position, as `masks.documents` takes it; -1 for padding."""
    require_int("batch", batch, minimum=1)
    rows = []
    for _ in range(batch):
        held = draw(document_lengths(num_tokens, max_documents=max_documents))
        row = torch.repeat_interleave(torch.arange(len(held)), torch.tensor(held))
        hidden = draw(st.integers(0, num_tokens)) if padding else 0
        row[num_tokens - hidden :] = -1
        rows.append(row)
    return torch.stack(rows)


@st.composite
def shardings(draw: st.DrawFn, num_tokens: int, *, max_ranks: int = 4, ragged: bool = True) -> Sharding:
    """How `num_tokens` lie over 1 to max_ranks ranks: in both orders, in shards of any length, empty ones too.

    They shrink towards one rank, and towards equal shards in order.
    """
    require_int("num_tokens", num_tokens, minimum=1)
    ranks, order = draw(st.integers(1, max_ranks)), draw(st.sampled_from(_ORDERS))
    if not ragged or draw(st.integers(0, 2)) < 2:
        return Sharding(num_tokens, ranks, order)
    borders = [
        0,
        *sorted(draw(st.lists(st.integers(0, num_tokens), min_size=ranks - 1, max_size=ranks - 1))),
        num_tokens,
    ]
    return Sharding(num_tokens, ranks, order, [b - a for a, b in pairwise(borders)])
