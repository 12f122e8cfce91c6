"""Measuring the options for a pattern: predicted and measured time of each, and the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _torch_private
from ..engines import (
    Call,
    TuningKey,
    TuningResult,
    WholeRows,
    allowed_on,
    chosen,
    make_flex_program,
    make_program,
    remember,
    result_of,
    run_backward,
    run_flex,
    run_forward,
)
from ..masks.core import Bound, device_kind
from ..masks.orders import Layout
from ..masks.plan_cache import debug_wanted, pattern_text
from ..masks.planning import (
    Allowed,
    Candidates,
    Choice,
    Operands,
    Option,
    Plan,
    in_other_blocks,
    machine_of,
    way_of,
)

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class Inputs:
    """q, k, v, and the gradient of the output."""

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B G M D"]
    v: Float[Tensor, "B G M D"]
    grad: Float[Tensor, "B H N D"]

    @classmethod
    def of(
        cls, bound: Bound, *, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> Inputs:
        """Random inputs from a private seed; torch's generators are not advanced."""
        generator = torch.Generator().manual_seed(0)
        queries, keys = (bound.num_heads, bound.num_queries), (num_kv_heads, bound.num_keys)
        drawn = (torch.randn(batch, *size, head_dim, generator=generator) for size in (queries, keys, keys, queries))
        return cls(*(x.to(device, dtype) for x in drawn))

    @classmethod
    def like(cls, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        """A call's own tensors; any gradient of the output will do, because its values do not affect the time."""
        return cls(q.detach(), k.detach(), v.detach(), q.detach())

    @property
    def operands(self) -> Operands:
        """The parameters on which predictions depend."""
        return Operands(self.q.element_size(), self.q.shape[-1], self.q.shape[1] // self.k.shape[1])


@dataclass(frozen=True)
class Times:
    """Seconds of each round of one trial."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Time of the slowest round over that of the fastest."""
        return max(self.seconds) / min(self.seconds)


Run = Callable[[], tuple[Tensor, ...]]


def trial(plan: Plan, x: Inputs, *, engine: str, backward: bool, block_size: tuple[int, ...] = ()) -> Run:
    """A function that runs the plan: returns out, or with `backward` (out, dq, dk, dv)."""
    if engine == "flex":
        return _compiled(plan, x, backward, block_size)
    return _tiled(plan, x, backward, block_size)


def _compiled(plan: Plan, x: Inputs, backward: bool, block_size: tuple[int, ...]) -> Run:
    sides = (block_size[0], block_size[1]) if block_size else None
    num_kv_heads, scale = x.k.shape[1], x.q.shape[-1] ** -0.5
    program = make_flex_program(plan, plan.layout, num_kv_heads=num_kv_heads, block_size=sides, device=x.q.device)

    def run() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(backward), torch.autocast(x.q.device.type, enabled=False):
            leaves = [each.detach().requires_grad_(backward) for each in (x.q, x.k, x.v)]
            out, _ = run_flex(program, *leaves, scale=scale, return_lse=False)
            return (out.detach(), *(torch.autograd.grad(out, leaves, x.grad) if backward else ()))

    return run


def _tiled(plan: Plan, x: Inputs, backward: bool, block_size: tuple[int, ...]) -> Run:
    program = make_program(plan, plan.layout, num_kv_heads=x.k.shape[1], block_size=block_size)
    scale = x.q.shape[-1] ** -0.5

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(x.q.device.type, enabled=False):
            out, lse = run_forward(program, x.q, x.k, x.v, scale)
            if not backward:
                return (out,)
            return (out, *run_backward(program, x.q, x.k, x.v, WholeRows(out, lse, x.grad, None), scale))

    return run


def check_alike(runs: Sequence[Run], dtype: torch.dtype) -> None:
    """Run each once; RuntimeError unless all results equal the first one's, to the precision of their dtype."""
    first: tuple[Tensor, ...] | None = None
    for run in runs:
        found = run()
        first = found if first is None else first
        for got, wanted in zip(found, first, strict=True):
            away = float((got.double() - wanted.double()).norm())
            size = float(wanted.double().norm())
            if not away <= _TOLERANCE[dtype] * size:
                raise RuntimeError(f"ways of computing one attention must agree; {away:.1e} apart, of {size:.1e}")


def interleave(runs: Sequence[Run], *, seconds: float, device: torch.device) -> list[Times]:
    """Time the runs alternately: 3 rounds, and up to 15 while `seconds` last."""
    rounds: list[list[float]] = []
    begin = perf_counter()
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and perf_counter() - begin < seconds):
        rounds.append([_seconds(run, device) for run in runs])
    return [Times(tuple(times)) for times in zip(*rounds, strict=True)]


def _seconds(run: Run, device: torch.device) -> float:
    _wait(device)
    begin = perf_counter()
    run()
    _wait(device)
    return perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device_kind(device).is_cuda:
        torch.cuda.synchronize(device)


BRANCH_BY_BRANCH = "branch by branch"
WORTH_MEASURING = 4.0  # factor over the cheapest prediction up to which options are measured


@dataclass(frozen=True)
class Trialled:
    """An option with its predicted and measured time. branch: counts from 0; None: all branches together."""

    branch: int | None
    option: Option
    predicted_s: float
    times: Times

    @property
    def name(self) -> str:
        """The layout, with the block side unless it is 128."""
        sides = sorted(set(way_of(self.option)[1]))
        return self.option.layout + (f", blocks of {'/'.join(map(str, sides))}" if sides not in ([], [128]) else "")


@dataclass(frozen=True)
class Trials:
    """All measurements of a pattern, and the options chosen."""

    all: tuple[Trialled, ...]
    choice: Choice

    def won(self, each: Trialled) -> bool:
        """True for a chosen option; if branches are computed together, options of single branches are not."""
        if each.branch is None:
            apart = each.option.layout == BRANCH_BY_BRANCH
            return not self.choice.together if apart else self.choice.ways == (way_of(each.option),)
        return not self.choice.together and way_of(each.option) == self.choice.ways[each.branch]


def measure_options(
    bound: Bound,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    num_kv_heads: int,
    backward: bool,
) -> list[tuple[str, float, float]]:
    """(option, predicted seconds, measured seconds) of each option that may be the fastest.

    Times are of the forward, or with `backward` of forward and backward, of one batch entry. For a mixture, an option's
    name includes its branch.
    """
    x = Inputs.of(bound, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=torch.device(device))
    found = measure(bound, x, backward=backward)
    many = len(bound.pattern.branches()) > 1
    return [(_label(each, many), each.predicted_s, each.times.median_s) for each in found.all]


def measure(
    bound: Bound,
    x: Inputs,
    *,
    backward: bool,
    engine: str | None = None,
    block_size: tuple[int, ...] = (),
    seconds: float = 1.0,
) -> Trials:
    """Run the options predicted within 4 times of the cheapest, for each branch, and then for all branches together.

    seconds: time for the rounds of each branch beyond the first three. block_size: the only one tried, if given. Raises
    RuntimeError if two options differ in their results.
    """
    device = x.q.device
    engine = engine or device_kind(device).engine
    stand = _Stand(bound, x, backward, engine, block_size, seconds)
    allowed = Allowed(masks=not block_size) if engine == "tiles" else allowed_on(device)
    candidates = Candidates.of(bound, machine_of(device.type), allowed, x.operands)
    branches = [stand.time(index, stand.worth_measuring(ways)) for index, ways in enumerate(candidates.branches)]
    fastest = [min(measured, key=lambda each: each.times.median_s).option for measured in branches]
    found = tuple(each for measured in branches for each in measured)
    choice = Choice(False, tuple(way_of(option) for option in fastest))
    if not candidates.together:
        return Trials(found, choice)
    terms = tuple(term for option in fastest for term in option.terms)
    by_branch = replace(candidates.together[0], layout=BRANCH_BY_BRANCH, terms=terms, shares_rows=True)
    apart, *whole = stand.time(None, [by_branch, *candidates.together])
    best = min(whole, key=lambda each: each.times.median_s)
    if best.times.median_s < apart.times.median_s:
        choice = Choice(True, (way_of(best.option),))
    return Trials((*found, apart, *whole), choice)


@dataclass(frozen=True)
class _Stand:
    """Settings under which options of one pattern are timed against each other."""

    bound: Bound
    x: Inputs
    backward: bool
    engine: str
    block_size: tuple[int, ...]
    seconds: float

    def time(self, branch: int | None, options: Sequence[Option]) -> list[Trialled]:
        """Times of each option, after a check that their results agree."""
        runs = [self._run(option) for option in options]
        check_alike(runs, self.x.q.dtype)
        times = interleave(runs, seconds=self.seconds, device=self.x.q.device)
        predicted = [predicted_seconds(option, self.x, backward=self.backward) for option in options]
        return [Trialled(branch, *each) for each in zip(options, predicted, times, strict=True)]

    def worth_measuring(self, options: tuple[Option, ...]) -> list[Option]:
        """Options that may be the fastest, with all allowed block sides."""
        other_sides = self.engine == "tiles" and not self.block_size
        every = [each for option in options for each in (in_other_blocks(option) if other_sides else (option,))]
        least = min(each.cost.seconds for each in every)
        return [each for each in every if each.cost.seconds <= WORTH_MEASURING * least]

    def _run(self, option: Option) -> Run:
        alone = Plan(self.bound, Layout(self.bound.num_queries), option.terms, ((option,),))
        return trial(alone, self.x, engine=self.engine, backward=self.backward, block_size=self.block_size)


def predicted_seconds(option: Option, x: Inputs, *, backward: bool) -> float:
    """Time predicted by the cost model for inputs of this batch size."""
    forward = option.cost.seconds * len(x.q)
    return forward * (1 + option.machine.backward_ratio) if backward else forward


def _label(each: Trialled, many: bool) -> str:
    return f"branch {each.branch + 1}: {each.name}" if many and each.branch is not None else each.name


_log = logging.getLogger("flexdilated")


def autotune(call: Call, q: Tensor, k: Tensor, v: Tensor, *, engine: str, has_bindings: bool) -> None:
    """Measure the options for this call, unless a result is stored, and store the fastest.

    Measures forward and backward if q, k or v requires a gradient, else forward. Measures nothing while a graph is
    traced. Raises ValueError for calls that cannot be tuned, RuntimeError if two options disagree.
    """
    if engine not in ("tiles", "flex"):
        raise ValueError(
            f"autotune chooses among the ways of 'tiles' and 'flex'; got {engine=}, which it does not time"
        )
    if call.rate > 1:
        raise ValueError(f"autotune needs tokens in natural order; got a layout of rate {call.rate}")
    if has_bindings:
        raise ValueError("autotune needs a pattern without run-time tensors: each batch of these is another rule")
    if torch.compiler.is_compiling() or isinstance(q, _torch_private.FakeTensor):
        return
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    chosen(call, q)  # loads a stored result, if any
    key = TuningKey.of(call, q)
    known = result_of(key)
    if known is None or (backward and not known.backward):
        found = measure(
            call.bound(), Inputs.like(q, k, v), backward=backward, engine=engine, block_size=call.block_size
        )
        keep(key, found, backward=backward)


def keep(key: TuningKey, found: Trials, *, backward: bool) -> Path | None:
    """Use the fastest option for such calls from now on; returns the file where it is stored, if any."""
    if debug_wanted():
        times = ", ".join(f"{each.name} {1e3 * each.times.median_s:.3g} ms" for each in found.all)
        what = f"{key.call.num_heads:,} heads, {key.call.num_queries:,} queries, {key.call.num_keys:,} keys"
        _log.debug("autotune measured %s, %s: %s", pattern_text(key.call.pattern), what, times)
    return remember(key, TuningResult(found.choice, backward))
