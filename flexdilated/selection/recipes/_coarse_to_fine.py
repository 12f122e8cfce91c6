"""Coarse to fine: attention to every block of keys, most by their mean, a few key by key."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..._attend import attend, autocast
from ..._validate import check_tensors
from ...engines import sum_dtype
from ...masks import EMPTY, FULL, PARTIAL, chunked, custom, every, selected_blocks
from ...masks import causal as causal_pattern
from ...masks.core import advises, require_bool, require_int
from .._choose import TopK
from .._selector import BlockSelector


class WindowsBefore:
    """`pattern` over (query position, window): window i is visible from position i * stride + reach.

    It has bounds for boxes: a box is full if its first query sees its last window, and empty if its last query does not
    see its first window. Modules keep an instance of this class, because a function that captures numbers cannot be
    pickled, and because torch.compile can read an existing pattern but not build one from a function.
    """

    def __init__(self, stride: int, reach: int) -> None:
        def seen(b, h, q, k):
            return q >= k * stride + reach

        def classify(head, q_first, q_last, k_first, k_last):
            full, some = q_first >= k_last * stride + reach, q_last >= k_first * stride + reach
            return torch.where(full, FULL, torch.where(some, PARTIAL, EMPTY))

        self.pattern = custom(seen, classify=classify)
        self._made_of = (stride, reach)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


@advises()
class CoarseToFineAttention(nn.Module):
    """Attention to single keys of `top` blocks, and to all other blocks by their means; it has no parameters.

    The softmax of a query, with scores s, has these terms:

    * each key of the `top` blocks with the highest score q · mean(K): exp(s), with its value. With `causal` these
      blocks are before the query's own block, whose keys up to the query are terms, too;
    * each other whole block (with `causal`, each before the query's own): block * exp(score of its mean key), with its
      mean value, as if all its keys and values were equal to their means.

    A last block of fewer than `block` keys is never pooled: each of its keys is a term.

    The result equals dense attention if keys are constant within blocks, or if `top` covers all blocks. The second sum
    is computed over all blocks, and the terms of the `top` blocks are subtracted. This is numerically stable: by
    Jensen's inequality a block's sum over keys is at least its pooled term, so no small difference remains.

    block: tokens of a block. top: blocks that a query reads key by key. causal: hide later keys.
    Gradients are exact for the chosen blocks, and pass through the means; the choice has no gradient. The cost of a
    query is that of M / block + (top + 1) * block keys, and of M / block scores for the choice.

    Raises TypeError or ValueError for other values.
    Source: the rule is this library's; MRA, arXiv 2207.10284, refines pooled attention in a similar way, but pools
    queries as well.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> attention = fd.selection.recipes.CoarseToFineAttention(block=32, top=2)
    >>> attention(q, k, v).shape
    torch.Size([1, 4, 256, 64])
    """

    def __init__(self, *, block: int = 64, top: int = 8, causal: bool = True) -> None:
        super().__init__()
        self.block, self.top = require_int("block", block, minimum=1), require_int("top", top, minimum=1)
        self.causal = require_bool("causal", causal)
        within, always = (causal_pattern(), chunked(block)) if causal else (every(), None)
        self.selector = BlockSelector(block=block, choose=TopK(top), within=within, always=always)
        fine = selected_blocks("fine", block=(1, block), most=top + 1)
        self._fine = fine if always is None else (fine | always) & within
        self._past = WindowsBefore(block, block)

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M D"],
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        q_offset: int = 0,
    ) -> Float[Tensor, "B H N D"]:
        """Query i has position q_offset + i, key j position j; other arguments are as in `attend`.

        Raises ValueError or TypeError, before any work, for inputs that do not fit together.
        """
        q, k, v = autocast(q, k, v)
        check_tensors(q, k, v, enable_gqa=enable_gqa)
        require_int("q_offset", q_offset, minimum=0)
        options = {"scale": scale, "enable_gqa": enable_gqa, "q_offset": q_offset, "return_lse": True}
        whole, rest = divmod(k.shape[2], self.block)
        blocks = [x[:, :, : whole * self.block].unflatten(2, (whole, self.block)) for x in (k, v)]
        keys, values = (x.mean(3, dtype=sum_dtype(x)).to(x.dtype) for x in blocks)
        with torch.no_grad():
            chosen = self.selector(q, k[:, :, : whole * self.block], scale=scale, q_offset=q_offset).blocks
        last = chosen.new_full((*chosen.shape[:3], 1), whole if rest else -1)
        fine = attend(q, k, v, self._fine, bindings={"fine": torch.cat([chosen, last], -1)}, **options)
        pooled = attend(q, keys, values, self._past.pattern if self.causal else every(), **options)
        by_key = selected_blocks("pooled", block=(1, 1), most=self.top)
        twice = attend(q, keys, values, by_key, bindings={"pooled": chosen}, **options)
        shift = log(self.block)
        return _joined(fine, (pooled[0], pooled[1] + shift), (twice[0], twice[1] + shift)).to(q.dtype)

    def extra_repr(self) -> str:
        return f"block={self.block}, top={self.top}, causal={self.causal}"


def _joined(
    fine: tuple[Tensor, Tensor], pooled: tuple[Tensor, Tensor], twice: tuple[Tensor, Tensor]
) -> Float[Tensor, "B H N D"]:
    """Output of one softmax over `fine` and `pooled` less `twice`, each (output, lse)."""
    outs, lses = zip(fine, pooled, twice, strict=True)
    # A row without keys has lse -inf in all three parts and keeps output 0.
    top = torch.maximum(lses[0].detach(), lses[1].detach()).clamp(min=torch.finfo(lses[0].dtype).min)
    one, other, less = ((lse - top).exp().unsqueeze(-1) for lse in lses)
    total = one + other - less
    out = one * outs[0] + other * outs[1] - less * outs[2]
    return out / total.masked_fill(total == 0, 1.0)
