"""An attention held against its definition in float64, so that every measurement also checks the library; contestants.

Contestants are attentions on a problem, checked first and then timed in turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from ._jobs import Attention, Job, Part, Problem, attention_job, interleave, say, seconds_on_cuda
from ._measures import Gap, Row, Target, Timing
from ._rules import Rule

# H heads, N tokens, D head dim, R sampled query rows; the batch is 1

TOLERANCE = 1e-5  # relative, float32: ten times what dense attention itself is off by
HALF_TOLERANCE = 2e-2  # bfloat16 operands explain some 4e-3
_SAMPLED_ROWS = 12


@dataclass(frozen=True, eq=False)
class Contestant:
    """An attention on a problem, and the rule it follows; None: not checked.

    `constant_weights`: its gradient leaves the branch weights out, as torchscale's does.
    """

    name: str
    attention: Attention
    problem: Problem
    rule: Rule | None
    constant_weights: bool = False

    def check(self, part: Part, *, tolerance: float = TOLERANCE) -> None:
        """Raise AssertionError unless output, and where it trains gradients, are the definition's."""
        if self.rule is None:
            return
        if part == "forward":
            check_forward(self.attention, self.problem, self.rule, tolerance=tolerance)
        else:
            options = {"constant_weights": self.constant_weights, "tolerance": tolerance}
            check_training(self.attention, self.problem, self.rule, **options)

    def job(self, part: Part) -> Job:
        return attention_job(self.name, self.attention, self.problem, part)


@dataclass(frozen=True)
class Comparison:
    """Timings by name; the first calls, compilation included; what failed its check; what could not run, and why."""

    timings: dict[str, Timing]
    first_call_s: dict[str, float]
    objections: dict[str, str]
    failed: dict[str, str]

    def median_s(self, name: str) -> float:
        """Infinite for what could not run."""
        return self.timings[name].median_s if name in self.timings else inf

    def row(
        self,
        what: str,
        target: Target,
        own: str,
        peer: str,
        work: Mapping[str, float] | None = None,
        *,
        scale: float = 1.0,
        **detail: Any,
    ) -> Row | Gap:
        """`scale` times the rate of one over the other's. A rate is its `work` a second; by default both do the same.

        With all timings, with `tera_a_second` where the work is stated, and marked if one of the two failed its check.
        """
        if missing := [name for name in (own, peer) if name not in self.timings]:
            return Gap(what, target, f"{missing[0]}: {self.failed[missing[0]]}")
        rates = {name: (work[name] if work else 1.0) / self.median_s(name) for name in (own, peer)}
        if work:
            detail["tera_a_second"] = {name: rate / 1e12 for name, rate in rates.items()}
        detail |= {"first_call_s": self.first_call_s, "failed": self.failed}
        wrong = tuple(f"{name}: {self.objections[name]}" for name in (own, peer) if name in self.objections)
        return Row(what, target, scale * rates[own] / rates[peer], tuple(self.timings.values()), detail, wrong)


def compare(
    contestants: Sequence[Contestant],
    part: Part,
    *,
    repeats: int,
    tolerance: float | None,
    jobs: Sequence[Job] = (),
    on_cuda: bool = False,
) -> Comparison:
    """Time one part of every contestant's work, and other `jobs`, in turns; without a tolerance nothing is checked.

    What raises is left out and reported, what fails its check is timed and reported: figures of a function that
    computes something else are marked, not hidden.
    """
    clock, first, objections, failed = seconds_on_cuda if on_cuda else Job.seconds, {}, {}, {}
    every = {each.name: each.job(part) for each in contestants} | {job.name: job for job in jobs}
    checks = {} if tolerance is None else {each.name: partial(each.check, tolerance=tolerance) for each in contestants}
    for name, job in every.items():
        start = perf_counter()
        try:
            clock(job)
            first[name] = perf_counter() - start
            if name in checks:
                checks[name](part)
        except AssertionError as error:
            objections[name] = str(error)
        except (RuntimeError, ValueError, TypeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
        if on_cuda:
            torch.cuda.empty_cache()  # what one job leaves must not be another's shortage
    for name, text in {**objections, **failed}.items():
        say(f"{name}: {text.partition(chr(10))[0]}")
    timings = interleave([job for name, job in every.items() if name not in failed], repeats=repeats, seconds=clock)
    return Comparison({timing.name: timing for timing in timings}, first, objections, failed)


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


def check_forward(attention: Attention, problem: Problem, rule: Rule, *, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless the output equals the definition's on the sampled rows."""
    rows = _sample(problem.q.shape[-2]).to(problem.q.device)
    with torch.no_grad():
        out = attention(problem.q, problem.k, problem.v)
        q, k, v = (x[0].double() for x in (problem.q[:, :, rows], problem.k, problem.v))
        assert_near("out", out[0, :, rows], by_definition(q, k, v, rule, rows)[0], tolerance)


def check_training(
    attention: Attention, problem: Problem, rule: Rule, *, constant_weights: bool = False, tolerance: float = TOLERANCE
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
        assert_near(name, value, wanted, tolerance)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in float64."""
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def assert_near(name: str, got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """AssertionError unless they agree, by default as float32 lets attention agree with its definition."""
    error = relative_error(got, wanted)
    assert error <= tolerance, f"{name} must be within {tolerance} of the definition; it is off by {error:.2e}"


def _sample(num_tokens: int) -> Int64[Tensor, " R"]:
    """The first and the last row and some between, the same for every call."""
    drawn = torch.randint(num_tokens, (_SAMPLED_ROWS - 2,), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.tensor([0, num_tokens - 1]), drawn]).unique()


# Relative errors of out and of gradients. float32 products are exact to 1e-6, their sums to some 1e-5.
_BUDGETS = {torch.float32: 1e-4, torch.bfloat16: HALF_TOLERANCE, torch.float16: HALF_TOLERANCE / 8}
# Absolute error of lse, whose inputs are rounded before either side sees them. Base 2 in place of e is off by 0.69.
_LSE_BUDGET = 2e-3
_LEAST_ENTRY = 1e-2  # inputs are standard normal: what is 0 but for rounding has no scale of its own


def check_call(
    engine: str,
    device: str,
    *,
    pattern: masks.Pattern | masks.Mixture,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    keys: int | None = None,
    batch: int = 1,
    given: Callable[[str], dict[str, Any]] = lambda _: {},
    how: str = "",
) -> None:
    """AssertionError unless a call's out, lse and gradients, those of sinks too, are the float64 reference's.

    `given` makes what else it takes for a device; `how` is "layout" (tokens come in the pattern's), "transposed"
    (outermost in memory), "compiled" (in one graph) or "through lse" (which has a gradient as well).
    """
    generator = torch.Generator().manual_seed(tokens)
    rows, others = (batch, heads, tokens, head_dim), (batch, kv_heads or heads, keys or tokens, head_dim)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in (rows, others, others, rows)]

    def results(engine: str, device: str, how: str) -> dict[str, Tensor]:
        kind = {"device": device, "dtype": torch.float64 if engine == "reference" else dtype}
        q, k, v, grad = (x.to(**kind) for x in drawn)
        if how == "transposed":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        options = {"engine": engine, "enable_gqa": kv_heads is not None, **given(device)}
        leaves = {"dq": q.requires_grad_(), "dk": k.requires_grad_(), "dv": v.requires_grad_()}
        if "sinks" in options:
            leaves["dsinks"] = options["sinks"].requires_grad_()
        run = partial(fd.attend, pattern=pattern, return_lse=True, **options)
        if how == "compiled":
            run = torch.compile(run, fullgraph=True, dynamic=False)
        if how == "layout":
            layout = masks.layout(pattern, tokens)
            out, lse = run(*map(layout.apply, (q, k, v)), layout=layout)
            out, lse = layout.invert(out), layout.invert(lse, dim=-1)
        else:
            out, lse = run(q, k, v)
        outputs, grads = ((out, lse), (grad, grad[..., 0].to(lse.dtype))) if through_lse else ((out,), (grad,))
        found = zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True)
        return {name: x.detach().cpu().double() for name, x in {"out": out, "lse": lse, **dict(found)}.items()}

    through_lse = how == "through lse"
    got, wanted = results(engine, device, how), results("reference", "cpu", "")
    empty = wanted["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty), "lse must be -inf in rows without keys, and in no other"
    for name, value in wanted.items():
        difference = got[name] - value
        if name == "lse":
            error, budget = float(difference.masked_fill(empty, 0.0).abs().max()), _LSE_BUDGET
        else:
            scale = max(float(value.norm()), _LEAST_ENTRY * value.numel() ** 0.5)
            error, budget = float(difference.norm()) / scale, _BUDGETS[dtype]
        assert error <= budget, f"{name} must be within {budget:g} of the reference; it is off by {error:.2e}"
