"""Pattern of a call: the module's pattern, composed with the call's mask and causal flag."""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks import Mixture, Pattern, causal
from ...nn import require_causal_mask, without_padding
from ._replaced_class import Given

# B batch, H heads, N queries, M keys

_INSTEAD = "give convert another rule as part of the pattern, `pattern & other`"


def call_rule(given: Given, mask: Tensor | None, shape: tuple[int, int, int], *, is_causal: bool) -> Pattern | Mixture:
    """The module's pattern, composed with a mask for `scaled_dot_product_attention`: True for pairs to keep.

    shape: (B, N, M). A mask of shape (B or 1, 1, 1, M) is padding. A mask of pairs must be torch's causal mask, of
    shape (N, M) with optional leading dims of 1. Raises ValueError for any other mask.
    """
    batch, num_queries, num_keys = shape
    pattern = given.pattern & causal() if is_causal else given.pattern
    if mask is None:
        return pattern
    hidden = ~mask if mask.dtype == torch.bool else mask
    if hidden.dim() == 4 and hidden.shape[1:3] == (1, 1):
        padding = hidden[:, 0, 0].expand(batch, -1)
        if padding.is_floating_point():  # many libraries use the least finite number as -inf
            padding = padding.masked_fill(padding == torch.finfo(padding.dtype).min, -torch.inf)
        return without_padding(pattern, padding, (batch, num_keys))
    if hidden.dim() > 2 and set(hidden.shape[:-2]) == {1}:
        hidden = hidden.flatten(0, -2)
    return with_causal_mask(pattern, hidden, (num_queries, num_keys))


def with_causal_mask(pattern: Pattern | Mixture, mask: object, shape: tuple[int, int]) -> Pattern | Mixture:
    """The pattern with causal order; ValueError unless mask is torch's causal mask (N, M), True for pairs to hide."""
    require_causal_mask(mask, shape, instead=_INSTEAD)
    return pattern & causal()


def check_lengths(given: Given, num_queries: int, num_keys: int) -> None:
    """Raise ValueError for a call of cross-attention, unless a function chose this module's pattern."""
    if num_queries != num_keys and not given.by_name:
        raise ValueError(
            f"{given.name} was called with {num_queries} queries and {num_keys} keys, and a pattern for a whole model "
            "is one of self-attention. Choose by name, such as convert(model, lambda name, module: None if name == "
            f"{given.name!r} else pattern): None leaves it as it was, and a pattern counts queries and keys from 0"
        )


def refuse_dropout(given: Given, dropout_p: float, setting: str) -> None:
    """Raise ValueError for attention dropout, with the attribute that disables it."""
    if dropout_p != 0:
        raise ValueError(
            f"{given.name} trains with attention dropout {dropout_p}, and attention weights are never formed: set "
            f"{setting} = 0.0 on each converted module; dropout of its output may stay"
        )
