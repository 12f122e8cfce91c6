"""The dense reference: attention by its definition, with an N x M matrix. For tests, small inputs and ONNX files."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from .._torch_private import graph_constant
from ..masks import Bound
from ..masks.core import outside_torch_modes
from ._dropout import Dropout
from ._features import Features
from ._operands import HiddenSlots
from ._score_mod import ScoreMod

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


@graph_constant
def exports_to_onnx() -> bool:
    """Return True while torch.onnx.export traces a model; `attend` then consists of plain operations."""
    traces = torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    # The import of torch.onnx is slow, and an export has already imported it.
    return traces and "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def multiplicity(bound: Bound, device: torch.device, dropout: Dropout | None = None) -> Int64[Tensor, "B H N M"]:
    """Return, for each pair, the number of branches that allow it and, with dropout, in which dropout keeps it.

    Without dropout, B is 1 if the pattern has a single entry for the whole batch.
    """
    b, h, q, k = _pair_indices(bound, device)
    entries = bound.pattern.num_entries()
    shape = (entries if dropout is None else bound.batch, bound.num_heads, bound.num_queries, bound.num_keys)
    total = torch.zeros(shape, dtype=torch.int64, device=device)
    for place, branch in enumerate(bound.pattern.branches()):
        mask_mod = outside_torch_modes(branch.mask_mod)(num_heads=bound.num_heads_global, device=device)
        allowed = mask_mod(b[:entries], h, q, k)
        total += allowed if dropout is None else allowed & dropout.kept(place, b, h, q, k)
    return total


def _pair_indices(bound: Bound, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return batch entries (B, 1, 1, 1), global heads (H, 1, 1), positions of queries (1, N, 1) and keys (1, 1, M)."""
    b = torch.arange(bound.batch, device=device)[:, None, None, None]
    h = torch.arange(bound.num_heads, device=device)[:, None, None] + bound.head_offset
    q = torch.arange(bound.num_queries, device=device)[None, :, None] + bound.q_offset
    k = torch.arange(bound.num_keys, device=device)[None, None, :] + bound.k_offset
    return b, h, q, k


def modified_scores(scores: Float[Tensor, "B H N M"], score_mod: ScoreMod, bound: Bound) -> Float[Tensor, "B H N M"]:
    """Return the scores after score_mod, called for each score with its batch entry, global head and positions."""
    each = score_mod
    for place in (4, 3, 2, 1):  # the keys' dim is mapped innermost, the batch's outermost
        each = torch.vmap(each, in_dims=tuple(0 if index in (0, place) else None for index in range(5)))
    return each(scores, *(x.flatten() for x in _pair_indices(bound, scores.device))).to(scores.dtype)


def reference_attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    bound: Bound,
    features: Features,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Return (out, natural lse) of attention by its definition, computed densely in `dtype`.

    Each row has one softmax over its allowed keys; a pair counts once for each branch of the pattern that
    allows it. out has the dtype of q; lse has `dtype`. Both are differentiable any number of times. A row without keys
    has output 0, and its lse is the head's sink, or -inf without sinks. Queries without keys, and keys that no query
    sees, are zeroed first, so that a NaN in them has no effect.
    """
    bound = replace(bound, batch=q.shape[0])
    times = multiplicity(bound, q.device)
    hidden = HiddenSlots((times == 0).all(3), (times == 0).all(2))
    q, k, v = hidden.clear_queries(q, dim=2), hidden.clear_keys(k, dim=2), hidden.clear_keys(v, dim=2)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.to(dtype) @ keys.transpose(-1, -2)) * features.scale
    if features.score_mod is not None:
        scores = modified_scores(scores, features.score_mod, bound)
    scores = (scores + times.clamp(min=1).to(dtype).log()).masked_fill(times == 0, -torch.inf)
    if features.sinks is not None:
        column = features.sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores, values = torch.cat([scores, column], -1), pad(values, (0, 0, 0, 1))
    empty = (scores == -torch.inf).all(-1)
    # Rows without keys are kept out of logsumexp, whose gradient would be NaN; their weights, exp(-inf), are 0 anyway.
    lse = scores.masked_fill(empty[..., None], 0.0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    dropout = features.dropout
    if dropout is not None:
        shares = multiplicity(bound, q.device, dropout).to(dtype) / times.clamp(min=1) / (1 - dropout.p)
        weights = weights * pad(shares, (0, weights.shape[3] - shares.shape[3]))  # a sink has no value to drop
    out = hidden.clear_queries(weights @ values, dim=2)
    return out.to(q.dtype), lse.masked_fill(empty, -torch.inf)
