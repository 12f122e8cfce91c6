"""Check an attention function against the definition, in float64, on sampled query rows of any problem.

The gradient of the output is zero outside the sampled rows, so that every entry of dk and dv is checked, as
well as dq, at a cost linear in the tokens.
"""

from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ._problem import Attention, Problem

# H heads, N tokens, D head dim, R sampled query rows; the batch is 1

_TOLERANCE = 1e-5  # relative, float32: ten times what dense attention itself is off by
_SAMPLED_ROWS = 12


class Rule(Protocol):
    """Who attends to whom, written here rather than in the library."""

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        """The pairs of the sampled query rows that each branch allows."""
        ...


def by_definition(
    q: Float[Tensor, "H R D"],
    k: Float[Tensor, "H N D"],
    v: Float[Tensor, "H N D"],
    rule: Rule,
    rows: Int64[Tensor, " R"],
    *,
    constant_weights: bool = False,
) -> tuple[Float[Tensor, "H R D"], Float[Tensor, "H R"]]:
    """Output and lse of the query rows: each branch's softmax, weighted by the branches' denominators.

    `constant_weights` takes the branch weights out of the gradient, as torchscale does. Differentiable;
    computed in the dtype of the inputs. A row without keys has output 0 and lse -inf.
    """
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    allowed = rule.masks(rows, num_tokens=k.shape[-2], num_heads=k.shape[0])
    hidden = [scores.masked_fill(~mask, -torch.inf) for mask in allowed]
    lses = torch.stack([part.logsumexp(-1) for part in hidden])
    total = lses.logsumexp(0)
    # The softmax of the lses, and 0 for all branches of a row that has keys in none.
    weights = (lses - total.masked_fill(total == -torch.inf, 0.0)).exp()
    out = torch.zeros_like(q)
    for part, lse, weight in zip(hidden, lses, weights.detach() if constant_weights else weights, strict=True):
        empty = lse == -torch.inf
        share = (part - lse.masked_fill(empty, 0.0)[..., None]).exp()
        out = out + weight[..., None] * (share @ v)
    return out, total


def check_forward(attention: Attention, problem: Problem, rule: Rule, *, tolerance: float = _TOLERANCE) -> None:
    """Raise AssertionError unless the output equals the definition's on the sampled rows."""
    rows = _sample(problem.q.shape[-2]).to(problem.q.device)
    with torch.no_grad():
        out = attention(problem.q, problem.k, problem.v)
        q, k, v = (x[0].double() for x in (problem.q[:, :, rows], problem.k, problem.v))
        _compare("out", out[0, :, rows], by_definition(q, k, v, rule, rows)[0], tolerance)


def check_training(
    attention: Attention,
    problem: Problem,
    rule: Rule,
    *,
    constant_weights: bool = False,
    tolerance: float = _TOLERANCE,
) -> None:
    """Raise AssertionError unless out, dq, dk and dv equal the definition's, by the sampled rows."""
    rows = _sample(problem.q.shape[-2]).to(problem.q.device)
    grad = torch.zeros_like(problem.grad)
    grad[:, :, rows] = problem.grad[:, :, rows]
    leaves = problem.leaves
    out = attention(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)

    q, k, v = exact = tuple(x[0].double().requires_grad_() for x in (problem.q[:, :, rows], problem.k, problem.v))
    expected, _ = by_definition(q, k, v, rule, rows, constant_weights=constant_weights)
    gradients = torch.autograd.grad(expected, exact, grad[0, :, rows].double())
    got = (out[0, :, rows], dq[0, :, rows], dk[0], dv[0])
    for name, value, wanted in zip(("out", "dq", "dk", "dv"), got, (expected, *gradients), strict=True):
        _compare(name, value, wanted, tolerance)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in float64."""
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def _compare(name: str, got: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = relative_error(got, wanted)
    assert error <= tolerance, f"{name} must be within {tolerance} of the definition; it is off by {error:.2e}"


def _sample(num_tokens: int) -> Int64[Tensor, " R"]:
    """The first and the last row and some between, the same for every call."""
    drawn = torch.randint(num_tokens, (_SAMPLED_ROWS - 2,), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.tensor([0, num_tokens - 1]), drawn]).unique()
