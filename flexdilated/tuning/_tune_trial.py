"""Trials: a plan run on tensors as the engine runs it, beside other plans of the same attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from ..engines import Result, make_flex_program, make_program, run_backward, run_flex, run_forward
from ..masks.core import Bound
from ..masks.planning import Plan

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class Inputs:
    """What is attended over, and the gradient of the output."""

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B G M D"]
    v: Float[Tensor, "B G M D"]
    grad: Float[Tensor, "B H N D"]

    @classmethod
    def of(
        cls, bound: Bound, *, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> Inputs:
        """Drawn from a seed of their own: torch's generators stay as they are."""
        generator = torch.Generator().manual_seed(0)
        queries, keys = (bound.num_heads, bound.num_queries), (num_kv_heads, bound.num_keys)
        drawn = (torch.randn(batch, *size, head_dim, generator=generator) for size in (queries, keys, keys, queries))
        return cls(*(x.to(device, dtype) for x in drawn))

    @classmethod
    def like(cls, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        """A call's own tensors; what stands for the gradient makes no difference to its time."""
        return cls(q.detach(), k.detach(), v.detach(), q.detach())


@dataclass(frozen=True)
class Times:
    """Seconds of each round of one trial."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The slowest round over the fastest."""
        return max(self.seconds) / min(self.seconds)


Run = Callable[[], tuple[Tensor, ...]]


def trial(plan: Plan, x: Inputs, *, engine: str, backward: bool, block_size: tuple[int, ...] = ()) -> Run:
    """A function that runs the plan: to the output, or with `backward` to the output and dq, dk, dv."""
    if engine == "flex":
        return _compiled(plan, x, backward, block_size)
    return _tiled(plan, x, backward, block_size)


def _compiled(plan: Plan, x: Inputs, backward: bool, block_size: tuple[int, ...]) -> Run:
    sides = (block_size[0], block_size[1]) if block_size else (128, 128)
    num_kv_heads, scale = x.k.shape[1], x.q.shape[-1] ** -0.5
    program = make_flex_program(plan, plan.layout, num_kv_heads=num_kv_heads, block_size=sides, device=x.q.device)

    def run() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(backward), torch.autocast(x.q.device.type, enabled=False):
            leaves = [each.detach().requires_grad_(backward) for each in (x.q, x.k, x.v)]
            out, _ = run_flex(program, *leaves, scale=scale, return_lse=False, direct=False)
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
            return (out, *run_backward(program, x.q, x.k, x.v, Result(out, lse, x.grad, None), scale))

    return run


def check_alike(runs: Sequence[Run], dtype: torch.dtype) -> None:
    """Run each once; RuntimeError where one's results are not those of the first, to the precision of their dtype."""
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
    """Time the runs in turn, round after round: 3 rounds, and more up to 15 while `seconds` last."""
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
