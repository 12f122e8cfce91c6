"""The jobs of `doctor --verify` on two processes: each holds half of the tokens and gets half of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..testing._two_processes import RANKS, NoResult, RankJob, on_two_processes
from ._verify_measure import Measured, gradients, measure
from ._verify_problem import BRANCHES, Problem, dilated, error_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

JOB_S = 30.0  # most time for each job


def exchange(mesh: DeviceMesh) -> Measured:
    """RingDilatedAttention, keys in one exchange."""
    return _ring(mesh, "exchange")


def ring(mesh: DeviceMesh) -> Measured:
    """RingDilatedAttention, keys from rank to rank."""
    return _ring(mesh, "ring")


def head_parallel(mesh: DeviceMesh) -> Measured:
    """HeadParallelDilatedAttention."""
    from ..nn import HeadParallelDilatedAttention

    return _own_half(HeadParallelDilatedAttention(*BRANCHES, causal=True, mesh=mesh), mesh)


JOBS: Mapping[str, RankJob] = {
    "RingDilatedAttention, exchange": exchange,
    "RingDilatedAttention, ring": ring,
    "HeadParallelDilatedAttention": head_parallel,
}


def on_ranks(jobs: Sequence[RankJob], *, job_s: float = JOB_S) -> list[Measured | NoResult]:
    """What the ranks measured of each job: the largest error and memory, the median of their times."""
    results = on_two_processes(jobs, job_s=job_s)
    return [result if isinstance(result, NoResult) else _joined(result) for result in results]


def _joined(measured: Sequence[Measured]) -> Measured:
    backward = [each.backward_s for each in measured if each.backward_s is not None]
    memory = [each.memory_bytes for each in measured if each.memory_bytes is not None]
    return Measured(
        max(each.error for each in measured),
        median(each.forward_s for each in measured),
        median(backward) if backward else None,
        max(memory, default=None),
    )


def _ring(mesh: DeviceMesh, schedule: str) -> Measured:
    from ..nn import RingDilatedAttention

    return _own_half(RingDilatedAttention(*BRANCHES, causal=True, mesh=mesh, schedule=schedule), mesh)


def _own_half(module: torch.nn.Module, mesh: DeviceMesh) -> Measured:
    """This rank's tokens through the module, against its half of the exact results for all."""
    problem, rank = Problem.of(dilated()), mesh.get_rank()

    def own(x: Tensor) -> Tensor:
        return x.tensor_split(RANKS, dim=2)[rank]

    exact, grad = [own(x) for x in problem.exact()], own(problem.grad)
    inputs = [own(x).float().contiguous().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = module(*inputs)
    error = error_of((out, *gradients(out, grad, inputs)), exact)
    del out
    device = torch.device("cpu")
    return Measured(error, *measure(lambda: module(*inputs), lambda out: gradients(out, grad, inputs), device))
