"""Custom ops of an indexer: choose single keys by their index scores, and compare these scores with attention.

The index score of a key for a query is the sum over index heads h of w_h * ReLU(q_h · k). No tensor of all pairs is
formed: queries are computed in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..engines import autograd_on, copies, functions_in, no_gradients, own_op, refusing_backward, sum_dtype
from ..masks.core import device_kind
from ._boxes import SelectionCall
from ._choose import choose, log_shares
from ._select_op import HeadPart, head_parts_of

# B batch, h index heads, H query heads, G key/value heads, N queries, n of them in a chunk, M keys, L keys that a query
# is compared with, d index head dim, D head dim

# Numbers in the largest tensor of a chunk: on CPU few enough for the processor's cache.
_ON_HOST, _ON_ACCELERATORS = 1 << 21, 1 << 25


class _Comparison(NamedTuple):
    """Queries of a chunk, and the keys with which they are compared.

    queries: range of indices into the queries of the call.
    keys: range of indices into the keys of the call, with which all these queries are compared; None for a table.
    candidates: mask of the keys that count for each query.
    at: with a table, indices of the L keys of each query; where `candidates` is False, it repeats a key of the query
        that counts, or is 0 if there is none. None without a table.
    """

    queries: slice
    keys: slice | None
    candidates: Bool[Tensor, "#B n L"]
    at: Int64[Tensor, "B n L"] | None

    def keys_of(self, k: Float[Tensor, "B M d"]) -> Float[Tensor, "B _ L d"]:
        """Return the keys with which each query is compared; dim 1 has size 1 if all queries share them.

        Keys of the range that count for no query are 0, as their NaN would reach gradients.
        """
        if self.at is None:
            return k[:, None, self.keys].masked_fill(~self.candidates.any(1)[:, None, :, None], 0.0)
        return k.flatten(0, 1).index_select(0, self._flat_indices(k)).unflatten(0, self.at.shape)

    def add_gradients(self, total: Float[Tensor, "B M d"], part: Float[Tensor, "B _ L d"]) -> None:
        """Add gradients of the keys that `keys_of` returns to `total`, the gradients of all keys, in place."""
        if self.at is None:
            total[:, self.keys] += part.squeeze(1)
        else:
            total.flatten(0, 1).index_add_(0, self._flat_indices(total), part.flatten(0, 2))

    def _flat_indices(self, k: Float[Tensor, "B M d"]) -> Int64[Tensor, " BnL"]:
        assert self.at is not None
        first = torch.arange(len(k), device=k.device)[:, None, None] * k.shape[1]
        return (self.at + first).flatten()


def index_scores(
    q: Float[Tensor, "B h n d"], k: Float[Tensor, "B _ L d"], w: Float[Tensor, "B n h"]
) -> Float[Tensor, "B n L"]:
    """Return sum_h w_h * ReLU(q_h · k) in float32 or wider; all queries share the keys if dim 1 of k is 1."""
    wide = sum_dtype(q)
    q, k, w = q.transpose(1, 2).to(wide), k.to(wide), w.to(wide)
    products = (q.flatten(1, 2) @ k[:, 0].mT).unflatten(1, q.shape[1:3]) if k.shape[1] == 1 else q @ k.mT
    return (w.unsqueeze(-2) @ products.relu()).squeeze(-2)


@own_op("flexdilated::index_keys")
def index_keys(q: Tensor, k: Tensor, w: Tensor, bindings: list[Tensor], constants: str, q_offset: int) -> Tensor:
    """Return a table (B, 1, N, most) of the visible keys with the highest index scores, descending, padded with -1.

    q (B, h, N, d), k (B, M, d), w (B, N, h): index queries and keys, and the weights of the index heads.
    bindings: run-time tensors of the pattern, sorted by name.
    constants, q_offset: `SelectionCall.arguments`.
    """
    call = SelectionCall.of(constants, q_offset)
    chosen = torch.full((len(q), 1, q.shape[2], call.most), -1, device=q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for some in _visible_keys(call, bindings, q, k, width=q.shape[1]):
            scores = index_scores(q[:, :, some.queries], some.keys_of(k), w[:, some.queries]).unsqueeze(1)
            ids, able = torch.arange(scores.shape[-1], device=q.device), some.candidates.unsqueeze(1)
            how = {"kind": "top_k", "amount": 0.0, "most": call.most}
            places, _ = choose(scores, able.expand(scores.shape), ids.expand(scores.shape), **how)
            assert some.keys is not None
            chosen[:, :, some.queries] = torch.where(places < 0, -1, places + some.keys.start)
    return chosen


@index_keys.register_fake
def _(q, k, w, bindings, *arguments):
    return q.new_empty((q.shape[0], 1, q.shape[2], SelectionCall.of(*arguments).most), dtype=torch.int64)


@own_op("flexdilated::index_loss")
def index_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    table: Tensor | None,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
) -> tuple[Tensor, Tensor]:
    """Return (sum over queries of KL(p ‖ softmax of the index scores), in nats; number of queries that have keys).

    p is the mean over heads of the attention weights; it and the softmax are over the keys in the table, or over all
    keys that the pattern allows. Only q, k and w have gradients.

    teacher_q (B, H, N, D), teacher_k (B, G, M, D): queries and keys of the attention.
    table: (B, 1, N, L), the keys of each query, padded with -1; None for all that the pattern allows.

    Other arguments are as in `index_keys`; the call's `scale` is that of the attention. Raises the ValueError of
    `_comparisons`.
    """
    call, teacher = SelectionCall.of(constants, q_offset), _with_key_heads_first(teacher_q, teacher_k)
    total, number = q.new_zeros((), dtype=sum_dtype(q)), torch.zeros((), dtype=torch.int64, device=q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for some in _comparisons(call, bindings, q, k, table, teacher):
            own = q[:, :, some.queries], some.keys_of(k), w[:, some.queries]
            total += _divergence(some, *own, _mean_weights(some, *teacher, call.scale))
            number += some.candidates.any(-1).expand(len(q), -1).sum()
    return total, number


@index_loss.register_fake
def _(q, *others):
    return q.new_empty((), dtype=sum_dtype(q)), q.new_empty((), dtype=torch.int64)


@own_op("flexdilated::index_loss_backward")
def index_loss_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    table: Tensor | None,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and w.

    grad: gradient of the sum that `index_loss` returns; other arguments are those of `index_loss`.
    """
    call, teacher = SelectionCall.of(constants, q_offset), _with_key_heads_first(teacher_q, teacher_k)
    dq, dk, dw = (torch.zeros_like(x, dtype=sum_dtype(x), memory_format=torch.contiguous_format) for x in (q, k, w))
    with torch.autocast(q.device.type, enabled=False):
        for some in _comparisons(call, bindings, q, k, table, teacher):
            shares, here = _mean_weights(some, *teacher, call.scale), some.queries
            own_q, keys, own_w = (x.detach().requires_grad_() for x in (q[:, :, here], some.keys_of(k), w[:, here]))
            with autograd_on():
                loss = _divergence(some, own_q, keys, own_w, shares)
            dq[:, :, here], of_keys, dw[:, here] = torch.autograd.grad(loss, (own_q, keys, own_w), grad.to(loss))
            some.add_gradients(dk, of_keys.to(dk.dtype))
    return dq.to(q.dtype), dk.to(k.dtype), dw.to(w.dtype)


@index_loss_backward.register_fake
def _(grad, q, k, w, *others):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)


def _remember(ctx, inputs, output) -> None:
    *tensors, bindings, constants, q_offset = inputs
    ctx.arguments = constants, q_offset
    ctx.save_for_backward(*tensors, *copies(bindings))
    ctx.kept = functions_in(constants)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    q, k, w, teacher_q, teacher_k, table, *bindings = ctx.saved_tensors
    without = None, None, None, *no_gradients(bindings, ctx.arguments)
    if grad is None:
        return None, None, None, *without
    tensors = q, k, w, teacher_q, teacher_k, table, bindings
    return *index_loss_backward(grad, *tensors, *ctx.arguments), *without


index_loss.register_autograd(_backward, setup_context=_remember)
index_loss_backward.register_autograd(refusing_backward("the loss of an indexer has no second derivative"))


def _divergence(
    some: _Comparison,
    q: Float[Tensor, "B h n d"],
    keys: Float[Tensor, "B _ L d"],
    w: Float[Tensor, "B n h"],
    shares: Float[Tensor, "B n L"],
) -> Float[Tensor, ""]:
    """Return the sum over a chunk of queries of KL(shares ‖ softmax of the index scores over the candidates), in nats.

    q, keys, w: queries, keys and head weights of the chunk.
    shares: mean attention weights of the chunk, from `_mean_weights`.
    """
    seen = some.candidates
    blind = ~seen.any(-1)  # queries without keys, whose NaN would reach gradients
    q, w = q.masked_fill(blind[:, None, :, None], 0.0), w.masked_fill(blind[..., None], 0.0)
    scores = index_scores(q, keys, w)
    logs = log_shares(scores, seen)
    # 0 * log 0 counts as 0.
    return torch.where((shares > 0) & seen, shares * (shares.clamp(min=_LEAST).log() - logs), 0.0).sum()


_LEAST = torch.finfo(torch.float32).tiny


def _with_key_heads_first(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"]
) -> tuple[Tensor, Float[Tensor, "G B M D"]]:
    """Return (q, k as a contiguous tensor (G, B, M, D)), so that no chunk copies all keys."""
    return q, k.transpose(0, 1).contiguous()


def _mean_weights(
    some: _Comparison, q: Float[Tensor, "B H N D"], k: Float[Tensor, "G B M D"], scale: float
) -> Float[Tensor, "B n L"]:
    """Return the mean over heads of a chunk's attention weights over its candidates; 0 for queries without any."""
    wide, heads = sum_dtype(q), q.shape[1] // len(k)
    total = torch.zeros((), dtype=wide, device=q.device)
    for group, of_group in enumerate(k):  # one at a time: the keys of a table are a copy for each query
        own_q = q[:, group * heads : (group + 1) * heads, some.queries].to(wide) * scale
        own_k = some.keys_of(of_group).to(wide)
        scores = own_q @ own_k.mT if own_k.shape[1] == 1 else (own_q.transpose(1, 2) @ own_k.mT).transpose(1, 2)
        total = total + scores.masked_fill(~some.candidates.unsqueeze(1), -torch.inf).softmax(-1).sum(1)
    return (total / q.shape[1]).masked_fill(~some.candidates.any(-1, keepdim=True), 0.0)


def _comparisons(
    call: SelectionCall,
    bindings: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    table: Tensor | None,
    teacher: tuple[Tensor, Tensor],
) -> Iterator[_Comparison]:
    """Yield chunks of queries with their keys in the loss: the keys in `table`, or all visible keys if it is None.

    teacher: queries and keys of the attention; only the sizes of the queries are read.

    A key that `table` repeats for a query counts once. Raises ValueError for a table on the host with numbers that are
    neither keys nor -1; on accelerators such numbers count as -1.
    """
    heads = max(q.shape[1], teacher[0].shape[1])
    if table is None:
        yield from _visible_keys(call, bindings, q, k, width=heads)
        return
    if device_kind(table.device).on_host and table.numel():
        least, most = map(int, table.aminmax())
        if least < -1 or most >= k.shape[1]:
            raise ValueError(f"chosen must have keys from 0 to {k.shape[1] - 1}, or -1 for none; got {least} to {most}")
    dims = max(q.shape[3], teacher[0].shape[3])
    for queries in _chunks(q, len(q) * table.shape[3] * max(heads, dims)):
        at = table[:, 0, queries].sort(-1).values
        repeated = torch.nn.functional.pad(at[..., 1:] == at[..., :-1], (1, 0))
        counts = (at >= 0) & (at < k.shape[1]) & ~repeated
        # An entry that does not count reads a key that does: other keys may hold NaN that no query sees.
        yield _Comparison(queries, None, counts, at.where(counts, at.where(counts, 0).amax(-1, keepdim=True)))


def _visible_keys(
    call: SelectionCall, bindings: Sequence[Tensor], q: Tensor, k: Tensor, width: int
) -> Iterator[_Comparison]:
    """Yield chunks of queries with the range from the first to the last key that any query of the chunk sees.

    A chunk whose queries see no key is left out.

    width: numbers that are in memory for each pair of a query and a key.
    """
    parts = head_parts_of(call, bindings, q[:, :1], k.unsqueeze(1))
    for queries in _chunks(q, len(q) * k.shape[1] * width):
        seen = _sees(parts, call.q_offset, queries, q, k)
        places = seen.any(0).any(0).nonzero()
        if len(places):
            keys = slice(int(places[0]), int(places[-1]) + 1)
            yield _Comparison(queries, keys, seen[..., keys], None)


def _chunks(q: Float[Tensor, "B h N d"], each: int) -> Iterator[slice]:
    """Yield consecutive slices of the N queries, short enough for memory if one query needs `each` numbers."""
    most, number = _ON_HOST if device_kind(q.device).on_host else _ON_ACCELERATORS, q.shape[2]
    step = max(1, most // max(1, each))
    yield from (slice(at, min(at + step, number)) for at in range(0, number, step))


def _sees(parts: Sequence[HeadPart], q_offset: int, queries: slice, q: Tensor, k: Tensor) -> Bool[Tensor, "#B n M"]:
    """Return a mask of the allowed pairs of some queries and all keys; dim 0 has size 1 if batch entries share a rule.

    parts: from `head_parts_of`.
    queries: indices of the queries in the call.
    """
    at = torch.arange(q_offset + queries.start, q_offset + queries.stop, device=q.device)[:, None]
    keys = torch.arange(k.shape[1], device=q.device)
    found = [part.rule.sees(at, keys).expand(len(at), len(keys)) for part in parts]
    if len(found) == 1:
        return found[0].unsqueeze(0)
    seen = torch.empty(len(q), len(at), len(keys), dtype=torch.bool, device=q.device)
    for part, own in zip(parts, found, strict=True):
        seen[part.entries] = own
    return seen
