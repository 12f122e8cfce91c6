"""Peer: block-sparse attention in eager PyTorch, a few rows of blocks at a time.

The keys of a row's blocks are gathered side by side, and one call attends from the row's queries: flash
attention, or separate matmuls with a softmax in between.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ._problem import Attention

# B batch, H heads, N tokens, D head dim; R rows of L blocks each, b tokens a block; c rows at once


def block_rows(
    columns: Int64[Tensor, "R L"],
    *,
    block: int,
    allowed: Bool[Tensor, "R b Lb"] | None = None,
    rows_at_once: int = 16,
    order: Int64[Tensor, " R"] | None = None,
    fused: bool = True,
) -> Attention:
    """(q, k, v) -> out, each (B, H, N, D) with N = R * block.

    Row i attends to the key blocks columns[i], of them to the pairs in `allowed` (None: all). Rows are computed
    in `order` (None: ascending), `rows_at_once` in one call.
    """
    added = None if allowed is None else torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    order = torch.arange(len(columns)) if order is None else order
    kernel = scaled_dot_product_attention if fused else _separate

    def attention(
        q: Float[Tensor, "B H N D"], k: Float[Tensor, "B H N D"], v: Float[Tensor, "B H N D"]
    ) -> Float[Tensor, "B H N D"]:
        q, k, v = (x.unflatten(2, (-1, block)) for x in (q, k, v))
        parts = []
        for rows in order.split(rows_at_once):
            keys, values = (_pick(x, columns[rows]) for x in (k, v))
            mask = None if added is None else added[rows].repeat(q.shape[1], 1, 1)
            parts.append(
                kernel(q[:, :, rows].flatten(1, 2), keys, values, attn_mask=mask).unflatten(1, (-1, len(rows)))
            )
        return torch.cat(parts, dim=2)[:, :, order.argsort()].flatten(2, 3)

    return attention


def _pick(x: Float[Tensor, "B H R b D"], columns: Int64[Tensor, "c L"]) -> Float[Tensor, "B Hc Lb D"]:
    picked = x.index_select(2, columns.flatten()).unflatten(2, columns.shape)
    return picked.flatten(3, 4).flatten(1, 2)


def _separate(
    q: Float[Tensor, "B n b D"],
    k: Float[Tensor, "B n K D"],
    v: Float[Tensor, "B n K D"],
    *,
    attn_mask: Float[Tensor, "n b K"] | None,
) -> Float[Tensor, "B n b D"]:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v
