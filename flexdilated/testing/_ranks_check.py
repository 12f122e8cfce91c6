"""Are many ranks one? Two processes hold a part of the tokens each; together they are the definition."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from ._closeness import cotangents
from ._module import Calls, DoesNotApply, Failure, Subject, hold_gradients, hold_rows
from ._problem import tokens

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = 2
START_S = 120.0  # most time for the processes to begin
JOB_S = 120.0  # and for each job

# A function of a module, which the processes import, or a partial of one. Tensors go both ways as bytes: otherwise they
# would be shared with a process that may have ended.
RankJob = Callable[["DeviceMesh"], Any]


def check_ranks(subject: Subject) -> str:
    """Two processes with a gloo group, each with its part of the sequence, in order: outputs, and gradients if any."""
    if subject.calls.over_ranks is None:
        raise DoesNotApply("no module over ranks is given (Calls.over_ranks)")
    length = subject.lengths[-1]
    if length < RANKS:
        raise DoesNotApply(f"fewer tokens than ranks; got {length}")
    (found,) = examine_over_ranks([subject])
    if isinstance(found, Failure):
        raise found
    return found


def examine_over_ranks(subjects: Sequence[Subject]) -> list[str | Failure]:
    """What is found of each, one after the other, on the same two processes."""
    found: list[str | Failure] = []
    answers = on_two_processes([partial(_own_part, _sent(subject)) for subject in subjects], job_s=JOB_S)
    for subject, answer in zip(subjects, answers, strict=True):
        where = f"{tokens(subject.lengths[-1])} on {RANKS} ranks"
        try:
            if isinstance(answer, NoResult):
                raise Failure(str(answer))
            _hold_parts(where, subject, [pickle.loads(part) for part in answer])
            found.append(f"{where}: as on one")
        except Failure as failure:
            found.append(failure)
    return found


def _sent(subject: Subject) -> bytes:
    """How the module is called, and for each rank its part of q, k, v and the gradient of the output."""
    q, k, v = subject.inputs(subject.lengths[-1])
    grad, _ = cotangents(q, q[..., 0].double(), through_lse=False)
    # A plain pickle copies tensors, where the one that processes use would share them.
    parts = list(zip(*(x.cpu().tensor_split(RANKS, dim=2) for x in (q, k, v, grad)), strict=True))
    try:
        return pickle.dumps((replace(subject.calls, padded=None, packed=None, decoded=None), parts))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Failure(f"over_ranks and plain must be functions of a module, to be pickled: {error}") from None


def _own_part(sent: bytes, mesh: DeviceMesh) -> bytes:
    """On a rank: its part of the tokens through the module; the output and, where there are any, the gradients."""
    calls, parts = pickle.loads(sent)
    assert isinstance(calls, Calls)
    assert calls.over_ranks is not None
    *inputs, grad = (x.contiguous() for x in parts[mesh.get_rank()])
    leaves = [x.requires_grad_() for x in inputs]
    result = calls.plain(calls.over_ranks(mesh), *map(calls.into_layout, leaves))
    first = result[0] if isinstance(result, tuple | list) else result
    out = calls.out_of_layout(first, leaves[0].shape[1])
    results = [out.detach()]
    if out.requires_grad:
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)
        results += [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]
    return pickle.dumps([x.clone() for x in results])


def _hold_parts(where: str, subject: Subject, parts: list[list[torch.Tensor]]) -> None:
    problem = subject.problem(*subject.inputs(subject.lengths[-1]))
    out, *grads = (torch.cat(each, 2).to(subject.device) for each in zip(*parts, strict=True))
    hold_rows(where, problem, out)
    if grads:
        hold_gradients(where, problem, grads)


class NoResult(RuntimeError):
    """A job on two processes came to no result; the message says why, and for which of them."""


def on_two_processes(jobs: Sequence[RankJob], *, job_s: float) -> list[list[Any] | NoResult]:
    """What each rank answers to each job.

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


def _collect(started: Sequence[tuple[BaseProcess, Connection]], count: int, job_s: float) -> list[list[Any] | NoResult]:
    results: list[list[Any] | NoResult] = []
    try:
        _answers(started, START_S, "begin")
        for _ in range(count):
            results.append(_answers(started, job_s, "end"))
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


def _rank(rank: int, meeting: str, sender: Connection, jobs: Sequence[RankJob], job_s: float) -> None:
    """One process: tell that it has begun, then what each job returns, or what it raised."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere gloo finds the way by the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        mesh = _meet(rank, meeting, timedelta(seconds=job_s))
        sender.send((None, None))
        for job in jobs:
            sender.send((None, job(mesh)))
    except Exception as error:  # the process that waits reports it
        sender.send((f"{type(error).__name__}: {error}", None))
    # The group is not destroyed: the other process may still use it, and both are ended afterwards.
    sender.close()


def _meet(rank: int, meeting: str, timeout: timedelta) -> DeviceMesh:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timeout)
    mesh = init_device_mesh("cpu", (RANKS,))
    dist.barrier()
    return mesh
