"""How far rounding to a dtype may take an attention from its definition, number by number.

Each score is a sum of D rounded products, and a weight is exp(score - lse): it is off by a factor of about
1 + eps (1 + reach + |lse|), where reach is the largest sum |q| |k| of its row, scaled: what rounded products can add
up to. Carried through the formulas of output, lse and gradients to first order, that gives each number a limit of its
own. Where plain attention in the same dtype is farther off, its own error is the limit. Both are widened by a margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ._problem import Problem

MARGIN = 4.0
_VANISHED = 1e-250  # its products with gradients are still numbers of float64


@dataclass(frozen=True, eq=False)
class Expected:
    """A float64 tensor, how far a result may be from it, and how far plain attention of the dtype is (or None)."""

    name: str
    value: Tensor
    budget: Tensor
    plain_error: Tensor | None


def expected(problem: Problem, *, gradients: bool, through_lse: bool, margin: float = MARGIN) -> dict[str, Expected]:
    """out and lse, and with `gradients` those of q, k and v: of `cotangents`, through the lse where that is asked."""
    wide = problem.wide(requires_grad=gradients)
    out, lse = wide.attention()
    found = {"out": out.detach(), "lse": lse.detach()}
    plain = _plain(problem, gradients=gradients and not through_lse)
    where = {"gradients": gradients, "through_lse": through_lse}
    limits = _first_order(wide, out.detach(), lse.detach(), torch.finfo(problem.q.dtype), **where)
    if gradients:
        outputs, sent = (out, lse), cotangents(out, lse, through_lse=through_lse)
        found |= dict(
            zip(("dq", "dk", "dv"), torch.autograd.grad(outputs, (wide.q, wide.k, wide.v), sent), strict=True)
        )
    # What is kept in the dtype is a whole number of its smallest steps; where nothing takes part it is exactly 0.
    step = torch.finfo(problem.q.dtype).eps * torch.finfo(problem.q.dtype).smallest_normal
    limits = {name: limit + step * (limit > 0) for name, limit in limits.items()}
    return {name: _limited(name, value, limits[name], plain, margin) for name, value in found.items()}


def cotangents(out: Tensor, lse: Tensor, *, through_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Fixed gradients to send back, in float64 on the CPU's generator; none through the lse of a row without keys."""
    generator = torch.Generator("cpu").manual_seed(1)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse))
    grad_out, grad_lse = grad_out.to(out.device), grad_lse.to(lse.device) * through_lse
    return grad_out, grad_lse.masked_fill(lse.detach() == -torch.inf, 0.0)


def _limited(name: str, value: Tensor, limit: Tensor, plain: dict[str, Tensor], margin: float) -> Expected:
    error = None
    if name in plain:
        error = (plain[name].double() - value).abs().amax(-1, keepdim=True).nan_to_num(0.0)
        limit = torch.maximum(limit, error)
    return Expected(name, value, margin * limit, error)


def _first_order(
    wide: Problem, out: Tensor, lse: Tensor, dtype: torch.finfo, *, gradients: bool, through_lse: bool
) -> dict[str, Tensor]:
    """The limits of the numbers that are computed in a dtype. Weights below its normal numbers may vanish."""
    with torch.no_grad():
        times = wide.times()
        q, k, v = wide.q.abs(), wide.for_query_heads(wide.k).abs(), wide.for_query_heads(wide.v).abs()
        scores = wide.scores()
        sizes = torch.maximum((q @ k.mT) * abs(wide.scale), scores.abs())
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        loose = 1.0 + sizes.masked_fill(times == 0, 0.0).amax(-1) + finite.abs()
        # A score that is hidden may be of any size: only those that take part are looked at.
        weights = times * (scores.masked_fill(times == 0, -torch.inf) - finite[..., None]).exp()
        errors = dtype.eps * loose[..., None] * weights + max(dtype.smallest_normal, _VANISHED) * (times > 0).double()
        limits = {"out": errors @ v, "lse": dtype.eps * loose}
        if gradients:
            grad_out, grad_lse = (x.abs() for x in cotangents(out, lse, through_lse=through_lse))
            inner = grad_out @ v.mT + (grad_out * (weights @ v)).sum(-1, keepdim=True) + grad_lse[..., None]
            pulls = errors * inner * abs(wide.scale)
            limits["dq"] = pulls @ k
            limits["dk"] = _summed(pulls.mT @ q, wide.k.shape[1])
            limits["dv"] = _summed(errors.mT @ grad_out, wide.k.shape[1])
    return limits


def _summed(x: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, M, D) to (B, G, M, D): a key/value head gets what all its query heads send."""
    return x.unflatten(1, (num_kv_heads, -1)).sum(2)


def _plain(problem: Problem, *, gradients: bool) -> dict[str, Tensor]:
    """What torch's own dense attention makes of it in the dtype of q; nothing where it cannot say what is meant."""
    if problem.score_mod is not None or problem.sinks is not None:
        return {}
    leaves = [x.detach().clone().requires_grad_(gradients) for x in (problem.q, problem.k, problem.v)]
    q, k, v = leaves[0], *(problem.for_query_heads(x) for x in leaves[1:])
    times = problem.times()
    empty = (times == 0).all(-1, keepdim=True)
    bias = times.double().log().masked_fill(empty, 0.0).to(q.dtype)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=problem.scale).masked_fill(empty, 0.0)
    found = {"out": out.detach()}
    if gradients:
        sent, _ = cotangents(out, out.detach()[..., 0].double(), through_lse=False)
        grads = torch.autograd.grad(out, leaves, sent.to(out.dtype))
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found
