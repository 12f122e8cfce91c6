"""Dense formulas: what sparse attention is held to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from flexdilated.masks import Mixture, Pattern

# B batch, H heads, N queries, M keys


def one_by_one(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of one score and its four indices, over scores (B, H, N, M) and the indices of each dim."""
    for place in (4, 3, 2, 1):
        score_mod = torch.vmap(score_mod, in_dims=(0, *(0 if dim == place else None for dim in (1, 2, 3, 4))))
    return score_mod


def counts(
    pattern: Pattern | Mixture, num_queries: int, num_keys: int | None = None, *, num_heads: int = 1, **offsets: int
) -> Tensor:
    """(H, N, M): how often each pair is allowed, by the pattern's own function."""
    num_keys = num_keys or num_queries
    bound = pattern.bind(num_heads=num_heads, num_queries=num_queries, num_keys=num_keys, **offsets)
    h, q, k = torch.meshgrid(*map(torch.arange, (num_heads, num_queries, num_keys)), indexing="ij")
    mods = [replace(bound, pattern=branch).mask_mod() for branch in bound.pattern.branches()]
    return torch.stack([mod(torch.tensor(0), h, q, k).expand(h.shape).long() for mod in mods]).sum(0)


@contextmanager
def dense_attention(times_of: Callable[[int, int], Tensor | None]) -> Iterator[list[int]]:
    """Lets `scaled_dot_product_attention` weigh pairs as often as `times_of` says, by its formula; counts its calls.

    times_of: gets the numbers of queries and keys of a call, N and M, and returns dense counts (H, N, M), or None for a
        call that stays as it is.
    """
    calls = [0]
    own = F.scaled_dot_product_attention

    def weighed(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        assert dropout_p == 0
        times = times_of(query.shape[-2], key.shape[-2])
        if times is None:
            return own(query, key, value, attn_mask, dropout_p, is_causal, **options)
        calls[0] += 1
        scores = query @ key.mT * (options.get("scale") or query.shape[-1] ** -0.5)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        scores = scores + (times.tril() if is_causal else times).log()
        empty = (scores == -torch.inf).all(-1, keepdim=True)  # rows without keys give 0
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value

    with patch.object(F, "scaled_dot_product_attention", weighed):
        yield calls
