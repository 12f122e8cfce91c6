"""assert_attention_close: compare an output with the float64 definition, within the rounding errors of its dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..engines import ScoreMod
from ..masks import Mixture, Pattern
from ..masks.core import advises, require_bool, require_finite
from ._problem import Problem, branch_lines, number, rough, runs
from ._suspects import explain

MARGIN = 4.0
_VANISHED = 1e-250  # its products with gradients do not underflow in float64


@dataclass(frozen=True, eq=False)
class Expected:
    """Float64 value, error budget of a result, and the error of plain attention in the dtype (or None)."""

    name: str
    value: Tensor
    budget: Tensor
    plain_error: Tensor | None


def expected(
    problem: Problem, *, gradients: bool = False, through_lse: bool = False, margin: float = MARGIN
) -> dict[str, Expected]:
    """Expected out and lse; with `gradients` also dq, dk, dv for `cotangents` of out, and of lse if `through_lse`."""
    wide = problem.wide(requires_grad=gradients)
    out, lse = wide.attention()
    found = {"out": out.detach(), "lse": lse.detach()}
    plain = _plain_attention(problem, gradients=gradients and not through_lse)
    if gradients:
        outputs, sent = (out, lse), cotangents(out, lse, through_lse=through_lse)
        grads = torch.autograd.grad(outputs, (wide.q, wide.k, wide.v), sent)
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    with torch.no_grad():
        limits = _limits(wide, found, problem.q.dtype, through_lse=through_lse)
    return {name: _limited(name, value, limits[name], plain, margin) for name, value in found.items()}


def _limits(wide: Problem, found: Mapping[str, Tensor], dtype: torch.dtype, *, through_lse: bool) -> dict[str, Tensor]:
    parts, own = _Parts.of(wide, found["out"], found["lse"], through_lse=through_lse), torch.finfo(dtype)
    summed = torch.finfo(torch.float32) if dtype.itemsize == 2 else own
    limits = _summation_limits(parts, summed, gradients="dq" in found)
    if dtype.itemsize == 2:
        rounded = _rounding_limits(parts, own, found)
        limits = {name: limit + rounded[name] for name, limit in limits.items()}
    # Add one step of subnormal numbers, as results are rounded to it; without keys they are exactly 0.
    step = own.eps * own.smallest_normal
    return {name: limit + step * (limit > 0) for name, limit in limits.items()}


def cotangents(out: Tensor, lse: Tensor, *, through_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Fixed float64 gradients of out and lse, exact in every dtype; 0 for the lse of a row without keys."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse))
    grad_out, grad_lse = ((16 * x).round() / 16 for x in drawn)
    grad_out, grad_lse = grad_out.to(out.device), grad_lse.to(lse.device) * through_lse
    return grad_out, grad_lse.masked_fill(lse.detach() == -torch.inf, 0.0)


def _limited(name: str, value: Tensor, limit: Tensor, plain: dict[str, Tensor], margin: float) -> Expected:
    error = None
    if name in plain:
        error = (plain[name].double() - value).abs().amax(-1, keepdim=True).nan_to_num(0.0)
        limit = torch.maximum(limit, error)
    return Expected(name, value, margin * limit, error)


@dataclass(frozen=True, eq=False)
class _Parts:
    """Terms of error limits, in float64: absolute q, k and v by query head; scores (B, H, N, M) and weights."""

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
    def of(cls, wide: Problem, out: Tensor, lse: Tensor, *, through_lse: bool) -> _Parts:
        times, scores = wide.times(), wide.scores()
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        # Exclude hidden scores, which may have any size.
        weights = times * (scores.masked_fill(times == 0, -torch.inf) - finite[..., None]).exp()
        q, k, v = wide.q.abs(), wide.for_query_heads(wide.k).abs(), wide.for_query_heads(wide.v).abs()
        grad_out, grad_lse = cotangents(out, lse, through_lse=through_lse)
        sent = {"grad_out": grad_out.abs(), "grad_lse": grad_lse.abs()}
        sizes = {"scale": abs(wide.scale), "num_kv_heads": wide.k.shape[1]}
        return cls(q, k, v, times, scores, weights, out.abs(), finite, **sent, **sizes)


def _summation_limits(parts: _Parts, dtype: torch.finfo, *, gradients: bool) -> dict[str, Tensor]:
    """First-order bounds on errors of computation and summation in a dtype.

    Weights below its normal range may underflow to 0.
    """
    sizes = torch.maximum((parts.q @ parts.k.mT) * parts.scale, parts.scores.abs())
    loose = 1.0 + sizes.masked_fill(parts.times == 0, 0.0).amax(-1) + parts.lse.abs()
    vanished = max(dtype.smallest_normal, _VANISHED) * (parts.times > 0).double()
    errors = dtype.eps * loose[..., None] * parts.weights + vanished
    limits = {"out": errors @ parts.v, "lse": dtype.eps * loose}
    if gradients:
        sent = (parts.grad_out * (parts.weights @ parts.v)).sum(-1, keepdim=True)
        pulls = errors * (parts.grad_out @ parts.v.mT + sent + parts.grad_lse[..., None]) * parts.scale
        limits["dq"] = pulls @ parts.k
        limits["dk"] = _summed(pulls.mT @ parts.q, parts.num_kv_heads)
        limits["dv"] = _summed(errors.mT @ parts.grad_out, parts.num_kv_heads)
    return limits


# Relative error of exp in torch's CPU kernels for half precision: 5.4e-5 as measured, rounded up.
_EXP_ERROR = 2.0**-14


def _rounding_limits(parts: _Parts, dtype: torch.finfo, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Errors of scores, weights and results that are rounded to a half dtype and summed in a wider dtype.

    Rounding errors are independent, so the error of a sum is their root sum of squares, not their sum.
    """
    unit = dtype.eps / 2
    sizes = torch.maximum(_root(parts.q, parts.k.mT) * parts.scale, parts.scores.abs())
    sizes = sizes.masked_fill(parts.times == 0, 0.0)
    errors = unit * (1.0 + sizes) * parts.weights + dtype.eps * dtype.smallest_normal * (parts.times > 0)
    limits = {name: unit * value.abs() for name, value in found.items()}
    limits["out"] = limits["out"] + _root(errors, parts.v)
    limits["lse"] = _EXP_ERROR + unit * (parts.lse.abs() + (parts.weights * sizes).sum(-1))
    if "dq" in found:
        sent = (parts.grad_out * (parts.out + _root(parts.weights, parts.v))).norm(dim=-1, keepdim=True)
        inner = _root(parts.grad_out, parts.v.mT) + sent + parts.grad_lse[..., None]
        pulls = errors * inner * parts.scale
        limits["dq"] = limits["dq"] + _root(pulls, parts.k) + unit * sent * parts.scale * (parts.weights @ parts.k)
        limits["dk"] = limits["dk"] + _summed(_root(pulls.mT, parts.q), parts.num_kv_heads)
        limits["dv"] = limits["dv"] + _summed(_root(errors.mT, parts.grad_out), parts.num_kv_heads)
    return limits


def _root(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product with the root sum of squares in place of each sum."""
    return (a.square() @ b.square()).sqrt()


def _summed(x: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, M, D) to (B, G, M, D): sum over the query heads of each key/value head."""
    return x.unflatten(1, (num_kv_heads, -1)).sum(2)


def _plain_attention(problem: Problem, *, gradients: bool) -> dict[str, Tensor]:
    """out, and gradients, of torch's dense attention in the dtype of q; empty with score_mod or sinks."""
    if problem.score_mod is not None or problem.sinks is not None:
        return {}
    leaves = [x.detach().clone().requires_grad_(gradients) for x in (problem.q, problem.k, problem.v)]
    q, k, v = leaves[0], *(problem.for_query_heads(x) for x in leaves[1:])
    times = problem.times()
    if problem.pattern.pads:  # one more key, whose multiplicity is the number of zero keys
        k, v, times = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), pad(times, (0, 1))
        times[..., -1] = problem.zero_keys()
    empty = (times == 0).all(-1, keepdim=True)
    bias = times.double().log().masked_fill(empty, 0.0).to(q.dtype)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=problem.scale).masked_fill(empty, 0.0)
    found = {"out": out.detach()}
    if gradients:
        sent, _ = cotangents(out, out.detach()[..., 0].double(), through_lse=False)
        grads = torch.autograd.grad(out, leaves, sent.to(out.dtype))
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found


AS_IF = "\n  as if     "

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


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
    """Compare `out` (B, H, N, D), and `lse` (B, H, N) if given, with the dense definition in float64.

    The error budget of each number is `margin` times the larger of two errors: the first-order rounding error in the
    dtype of q, and the error of `scaled_dot_product_attention` in that row in this dtype. In bfloat16 and float16 sums
    must be in float32; scores, weights and results may be rounded, independently. A row without keys must have output
    0 and lse -inf, exactly. gradients: also compare gradients of q, k and v for a fixed functional of `out` (and
    `lse`), which must then depend on q, k and v by autograd; the graph is retained. Other arguments are as in `attend`;
    G may divide H. The definition needs memory for all N x M pairs, so use small inputs.

    Raises AssertionError that shows the first wrong row, its branches, and the known mistake that explains it, if any.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> testing.assert_attention_close(fd.attend(q, k, v, masks.causal()), q, k, v, masks.causal())
    """
    problem = Problem.of(
        *(q, k, v, pattern),
        scale=scale,
        score_mod=score_mod,
        sinks=sinks,
        bindings=bindings,
        q_offset=q_offset,
        k_offset=k_offset,
        head_offset=head_offset,
        num_heads_global=num_heads_global,
    )
    check_result("out", out, q.shape, q.device)
    if lse is not None:
        check_result("lse", lse, q.shape[:3], q.device)
    if require_finite("margin", margin) <= 0:
        raise ValueError(f"margin must be above 0; got {margin=}")
    if require_bool("gradients", gradients) and not all(x.requires_grad for x in (q, k, v)):
        raise ValueError("gradients=True needs q, k and v that require gradients; got some that do not")
    truth = expected(problem, gradients=gradients, through_lse=lse is not None, margin=margin)
    hold(problem, "out", out, truth["out"])
    if lse is not None:
        hold(problem, "lse", lse, truth["lse"])
    if gradients:
        for name, grad in zip(("dq", "dk", "dv"), gradients_of(problem, out, lse), strict=True):
            hold(problem, name, grad, truth[name])


def hold(problem: Problem, name: str, found: Tensor, truth: Expected, *, rows: Tensor | None = None) -> None:
    """Raise AssertionError if a number exceeds its error budget; `rows` (B, H, N): rows to compare."""
    missed = _missed(found, truth)
    wrong = _wrong_rows(name, missed, rows)
    if wrong.any():
        raise AssertionError(_report(problem, name, found, truth, missed, wrong))


def likely_mistake(problem: Problem, out: Tensor, truth: Expected, *, rows: Tensor) -> str | None:
    """Mistake that explains the wrong rows among `rows` (B, H, N); None without wrong rows or a known mistake."""
    wrong = _wrong_rows("out", _missed(out, truth), rows)
    return explain(problem, out.detach(), truth.budget, wrong) if wrong.any() else None


def _wrong_rows(name: str, missed: Tensor, rows: Tensor | None) -> Tensor:
    wrong = missed if name == "lse" else missed.any(-1)
    return wrong if rows is None else wrong & rows


def _missed(found: Tensor, truth: Expected) -> Tensor:
    """Mask of numbers that exceed their error budget; NaN always does, and infinities must be equal."""
    found, infinite = found.detach().double(), truth.value.isinf()
    near = (found - truth.value).abs() <= truth.budget
    return torch.where(infinite, found != truth.value, ~near)


def gradients_of(problem: Problem, out: Tensor, lse: Tensor | None) -> tuple[Tensor, ...]:
    """(dq, dk, dv) by autograd; zeros for an unused input."""
    leaves = (problem.q, problem.k, problem.v)
    if not out.requires_grad:
        raise AssertionError("out does not depend on q, k and v by autograd: it has no gradient")
    shown = out.detach()[..., 0].double() if lse is None else lse
    grad_out, grad_lse = cotangents(out, shown, through_lse=lse is not None)
    outputs, sent = [out], [grad_out.to(out.dtype)]
    if lse is not None and lse.requires_grad:
        outputs, sent = [out, lse], [*sent, grad_lse.to(lse.dtype)]
    grads = torch.autograd.grad(outputs, leaves, sent, retain_graph=True, allow_unused=True)
    return tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True))


def check_result(name: str, x: object, shape: torch.Size, device: torch.device) -> None:
    """Raise TypeError if x is not a tensor, AssertionError for a wrong shape, dtype or device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.shape != shape:
        raise AssertionError(f"{name} must have shape {tuple(shape)}; got {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise AssertionError(f"{name} must be of floating point numbers; got {x.dtype}")
    if x.device != device:
        raise AssertionError(f"{name} must be on the device of q, {device}; got {x.device}")


def _report(problem: Problem, name: str, found: Tensor, truth: Expected, missed: Tensor, wrong: Tensor) -> str:
    b, h, row = wrong.nonzero()[0].tolist()
    place: tuple[int, ...] = (b, h, row)
    element = ""
    if name != "lse":
        place += (int(missed[b, h, row].nonzero()[0]),)
        element = f", element {place[-1]}"
    what = {"dk": "key/value head {h}, key", "dv": "key/value head {h}, key"}.get(name, "head {h}, query")
    dtype, given = (str(x.dtype).removeprefix("torch.") for x in (problem.q, found))
    other = "" if given == dtype or name == "lse" else f" (in {given}, where q is {dtype})"
    lines = [
        f"{name} is wrong in {int(wrong.sum())} of {wrong.numel()} rows; the first is batch {b}, "
        f"{what.format(h=h)} {row}{element}",
        f"  found     {number(found[place])}{other}",
        f"  expected  {number(truth.value[place])}",
        f"  off by    {rough((found[place].double() - truth.value[place]).abs())}, where rounding to {dtype} may "
        f"account for {rough(truth.budget[place])}{_plain(truth, place)}",
    ]
    if name in ("out", "lse", "dq"):
        lines += [f"  {line}" for line in branch_lines(problem, b, h, row)]
    else:
        seen_by = (problem.times()[b, :, :, row] > 0).nonzero()
        heads = problem.q.shape[1] // problem.k.shape[1]
        mine = seen_by[seen_by[:, 0] // heads == h]
        lines.append(f"  seen by   {runs(sorted(set(mine[:, 1].tolist())))} (queries)")
    if name == "out" and (likely := explain(problem, found.detach(), truth.budget, wrong)):
        return "\n".join(lines) + AS_IF + likely
    return "\n".join(lines)


def _plain(truth: Expected, place: tuple[int, ...]) -> str:
    """Note if the budget comes from plain attention; otherwise empty."""
    error = None if truth.plain_error is None else truth.plain_error[(*place[:3], 0)]
    if error is None or error == 0 or error * MARGIN < truth.budget[place]:
        return ""
    return f" (plain attention is off by up to {rough(error)} there)"
