"""Measure the planner's options for a pattern, which are ways to compute it, and find the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _torch_private
from ..engines import (
    Call,
    Features,
    TuningKey,
    WholeRows,
    allowed_on,
    make_flex_program,
    make_program,
    results,
    run_flex,
)
from ..masks.core import Bound, device_kind
from ..masks.orders import Layout
from ..masks.plan_cache import debug_wanted, pattern_text
from ..masks.planning import (
    BRANCH_BY_BRANCH,
    Allowed,
    Candidates,
    Choice,
    OperandSizes,
    Option,
    Plan,
    in_each_block_size,
    machine_of,
    way_of,
)

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_WORTH_MEASURING = 4.0  # factor over the cheapest prediction up to which options are measured
_log = logging.getLogger("flexdilated")

TimedRun = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of a timed attention call: q, k, v, and the gradient of the output."""

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B G M D"]
    v: Float[Tensor, "B G M D"]
    grad: Float[Tensor, "B H N D"]

    @classmethod
    def of(
        cls, bound: Bound, *, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> Inputs:
        """Return random inputs with the sizes of a bound pattern, from seed 0; torch's generators are not advanced."""
        generator = torch.Generator().manual_seed(0)
        queries, keys = (bound.num_heads, bound.num_queries), (num_kv_heads, bound.num_keys)
        drawn = (torch.randn(batch, *size, head_dim, generator=generator) for size in (queries, keys, keys, queries))
        return cls(*(x.to(device, dtype) for x in drawn))

    @property
    def operands(self) -> OperandSizes:
        """Sizes for the cost model: bytes of an element, head dim, number of query heads per key/value head."""
        return OperandSizes(self.q.element_size(), self.q.shape[-1], self.q.shape[1] // self.k.shape[1])


def trial(plan: Plan, x: Inputs, *, engine: str, backward: bool, block_size: tuple[int, ...] = ()) -> TimedRun:
    """Return a function that runs the plan on x once, and returns (out,), or with `backward` (out, dq, dk, dv).

    engine: "aten" or "flex".
    block_size: (queries, keys) of a block; empty: those of the plan for "aten", the default of the engine for "flex".
    """
    num_kv_heads, scale, device = x.k.shape[1], x.q.shape[-1] ** -0.5, x.q.device
    if engine == "flex":
        sides = (block_size[0], block_size[1]) if block_size else None
        compiled = make_flex_program(plan, plan.layout, num_kv_heads=num_kv_heads, block_size=sides, device=device)

        def run_compiled() -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(backward), torch.autocast(device.type, enabled=False):
                q, k, v = (each.detach().requires_grad_(backward) for each in (x.q, x.k, x.v))
                out, _ = run_flex(compiled, q, k, v, Features(scale, return_lse=False))
                return (out.detach(), *(torch.autograd.grad(out, (q, k, v), x.grad) if backward else ()))

        return run_compiled
    program = make_program(plan, plan.layout, num_kv_heads=num_kv_heads, block_size=block_size)

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            out, lse = program.forward(x.q, x.k, x.v, scale)
            out = out.to(x.q.dtype)
            return (out, *program.backward(x.q, x.k, x.v, WholeRows(out, lse, x.grad), scale)) if backward else (out,)

    return run


def time_in_rounds(runs: Sequence[TimedRun], *, seconds: float, device: torch.device) -> list[list[float]]:
    """Time the runs in rounds, each of which makes all runs in turn; return, for each run, its seconds in every round.

    seconds: no round begins after this time, except the first 3.

    There are at most 15 rounds.
    """

    def now() -> float:
        if device_kind(device).is_cuda:
            torch.cuda.synchronize(device)
        return perf_counter()

    def time(run: TimedRun) -> float:
        begin = now()
        run()
        return now() - begin

    times: list[list[float]] = [[] for _ in runs]
    begin = now()
    while len(times[0]) < _LEAST_ROUNDS or (len(times[0]) < _MOST_ROUNDS and now() - begin < seconds):
        for own, run in zip(times, runs, strict=True):
            own.append(time(run))
    return times


@dataclass(frozen=True)
class TimedOption:
    """An option (a way to compute one or all branches of a pattern) with its predicted and its median measured time.

    branch: index of its branch among the distinct branches; None: all branches together.
    """

    branch: int | None
    option: Option
    predicted_s: float
    median_s: float

    @property
    def name(self) -> str:
        """Text of the layout, and of the block sizes unless all are 128, such as "natural, blocks of 64"."""
        sides = sorted(set(way_of(self.option)[1]))
        return self.option.layout + (f", blocks of {'/'.join(map(str, sides))}" if sides not in ([], [128]) else "")


def predicted_seconds(option: Option, x: Inputs, *, backward: bool) -> float:
    """Return the predicted seconds of an option for x's batch size: of forward, or of both passes if `backward`."""
    return option.cost.seconds * len(x.q) * (1 + option.machine.backward_ratio * backward)


def measure(
    bound: Bound,
    x: Inputs,
    *,
    backward: bool,
    engine: str | None = None,
    block_size: tuple[int, ...] = (),
    seconds: float = 1.0,
) -> tuple[list[TimedOption], Choice]:
    """Time the options of each branch, then the options for all branches together; return (timed options, choice).

    An option of one branch is not timed if it is predicted to take over 4 times as long as the branch's cheapest.
    Options that compute all branches together are compared with the fastest options of the branches, run one after the
    other and listed as one more timed option (BRANCH_BY_BRANCH). The choice is the fastest option for all branches
    together if it wins this comparison, else the fastest option of each branch.

    backward: time forward and backward.
    engine: None: the default of the device.
    block_size: (queries, keys) of a block in all options; empty: sizes that the planner chooses, and, for the options
        of one branch with engine "aten", each other size for which the device has rates.
    seconds: in each comparison no round of runs begins after this time, except the first three.

    Raises RuntimeError if the results of an option differ from those of the first in its comparison by more than the
    tolerance of their dtype.
    """
    device, order = x.q.device, Layout(bound.num_queries)
    engine = engine or device_kind(device).engine
    how = {"engine": engine, "backward": backward, "block_size": block_size}
    allowed = Allowed(masks=not block_size) if engine == "aten" else allowed_on(device)
    candidates = Candidates.of(bound, machine_of(device.type), allowed, x.operands)
    found: list[TimedOption] = []

    def fastest_of(options: Sequence[Option], branch: int | None) -> Option:
        runs = [trial(Plan.of(bound, order, ((option,),)), x, **how) for option in options]
        wanted: tuple[Tensor, ...] | None = None
        for run in runs:
            got = run()
            wanted = got if wanted is None else wanted
            _require_close(got, wanted, _TOLERANCE[x.q.dtype])
        times = map(median, time_in_rounds(runs, seconds=seconds, device=device))
        predicted = (predicted_seconds(option, x, backward=backward) for option in options)
        found.extend(measured := [TimedOption(branch, *each) for each in zip(options, predicted, times, strict=True)])
        return _fastest_option(measured).option

    fastest: list[Option] = []
    for branch, options in enumerate(candidates.branches):
        if engine == "aten" and not block_size:
            options = tuple(each for option in options for each in in_each_block_size(option))
        limit = _WORTH_MEASURING * min(each.cost.seconds for each in options)
        fastest.append(fastest_of([each for each in options if each.cost.seconds <= limit], branch))
    if candidates.together:
        terms = tuple(term for option in fastest for term in option.terms)
        apart = replace(candidates.together[0], layout=BRANCH_BY_BRANCH, terms=terms, shares_rows=True)
        if (best := fastest_of([apart, *candidates.together], None)) is not apart:
            return found, Choice(True, (way_of(best),))
    return found, Choice(False, tuple(map(way_of, fastest)))


def _require_close(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    for got, right in zip(found, wanted, strict=True):
        error, size = float((got.double() - right.double()).norm()), float(right.double().norm())
        if not error <= tolerance * size:  # never of NaN
            raise RuntimeError(
                f"ways to compute one attention must agree; got a difference of norm {error:.1e} of {size:.1e}"
            )


def _fastest_option(measured: Sequence[TimedOption]) -> TimedOption:
    return min(measured, key=lambda each: each.median_s)


def measure_options(
    bound: Bound,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    num_kv_heads: int,
    backward: bool,
) -> list[tuple[str, float, float]]:
    """Time the ways to compute a pattern; return [(name, predicted seconds, median measured seconds)].

    A way to compute one branch is not timed if it is predicted to take over 4 times as long as the branch's cheapest.
    If there are ways to compute all branches together, all of these are timed, and, as one more way, the fastest ways
    of the branches, one after the other. Times are of the forward, or with `backward` of forward and backward, for
    random inputs of one batch entry. In a mixture, the name of a way for one branch begins with the branch's number
    among the distinct branches, from 1: "branch 1: natural". Raises RuntimeError as `measure` does.
    """
    x = Inputs.of(bound, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=torch.device(device))
    many = len(bound.pattern.branches()) > 1
    return [
        (
            f"branch {each.branch + 1}: {each.name}" if many and each.branch is not None else each.name,
            each.predicted_s,
            each.median_s,
        )
        for each in measure(bound, x, backward=backward)[0]
    ]


def autotune(call: Call, q: Tensor, k: Tensor, v: Tensor, *, engine: str, has_bindings: bool) -> None:
    """Measure the ways to compute this call, unless it has been measured, and store the fastest for later calls.

    It measures forward and backward if gradients are enabled and q, k or v requires one, else forward; a measurement of
    forward alone is repeated at the first call that needs the backward. It measures nothing while torch.compile traces
    or for fake tensors.

    has_bindings: True if the pattern has run-time tensors.

    Raises ValueError for calls that cannot be tuned (another engine than "aten" or "flex", a layout, run-time tensors),
    and RuntimeError if the results of two ways disagree.
    """
    if engine not in ("aten", "flex"):
        raise ValueError(f"autotune=True needs engine 'aten' or 'flex', as it measures only these; got {engine=}")
    if call.rate > 1:
        raise ValueError(f"autotune=True needs tokens in natural order, layout=None; got a layout of rate {call.rate}")
    if has_bindings:
        raise ValueError(
            "autotune=True needs a pattern without run-time tensors, as their values change from call to call"
        )
    if torch.compiler.is_compiling() or isinstance(q, _torch_private.FakeTensor):
        return
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    key = TuningKey.of(call, q)
    if key in results and (results[key][1] or not backward):
        return
    # Any gradient of the output will do: its values do not affect the time.
    x = Inputs(q.detach(), k.detach(), v.detach(), q.detach())
    found, choice = measure(call.bound(), x, backward=backward, engine=engine, block_size=call.block_size)
    if debug_wanted():
        times = ", ".join(f"{each.name} {1e3 * each.median_s:.3g} ms" for each in found)
        what = f"{call.num_heads:,} heads, {call.num_queries:,} queries, {call.num_keys:,} keys"
        _log.debug("autotune measured %s, %s: %s", pattern_text(call.pattern), what, times)
    results[key] = choice, backward
