"""assert_attention_close: compare results with the float64 definition, within the rounding errors of their dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..engines import ScoreMod, multiplicity
from ..masks import Mixture, Pattern
from ..masks.core import advises, require_bool, require_finite, shortened, span
from ._definition import MARGIN, DenseAttention, Expected, cotangents, expected

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

_RUNS, _BRANCHES, _LONGEST = 8, 6, 200  # listed in a report: runs of keys, branches, characters of a branch


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

    Raises AssertionError that shows the first wrong row and its branches.

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
    """Raise AssertionError if a number exceeds its error budget.

    through_lse: True if gradients came through the lse, too; by default if there is one. rows (B, H, N): rows of out
    and lse to compare.
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
            raise AssertionError(_report(dense, name, found, truth[name], missed, wrong))


def gradients_of(dense: DenseAttention, out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    """dq, dk and dv by autograd, for `cotangents` of out and lse; zeros for an unused input."""
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
    """Return x; raise TypeError if it is not a tensor, AssertionError for a wrong shape, dtype or device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.shape != shape:
        raise AssertionError(f"{name} must have shape {tuple(shape)}; got {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise AssertionError(f"{name} must be of floating point numbers; got {x.dtype}")
    if x.device != device:
        raise AssertionError(f"{name} must be on the device of q, {device}; got {x.device}")
    return x


def _report(dense: DenseAttention, name: str, found: Tensor, truth: Expected, missed: Tensor, wrong: Tensor) -> str:
    """Text of the first wrong row: numbers, budget, and keys by branch, or for dk and dv the queries that see it."""
    b, h, row = wrong.nonzero()[0].tolist()
    place = (b, h, row) if name == "lse" else (b, h, row, int(missed[b, h, row].nonzero()[0]))
    element = f", element {place[-1]}" if len(place) == 4 else ""
    what = f"key/value head {h}, key" if name in ("dk", "dv") else f"head {h}, query"
    dtype, given = (str(x.dtype).removeprefix("torch.") for x in (dense.q, found))
    other = "" if given == dtype or name == "lse" else f" (in {given}, where q is {dtype})"
    error = 0.0 if truth.plain_error is None else float(truth.plain_error[(*place[:3], 0)])
    is_budget = error > 0 and error * MARGIN >= truth.budget[place]
    plain = f" (plain attention is off by up to {error:.2g} there)" if is_budget else ""
    lines = [
        f"{name} is wrong in {int(wrong.sum())} of {wrong.numel()} rows; the first is batch {b}, {what} {row}{element}",
        f"  found     {number(found[place])}{other}",
        f"  expected  {number(truth.value[place])}",
        f"  off by    {rough((found[place].double() - truth.value[place]).abs())}, where rounding to {dtype} may "
        f"account for {rough(truth.budget[place])}{plain}",
    ]
    if name in ("dk", "dv"):
        group = dense.q.shape[1] // dense.k.shape[1]
        seen_by = (dense.times()[b, h * group : (h + 1) * group, :, row] > 0).any(0)
        return "\n".join([*lines, f"  seen by   {_runs(seen_by.nonzero().flatten().tolist())} (queries)"])
    branches = dense.bound.pattern.branches()
    for index, branch in enumerate(branches[:_BRANCHES]):
        allowed = multiplicity(replace(dense.bound, pattern=branch), dense.q.device)
        keys = _runs(allowed.expand(dense.q.shape[0], -1, -1, -1)[b, h, row].nonzero().flatten().tolist())
        label = "keys" if len(branches) == 1 else f"branch {index}"
        lines.append(f"  {label:<9} {keys}: {shortened(repr(branch), _LONGEST)}")
    if len(branches) > _BRANCHES:
        lines.append(f"            and {len(branches) - _BRANCHES} branches more")
    return "\n".join(lines)


def _runs(positions: Sequence[int]) -> str:
    """Ascending positions as runs: "0 to 3, 7"; "none" without any."""
    if not positions:
        return "none"
    starts = [0, *(index + 1 for index, (a, b) in enumerate(pairwise(positions)) if b != a + 1), len(positions)]
    runs = [span(positions[start], positions[stop - 1] + 1) for start, stop in pairwise(starts)]
    return ", ".join(runs[:_RUNS]) + (f" and {len(runs) - _RUNS} runs more" if len(runs) > _RUNS else "")


def number(x: Tensor | float) -> str:
    """Text with five digits."""
    return f"{x.detach().item() if isinstance(x, Tensor) else x:.5g}"


def rough(x: Tensor) -> str:
    """Text with two digits, for an error."""
    return f"{x.detach().item():.2g}"
