"""Packings that hypothesis draws, and how a sequence lies over ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..distributed import Sharding
from ..masks.core._check import require_int

_ORDERS: list[Literal["contiguous", "zigzag"]] = ["contiguous", "zigzag"]


@st.composite
def document_lengths(draw: st.DrawFn, num_tokens: int, *, max_documents: int = 5) -> tuple[int, ...]:
    """Lengths of documents that fill `num_tokens`. They shrink towards one document."""
    require_int("num_tokens", num_tokens, minimum=1)
    most = min(require_int("max_documents", max_documents, minimum=1), num_tokens)
    cuts = draw(st.sets(st.integers(1, num_tokens - 1), max_size=most - 1)) if most > 1 else set()
    return tuple(after - before for before, after in pairwise([0, *sorted(cuts), num_tokens]))


@st.composite
def document_ids(
    draw: st.DrawFn, num_tokens: int, *, batch: int = 1, max_documents: int = 5, padding: bool = True
) -> Tensor:
    """int64 (batch, num_tokens): the document of each position, 0, 1 and so on; -1 for padding, at the end.

    `masks.documents` takes them. They shrink towards one document in every row.
    """
    require_int("batch", batch, minimum=1)
    rows = []
    for _ in range(batch):
        held = draw(document_lengths(num_tokens, max_documents=max_documents))
        row = torch.repeat_interleave(torch.arange(len(held)), torch.tensor(held))
        hidden = draw(st.integers(0, num_tokens)) if padding and draw(st.booleans()) else 0
        row[num_tokens - hidden :] = -1
        rows.append(row)
    return torch.stack(rows)


@st.composite
def shardings(
    draw: st.DrawFn, num_tokens: int, *, max_ranks: int = 4, num_ranks: int | None = None, ragged: bool = True
) -> Sharding:
    """How `num_tokens` lie over 1 to max_ranks ranks: in both orders, in shards of any length, empty ones too.

    num_ranks: over this many, not any number. ragged=False: shards as equal as can be. They shrink towards one rank,
    and towards equal shards in order.
    """
    require_int("num_tokens", num_tokens, minimum=1)
    ranks = draw(st.integers(1, max_ranks)) if num_ranks is None else require_int("num_ranks", num_ranks, minimum=1)
    order = draw(st.sampled_from(_ORDERS))
    if not ragged or not draw(st.booleans()):
        return Sharding(num_tokens, ranks, order)
    cuts = draw(st.lists(st.integers(0, num_tokens), min_size=ranks - 1, max_size=ranks - 1))
    return Sharding(
        num_tokens, ranks, order, [after - before for before, after in pairwise([0, *sorted(cuts), num_tokens])]
    )
