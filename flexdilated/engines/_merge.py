"""Merge of attention over parts of the keys by log-sum-exp (lse); attention sinks, which are extra logits per head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from ..masks.core import Expression

# B batch, H heads, N queries, D head dim


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over keys and over partial results of x: x's dtype, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


OutAndLse = tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows"]]  # (out, natural lse) over some of the keys


def merge(parts: Sequence[OutAndLse], scores: Sequence[Float[Tensor, "*#rows"]] = ()) -> OutAndLse:
    """Return (out, natural lse) of one softmax over the keys of all parts and one more key for each of `scores`.

    parts: (out, natural lse) of attention over some of the keys, for the same rows.
    scores: logits, broadcast to the rows, of keys with value 0; -inf adds no key.

    A key that is in several parts counts once for each. out is summed in float32 or wider and has the dtype of the
    first part. A row without keys has output 0, lse -inf and gradient 0. Without scores, a single part is returned
    unchanged.

    Source: LongNet, arXiv 2307.02486, eq. 10.
    """
    lses = [lse for _, lse in parts]
    lses += [score.to(lses[0].dtype) for score in scores]
    if len(lses) == 1:
        return parts[0]
    top = lses[0].detach()
    for lse in lses[1:]:
        top = torch.maximum(top, lse.detach())
    top = torch.where(top == -torch.inf, 0.0, top)  # -inf - -inf would be NaN, also in gradients
    weights = [torch.exp(lse - top) for lse in lses]
    total = sum_of(weights)
    empty = total == 0
    some = torch.where(empty, 1.0, total)
    shares = ((weight / some)[..., None] for weight in weights)
    out = sum_of(out.to(sum_dtype(out)) * share for (out, _), share in zip(parts, shares, strict=False))
    if scores:  # the scores' gradient must not read a NaN in the gradient of a row without keys
        seen = lses[0] > -torch.inf
        for lse in lses[1 : len(parts)]:
            seen = seen | (lse > -torch.inf)
        out = torch.where(seen[..., None], out, 0.0)
    return out.to(parts[0][0].dtype), torch.where(empty, -torch.inf, top + torch.log(some))


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors, which it takes from an iterator one at a time.

    Unlike `sum`, it does not start from 0, which would be an operation in a graph.
    """
    terms = iter(terms)
    total = next(terms)
    for each in terms:
        total = total + each
    return total


def shares_of(lses: Float[Tensor, "..."], dim: int) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Return (softmax of `lses` along `dim`, logsumexp of `lses` over `dim`).

    lses: log-sum-exp of a row's scores over each part of the keys, with the parts along `dim`.

    The softmax is each part's share in the row's output. A row without keys has shares 0 and lse -inf, with gradient 0.
    """
    # The clamp gives rows without keys weights 0 and a sum of 0, without inf - inf.
    top = lses.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(lses.dtype).min)
    weights = (lses - top).exp()
    total = weights.sum(dim, keepdim=True)
    empty = total == 0
    # No total.clamp(min=1), although the sum is at least 1 where there is a key: rows with a single part are at that
    # bound, where the gradient of clamp depends on the version of torch.
    some = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, some.log() + top)
    return weights / some, lse.squeeze(dim)


def with_sinks(
    out: Float[Tensor, "B H N D"], lse: Float[Tensor, "B H N"], sinks: Float[Tensor, " H"]
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """Return (out, natural lse) after adding each head's sink, the logit of a key of value 0, to its rows' softmax."""
    return _with_key(out, lse, sinks.to(lse.dtype)[:, None])


def with_zero_keys(
    out: Float[Tensor, "B H N D"], lse: Float[Tensor, "B H N"], count: Int64[Tensor, "H N"]
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """Return (out, natural lse) after adding count[h, n] keys of score 0 and value 0 to the softmax of row n of head h.

    If a pattern attends to padding, each padding token is such a key.
    """
    return _with_key(out, lse, count.to(lse.dtype).log())


def _with_key(out: Tensor, lse: Tensor, score: Float[Tensor, "#B H #N"]) -> tuple[Tensor, Tensor]:
    """Return (out, lse) after adding to each row one key of this score and of value 0; a score of -inf adds none.

    Unlike `merge`, it multiplies in the dtype of out, so that the backward keeps no wider copy of out.
    """
    none = score == -torch.inf
    finite, score = lse.masked_fill(none, 0.0), score.masked_fill(none, 0.0)
    kept = torch.sigmoid(finite - score).masked_fill(none, 1.0)
    return out * kept.unsqueeze(-1).to(out.dtype), torch.where(none, lse, torch.logaddexp(finite, score))


def with_padding_keys(
    out: Float[Tensor, "B H N D"],
    lse: Float[Tensor, "B H N"],
    pattern: Expression,
    positions: Int64[Tensor, " N"],
    *,
    head_offset: int,
    num_heads: int,
    num_tokens: int,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """Return (out, natural lse) after adding the zero keys of the pattern's padding to each row's softmax.

    A zero key has score 0 and value 0.

    positions: position of each of the N queries in a sequence of num_tokens tokens.
    num_heads: number of query heads on all devices; out has some of them, from head_offset on.
    """
    heads = torch.arange(out.shape[1], device=out.device)[:, None] + head_offset
    return with_zero_keys(out, lse, pattern.zero_keys(heads, positions, num_heads=num_heads, num_tokens=num_tokens))


def without_keys(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M E"], sinks: Tensor | None
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Return (out, natural lse) of queries without any keys, or of no queries: output 0, lse the head's sink or -inf.

    The results are functions of q, k and v, with gradient 0. With sinks, the lse passes its gradient on to them.

    sinks: one logit per head (H,), or None.
    """
    everywhere = torch.ones((), dtype=torch.bool, device=q.device)
    zero = sum(x.masked_fill(everywhere, 0.0).sum() for x in (q, k, v, *(() if sinks is None else (sinks,))))
    out = q.new_zeros(*q.shape[:3], v.shape[3]) + zero
    lse = out.sum(-1).to(sum_dtype(q)).masked_fill(everywhere, -torch.inf)
    return out, lse if sinks is None else with_sinks(out.detach(), lse, sinks)[1]


def add_sinks(
    out: Float[Tensor, "B H N D"], lse: Float[Tensor, "B H N"], sinks: Float[Tensor, " H"]
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """Return (out, natural lse) after adding each head's sink, the logit of a key of value 0, to its rows' softmax.

    Unlike `with_sinks`, it modifies out in place, so autograd must not record.
    """
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # A row without keys keeps output 0; lse - joined may be -inf - (-inf).
    kept = (lse - joined).exp().masked_fill(lse == -torch.inf, 0.0)
    return out.mul_(kept[..., None]), joined


@dataclass(frozen=True)
class WholeRows:
    """Attention results of rows over all their keys, and the incoming gradients of these results.

    lse: natural log-sum-exp.
    grad_lse: None if the lse has no gradient.
    """

    out: Float[Tensor, "B H N D"]
    lse: Float[Tensor, "B H N"]
    grad_out: Float[Tensor, "B H N D"]
    grad_lse: Float[Tensor, "B H N"] | None = None

    def delta(self) -> Float[Tensor, "B H N"]:
        """Return delta = grad_out · out - grad_lse for each row, with grad_lse 0 if it is None.

        The gradient of a score is its softmax weight * (grad_out · value - delta).
        """
        delta = _dot(self.grad_out, self.out, self.lse.dtype)
        return delta if self.grad_lse is None else delta - self.grad_lse

    def with_lse_channel(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Float[Tensor, "B H N E"]]:
        """Return ((q, k, v), grad_out, out) for backward kernels that compute delta = sum(grad_out * out) themselves.

        If the lse has a gradient, delta has to be sum(grad_out * out) - grad_lse. All tensors then get one more
        channel: 0 in q, k and v, 1 in grad_out and -grad_lse in out. Otherwise all are returned unchanged.
        """
        if self.grad_lse is None:
            return (q, k, v), self.grad_out, self.out
        out = torch.cat([self.out, -self.grad_lse.unsqueeze(-1).to(self.out.dtype)], dim=-1)
        return (pad(q, (0, 1)), pad(k, (0, 1)), pad(v, (0, 1))), pad(self.grad_out, (0, 1), value=1.0), out

    def gradients_of(self, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of (part, part_lse), the out and lse of these rows over only some of their keys.

        The part's weight in a row is exp(part_lse - lse); d out / d part = weight, d out / d part_lse = weight * (part
        - out), and d lse / d part_lse = weight.
        """
        absent = part_lse == -torch.inf
        weight = torch.where(absent, 0.0, (part_lse - torch.where(absent, 0.0, self.lse)).exp())
        of_lse = weight * (_dot(self.grad_out, part, self.lse.dtype) - self.delta())
        return (weight[..., None] * self.grad_out).to(part.dtype), of_lse.to(part_lse.dtype)


def _dot(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(dtype) * y).sum(-1)


def sinks_gradient(sinks: Float[Tensor, " H"], whole: WholeRows) -> Float[Tensor, " H"]:
    """Return the gradient of each head's sink, a logit in the softmax of these rows, summed over batch and queries.

    A sink has weight exp(sink - lse) and value 0; like any score, its gradient is this weight times (grad_out · value -
    grad_out · out + grad_lse).
    """
    # A row without keys has output 0, so a NaN in its gradient must not count.
    delta = replace(whole, grad_out=whole.grad_out.masked_fill(whole.out == 0, 0.0)).delta()
    weight = (sinks.to(delta.dtype)[:, None] - whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf)).exp()
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
