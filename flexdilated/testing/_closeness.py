"""assert_attention_close: compare results with dense attention in float64, within the rounding errors of their dtype.

This file has first the comparison and its report, then the dense attention, then the error budget of each number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .._validate import (
    Place,
    check_score_mod,
    check_sinks,
    check_sizes,
    check_tensors,
    check_zero_keys,
    resolve_scale,
    run_time_tensors,
)
from ..engines import Features, ScoreMod, modified_scores, multiplicity, reference_attention, with_zero_keys
from ..masks import Bound, Mixture, Pattern
from ..masks.core import Extent, advises, require_bool, require_expression, require_finite, shortened, span
from ..masks.patterns import names

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

MARGIN = 4.0
_VANISHED = 1e-250  # its products with gradients do not underflow in float64
_EXP_ERROR = 2.0**-14  # of exp in torch's CPU kernels for half precision: 5.4e-5 as measured, rounded up
_RUNS, _BRANCHES, _LONGEST = 8, 6, 200  # at most listed in a report: runs of keys, branches, characters of a branch


@advises()
def assert_attention_close(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Mixture,
    *,
    lse: Tensor | None = None,
    gradients: bool = False,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    margin: float = MARGIN,
) -> None:
    """Raise AssertionError unless `out` (B, H, N, D), and `lse` (B, H, N) if given, equal dense attention in float64.

    Each number has an error budget, `margin` times the larger of two errors: the first-order rounding error in the
    dtype of q, and the largest error of torch's `scaled_dot_product_attention` in the number's row in this dtype. The
    second does not count for lse, for gradients if `lse` is given, or with score_mod or sinks. In bfloat16 and float16
    sums must be in float32, while scores, weights and results may be rounded. A row without keys must have output
    exactly 0 and, without sinks, lse -inf.

    gradients: also compare the gradients of q, k and v, which must require them, that follow by autograd from fixed
        pseudo-random gradients of `out`, and of `lse` if given, which must then require gradients, too; the graph is
        retained.
    margin: factor on the error budgets.

    The other arguments are those of `attend`, with numbers as scale and offsets; k and v are (B, G, M, D), where G
    divides H. Memory for all N x M pairs is needed, so use small inputs. The error for wrong numbers shows the first
    wrong row, and the keys that branches of the pattern allow in it; for a gradient of k or v, the queries that see its
    key. Arguments that do not fit together raise TypeError or ValueError.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> testing.assert_attention_close(fd.attend(q, k, v, masks.causal()), q, k, v, masks.causal())
    """
    options: dict[str, Any] = {"scale": scale, "score_mod": score_mod, "sinks": sinks, "bindings": bindings}
    options |= {"q_offset": q_offset, "k_offset": k_offset, "head_offset": head_offset}
    dense = DenseAttention.of(q, k, v, pattern, **options, num_heads_global=num_heads_global)
    check_result("out", out, q.shape, q.device)
    if lse is not None:
        check_result("lse", lse, q.shape[:3], q.device)
    if require_finite("margin", margin) <= 0:
        raise ValueError(f"margin must be above 0; got {margin=}")
    if require_bool("gradients", gradients) and not all(x.requires_grad for x in (q, k, v)):
        raise ValueError("gradients=True needs q, k and v that require gradients; got some that do not")
    require_close(dense, out, lse, gradients_of(dense, out, lse) if gradients else {}, margin=margin)


def require_close(
    dense: DenseAttention,
    out: Tensor,
    lse: Tensor | None,
    grads: Mapping[str, Tensor],
    *,
    through_lse: bool | None = None,
    rows: Tensor | None = None,
    margin: float = MARGIN,
) -> None:
    """Raise AssertionError unless out (B, H, N, D), lse (B, H, N) and grads equal dense attention within error budgets.

    lse: None: not compared.
    grads: "dq", "dk" and "dv", by a backward from `cotangents`; an empty dict: not compared.
    through_lse: True if this backward starts from the cotangents of out and lse, False if from that of out alone; None:
        True if lse is given.
    rows: (B, H, N), True for the rows of out and lse to compare; None: all.
    margin: factor on the budgets.
    """
    through_lse = lse is not None if through_lse is None else through_lse
    truth = expected(dense, gradients=bool(grads), through_lse=through_lse, margin=margin)
    for name, found in {"out": out, "lse": lse, **grads}.items():
        if found is None:
            continue
        value, budget = truth[name].value, truth[name].budget
        near = (found.detach().double() - value).abs() <= budget  # never of NaN
        missed = torch.where(value.isinf(), found != value, ~near)
        wrong = missed if name == "lse" else missed.any(-1)
        if rows is not None and name not in grads:
            wrong = wrong & rows
        if wrong.any():
            raise AssertionError(_failure_text(dense, name, found, truth[name], missed, wrong))


def gradients_of(dense: DenseAttention, out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    """Return "dq", "dk" and "dv" by name, by autograd from the gradients that `cotangents` gives for out and lse.

    An unused input has gradient 0. lse is left out if it is None or requires no gradient. Raises AssertionError if out
    requires no gradient.
    """
    leaves = (dense.q, dense.k, dense.v)
    if not out.requires_grad:
        raise AssertionError("out does not depend on q, k and v by autograd: it has no gradient")
    shown = out.detach()[..., 0].double() if lse is None else lse
    grad_out, grad_lse = cotangents(out, shown, through_lse=lse is not None)
    outputs, sent = [out], [grad_out.to(out.dtype)]
    if lse is not None and lse.requires_grad:
        outputs, sent = [out, lse], [*sent, grad_lse.to(lse.dtype)]
    grads = torch.autograd.grad(outputs, leaves, sent, retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for name, x, grad in zip(("dq", "dk", "dv"), leaves, grads, strict=True)
    }


def check_result(name: str, x: Any, shape: torch.Size, device: torch.device) -> Tensor:
    """Return x if it is a floating-point tensor of this shape on this device.

    Raises TypeError if x is no tensor, else AssertionError. name: name of x in the error.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.shape != shape:
        raise AssertionError(f"{name} must have shape {tuple(shape)}; got {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise AssertionError(f"{name} must have a floating-point dtype; got {x.dtype}")
    if x.device != device:
        raise AssertionError(f"{name} must be on the device of q, {device}; got {x.device}")
    return x


def _failure_text(
    dense: DenseAttention, name: str, found: Tensor, truth: Expected, missed: Tensor, wrong: Tensor
) -> str:
    """Return a text on the first wrong row: found and expected number, budget, and the keys that branches allow.

    A row of dk or dv is a key: the text then names the queries that see this key.

    missed: True for each wrong number.
    wrong: True for each row with a wrong number, (B, heads, rows).
    """
    b, h, row = wrong.nonzero()[0].tolist()
    place = (b, h, row) if name == "lse" else (b, h, row, int(missed[b, h, row].nonzero()[0]))
    element = f", element {place[-1]}" if len(place) == 4 else ""
    what = f"key/value head {h}, key" if name in ("dk", "dv") else f"head {h}, query"
    dtype, given = (str(x.dtype).removeprefix("torch.") for x in (dense.q, found))
    other = "" if given == dtype or name == "lse" else f" (in {given}, where q is {dtype})"
    error = 0.0 if truth.plain_error is None else float(truth.plain_error[(*place[:3], 0)])
    is_budget = error > 0 and error * truth.margin >= truth.budget[place]
    plain = f" (plain attention is off by up to {error:.2g} there)" if is_budget else ""
    lines = [
        f"{name} is wrong in {int(wrong.sum())} of {wrong.numel()} rows; the first is batch {b}, {what} {row}{element}",
        f"  found     {number_text(found[place])}{other}",
        f"  expected  {number_text(truth.value[place])}",
        f"  off by    {error_text((found[place].double() - truth.value[place]).abs())}, where rounding to {dtype} may "
        f"account for {error_text(truth.budget[place])}{plain}",
    ]
    if name in ("dk", "dv"):
        group = dense.q.shape[1] // dense.k.shape[1]
        seen_by = (dense.times()[b, h * group : (h + 1) * group, :, row] > 0).any(0)
        return "\n".join([*lines, f"  seen by   {_runs_text(seen_by.nonzero().flatten().tolist())} (queries)"])
    branches = dense.bound.pattern.branches()
    for index, branch in enumerate(branches[:_BRANCHES]):
        allowed = multiplicity(replace(dense.bound, pattern=branch), dense.q.device)
        keys = _runs_text(allowed.expand(dense.q.shape[0], -1, -1, -1)[b, h, row].nonzero().flatten().tolist())
        label = "keys" if len(branches) == 1 else f"branch {index}"
        lines.append(f"  {label:<9} {keys}: {shortened(repr(branch), _LONGEST)}")
    if len(branches) > _BRANCHES:
        lines.append(f"            and {len(branches) - _BRANCHES} branches more")
    return "\n".join(lines)


def _runs_text(positions: Sequence[int]) -> str:
    """Return ascending positions as a text of runs, such as "0 to 3, 7", at most _RUNS of them; "none" if empty."""
    if not positions:
        return "none"
    starts = [0, *(index + 1 for index, (a, b) in enumerate(pairwise(positions)) if b != a + 1), len(positions)]
    runs = [span(positions[start], positions[stop - 1] + 1) for start, stop in pairwise(starts)]
    return ", ".join(runs[:_RUNS]) + (f" and {len(runs) - _RUNS} runs more" if len(runs) > _RUNS else "")


def number_text(x: Tensor | float) -> str:
    """Return a number as text, with up to five significant digits."""
    return f"{x.detach().item() if isinstance(x, Tensor) else x:.5g}"


def error_text(x: Tensor) -> str:
    """Return an error as text, with up to two significant digits."""
    return f"{x.detach().item():.2g}"


@dataclass(frozen=True, eq=False)
class DenseAttention:
    """Arguments of one attention call, q (B, H, N, D), k and v (B, G, M, D), and methods that compute it densely.

    bound: the pattern bound to run-time tensors, sizes and offsets; it has no zero keys of padding.
    pattern: the pattern of the call, which may have zero keys of padding.
    scale: factor of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bound: Bound
    pattern: Pattern | Mixture
    scale: float
    score_mod: ScoreMod | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern | Mixture,
        *,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Tensor | None = None,
        bindings: Mapping[str, Tensor] | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
        head_offset: int = 0,
        num_heads_global: int | None = None,
    ) -> DenseAttention:
        """Return an instance for these arguments of `attend`; raises TypeError or ValueError if they do not fit."""
        require_expression(pattern)
        check_tensors(q, k, v, enable_gqa=True)
        check_sinks(sinks, q)
        check_score_mod(score_mod)
        place = Place(q_offset, k_offset, head_offset, num_heads_global)
        heads = check_sizes(pattern, q, place)
        tensors = dict(zip(names(pattern), run_time_tensors(pattern, bindings, batch=q.shape[0]), strict=True))
        extent = Extent(q_offset + q.shape[2], k_offset + k.shape[2])
        rule = pattern.resolve(tensors, extent) if tensors else pattern
        bound = rule.bind(
            num_heads=q.shape[1],
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            batch=q.shape[0],
            q_offset=q_offset,
            k_offset=k_offset,
            head_offset=head_offset,
            num_heads_global=heads,
        )
        check_zero_keys(pattern, score_mod, q.shape[2], k.shape[2], place)
        return cls(q, k, v, bound, pattern, resolve_scale(scale, q.shape[-1]), score_mod, sinks)

    def wide(self, *, requires_grad: bool = False) -> DenseAttention:
        """Return a copy with q, k, v and sinks in float64, detached from the graph; requires_grad: of q, k and v."""
        q, k, v = (x.detach().double().requires_grad_(requires_grad) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, sinks=None if self.sinks is None else self.sinks.detach().double())

    def attention(self) -> tuple[Tensor, Tensor]:
        """Return (out (B, H, N, D), natural lse (B, H, N)), computed densely; both are differentiable."""
        features = Features(self.scale, self.score_mod, self.sinks)
        out, lse = reference_attention(self.q, self.k, self.v, self.bound, features)
        return with_zero_keys(out, lse, self.zero_keys()) if self.pattern.pads else (out, lse)

    def zero_keys(self) -> Tensor:
        """Return the number of padding keys, of score 0 and value 0, that each query sees, (H, N)."""
        bound, device = self.bound, self.q.device
        heads = torch.arange(bound.num_heads, device=device)[:, None] + bound.head_offset
        queries = torch.arange(bound.num_queries, device=device) + bound.q_offset
        return self.pattern.zero_keys(heads, queries, num_heads=bound.num_heads_global, num_tokens=bound.num_keys)

    def times(self) -> Tensor:
        """Return the number of branches that allow each pair, (B, H, N, M)."""
        return multiplicity(self.bound, self.q.device).expand(*self.q.shape[:3], self.k.shape[2])

    def for_query_heads(self, x: Tensor) -> Tensor:
        """Return k or v (B, G, M, D) as (B, H, M, D): head h is key/value head h // (H / G)."""
        return x.repeat_interleave(self.q.shape[1] // x.shape[1], dim=1)

    def scores(self) -> Tensor:
        """Return the scaled scores of all pairs, allowed or not, after score_mod, (B, H, N, M)."""
        scores = (self.q @ self.for_query_heads(self.k).mT) * self.scale
        return scores if self.score_mod is None else modified_scores(scores, self.score_mod, self.bound)


@dataclass(frozen=True, eq=False)
class Expected:
    """Expected out, lse or gradient in float64, with the error budget of each number.

    plain_error: largest error in each row, (..., 1), of torch's dense attention in the dtype of q; None where this was
        not computed.
    margin: factor in the budget.
    """

    value: Tensor
    budget: Tensor
    plain_error: Tensor | None
    margin: float


def expected(
    dense: DenseAttention, *, gradients: bool = False, through_lse: bool = False, margin: float = MARGIN
) -> dict[str, Expected]:
    """Return the expected "out" and "lse", and with `gradients` also "dq", "dk" and "dv", by name.

    The gradients are for `cotangents` of out, and of lse if `through_lse`. margin: factor on the error budgets.
    """
    wide, own = dense.wide(requires_grad=gradients), torch.finfo(dense.q.dtype)
    out, lse = wide.attention()
    values = {"out": out.detach(), "lse": lse.detach()}
    plain = _plain_attention(dense, gradients=gradients and not through_lse)
    if gradients:
        outputs, sent = (out, lse), cotangents(out, lse, through_lse=through_lse)
        grads = torch.autograd.grad(outputs, (wide.q, wide.k, wide.v), sent)
        values |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    with torch.no_grad():
        inputs = _LimitInputs.of(wide, values["out"], values["lse"], through_lse=through_lse)
        is_half = dense.q.dtype.itemsize == 2
        limits = _summation_limits(inputs, torch.finfo(torch.float32) if is_half else own, gradients=gradients)
        rounded = _rounding_limits(inputs, own, values) if is_half else {}
        found = {}
        for name, value in values.items():
            limit = limits[name] + rounded.get(name, 0.0)
            # Add one step of subnormal numbers, as results are rounded to it; without keys they are exactly 0.
            limit = limit + own.eps * own.smallest_normal * (limit > 0)
            error = None
            if name in plain:
                error = (plain[name].double() - value).abs().amax(-1, keepdim=True).nan_to_num(0.0)
                limit = torch.maximum(limit, error)
            found[name] = Expected(value, margin * limit, error, margin)
    return found


def cotangents(out: Tensor, lse: Tensor, *, through_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Return fixed pseudo-random float64 gradients of (out, lse), in their shapes, from which a backward starts.

    They are multiples of 1/16, exact in every dtype of `attend`. The cotangents of lse are 0 where lse is -inf, and all
    0 without `through_lse`.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse))
    grad_out, grad_lse = ((16 * x).round() / 16 for x in drawn)
    grad_out, grad_lse = grad_out.to(out.device), grad_lse.to(lse.device) * through_lse
    return grad_out, grad_lse.masked_fill(lse.detach() == -torch.inf, 0.0)


@dataclass(frozen=True, eq=False)
class _LimitInputs:
    """Float64 tensors from which error limits are computed.

    q, k, v, out, scale and the gradients are absolute values; k and v have a head for each query head. times, scores
    and weights are (B, H, N, M): the number of branches that allow each pair, its score, and its softmax weight, which
    is 0 for pairs not allowed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    times: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor
    lse: Tensor  # 0 where a row has no keys
    grad_out: Tensor
    grad_lse: Tensor
    scale: float
    num_kv_heads: int

    @classmethod
    def of(cls, wide: DenseAttention, out: Tensor, lse: Tensor, *, through_lse: bool) -> _LimitInputs:
        times, scores = wide.times(), wide.scores()
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        # Exclude hidden scores, which may have any size.
        weights = times * (scores.masked_fill(times == 0, -torch.inf) - finite[..., None]).exp()
        q, k, v = wide.q.abs(), wide.for_query_heads(wide.k).abs(), wide.for_query_heads(wide.v).abs()
        grad_out, grad_lse = (x.abs() for x in cotangents(out, lse, through_lse=through_lse))
        sizes = {"scale": abs(wide.scale), "num_kv_heads": wide.k.shape[1]}
        return cls(q, k, v, times, scores, weights, out.abs(), finite, grad_out, grad_lse, **sizes)


def _summation_limits(inputs: _LimitInputs, dtype: torch.finfo, *, gradients: bool) -> dict[str, Tensor]:
    """Return first-order bounds on the errors of lse and out, and with `gradients` of dq, dk and dv, by name.

    The errors are those of computing in `dtype`, where weights below its normal range may underflow to 0.
    """
    sizes = torch.maximum((inputs.q @ inputs.k.mT) * inputs.scale, inputs.scores.abs())
    loose = 1.0 + sizes.masked_fill(inputs.times == 0, 0.0).amax(-1) + inputs.lse.abs()
    vanished = max(dtype.smallest_normal, _VANISHED) * (inputs.times > 0).double()
    errors = dtype.eps * loose[..., None] * inputs.weights + vanished
    sent = (inputs.grad_out * (inputs.weights @ inputs.v)).sum(-1, keepdim=True) if gradients else None
    return {"lse": dtype.eps * loose} | _propagated_errors(inputs, errors, sent, torch.matmul)


def _rounding_limits(inputs: _LimitInputs, dtype: torch.finfo, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return estimated errors, by name, of lse and out in half precision, and of dq, dk and dv if `values` has them.

    dtype: bfloat16 or float16, to which scores, weights and results are rounded; sums are in float32.
    values: the exact results by name.

    Rounding errors are taken to be independent, so the error of a sum is the root of the sum of squared errors.
    """
    unit, sent = dtype.eps / 2, None
    sizes = torch.maximum(_root_sum_square_matmul(inputs.q, inputs.k.mT) * inputs.scale, inputs.scores.abs())
    sizes = sizes.masked_fill(inputs.times == 0, 0.0)
    errors = unit * (1.0 + sizes) * inputs.weights + dtype.eps * dtype.smallest_normal * (inputs.times > 0)
    if "dq" in values:
        sent = (inputs.grad_out * (inputs.out + _root_sum_square_matmul(inputs.weights, inputs.v))).norm(
            dim=-1, keepdim=True
        )
    limits = _propagated_errors(inputs, errors, sent, _root_sum_square_matmul)
    limits = {name: unit * values[name].abs() + limit for name, limit in limits.items()}
    if sent is not None:
        limits["dq"] = limits["dq"] + unit * sent * inputs.scale * (inputs.weights @ inputs.k)
    lse = _EXP_ERROR + unit * (inputs.lse.abs() + (inputs.weights * sizes).sum(-1))
    return {"lse": lse} | limits


def _propagated_errors(
    inputs: _LimitInputs, errors: Tensor, sent: Tensor | None, product: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the errors of out, and with `sent` of dq, dk and dv, by name, from errors (B, H, N, M) of the weights.

    sent: (B, H, N, 1), magnitude of grad_out · out, which the softmax's backward subtracts; None without gradients.
    product: matrix product that adds up errors, torch.matmul for bounds or `_root_sum_square_matmul` for independent
        errors; the caller has added up `sent` in the same way.
    """
    limits = {"out": product(errors, inputs.v)}
    if sent is not None:
        inner = product(inputs.grad_out, inputs.v.mT) + sent + inputs.grad_lse[..., None]
        pulls = errors * inner * inputs.scale
        limits["dq"] = product(pulls, inputs.k)
        limits["dk"] = _summed_by_kv_head(product(pulls.mT, inputs.q), inputs.num_kv_heads)
        limits["dv"] = _summed_by_kv_head(product(errors.mT, inputs.grad_out), inputs.num_kv_heads)
    return limits


def _root_sum_square_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of a and b, with each sum of products replaced by the root of the sum of squares."""
    return (a.square() @ b.square()).sqrt()


def _summed_by_kv_head(x: Tensor, num_kv_heads: int) -> Tensor:
    return x.unflatten(1, (num_kv_heads, -1)).sum(2)


def _plain_attention(dense: DenseAttention, *, gradients: bool) -> dict[str, Tensor]:
    """Return "out", and with `gradients` "dq", "dk" and "dv", by torch's dense attention in the dtype of q, by name.

    The gradients are for `cotangents` of out. The dict is empty with score_mod or sinks, which torch does not take.
    """
    if dense.score_mod is not None or dense.sinks is not None:
        return {}
    leaves = [x.detach().clone().requires_grad_(gradients) for x in (dense.q, dense.k, dense.v)]
    q, k, v = leaves[0], *(dense.for_query_heads(x) for x in leaves[1:])
    times = dense.times()
    if dense.pattern.pads:  # one more key, whose multiplicity is the number of zero keys
        k, v, times = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), pad(times, (0, 1))
        times[..., -1] = dense.zero_keys()
    empty = (times == 0).all(-1, keepdim=True)
    bias = times.double().log().masked_fill(empty, 0.0).to(q.dtype)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=dense.scale).masked_fill(empty, 0.0)
    found = {"out": out.detach()}
    if gradients:
        sent, _ = cotangents(out, out.detach()[..., 0].double(), through_lse=False)
        grads = torch.autograd.grad(out, leaves, sent.to(out.dtype))
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found
