"""The jobs of `doctor --verify` on two processes: each holds half of the tokens and gets half of the result."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._verify_measure import Measured, gradients, measure
from ._verify_problem import BRANCHES, Problem, dilated, error_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = 2
START_S, JOB_S = 120.0, 30.0  # most time for the processes to begin, and for each job

RankJob = Callable[["DeviceMesh"], Measured]  # a function of its module, which the processes import


class NoResult(RuntimeError):
    """A job on two processes came to no result; the message says why, and for which of them."""


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
    """What the ranks measured of each job: the largest error and memory, the median of their times.

    The jobs run one after the other. Where a process raises, ends or takes longer than `job_s` seconds, that job has no
    result, nor have those after it. No process outlives the call. No port is chosen: the processes meet by a file.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(RANKS):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, str(Path(folder, "meeting")), theirs, tuple(jobs), job_s)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append((process, ours))
            return _collect(started, len(jobs), job_s)
        finally:
            for process, ours in started:
                process.kill()
                process.join()
                ours.close()


def _collect(started: Sequence[tuple[BaseProcess, Connection]], count: int, job_s: float) -> list[Measured | NoResult]:
    results: list[Measured | NoResult] = []
    try:
        _answers(started, START_S, "begin")
        for _ in range(count):
            results.append(_joined(_answers(started, job_s, "end")))
    except NoResult as error:
        results.append(error)
    untried = NoResult("was not tried, as the job before it came to no result")
    return [*results, *[untried] * (count - len(results))]


def _answers(started: Sequence[tuple[BaseProcess, Connection]], limit_s: float, what: str) -> list[Any]:
    """One answer of each process, in their order. Raises NoResult for the first that has none, or tells an error."""
    end, answers = monotonic() + limit_s, {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(started)}
    while waiting:
        ready = wait(list(waiting), max(0.0, end - monotonic()))
        if not ready:
            late = " and ".join(str(rank) for rank in waiting.values())
            raise NoResult(f"rank {late} of {RANKS} did not {what} within {limit_s:.0f} s, and was ended")
        for connection in ready:
            rank = waiting.pop(connection)  # pyright: ignore[reportArgumentType]
            answers[rank] = _answer(started[rank], rank)
    return [answers[rank] for rank in range(len(started))]


def _answer(started: tuple[BaseProcess, Connection], rank: int) -> Any:
    process, connection = started
    try:
        error, answer = connection.recv()
    except EOFError:
        process.join()
        raise NoResult(f"rank {rank} of {RANKS} ended with exit code {process.exitcode}") from None
    if error is not None:
        raise NoResult(f"rank {rank} of {RANKS} raises {error}")
    return answer


def _joined(measured: Sequence[Measured]) -> Measured:
    backward = [each.backward_s for each in measured if each.backward_s is not None]
    memory = [each.memory_bytes for each in measured if each.memory_bytes is not None]
    return Measured(
        max(each.error for each in measured),
        median(each.forward_s for each in measured),
        median(backward) if backward else None,
        max(memory, default=None),
    )


def _rank(rank: int, meeting: str, sender: Connection, jobs: Sequence[RankJob], job_s: float) -> None:
    """One process: tell that it has begun, then of each job what was measured, or what it raised."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere gloo finds the way by the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        mesh = _meet(rank, meeting, timedelta(seconds=job_s))
        sender.send((None, None))
        for job in jobs:
            sender.send((None, job(mesh)))
    except Exception as error:  # whatever it is, the process that waits is to tell it
        sender.send((f"{type(error).__name__}: {error}", None))
    # Nothing is taken apart: the other process may be in the middle of something, and both are ended.
    sender.close()


def _meet(rank: int, meeting: str, timeout: timedelta) -> DeviceMesh:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timeout)
    mesh = init_device_mesh("cpu", (RANKS,))
    dist.barrier()
    return mesh


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
