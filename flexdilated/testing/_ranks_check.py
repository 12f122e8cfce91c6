"""Are many ranks one? Processes of this machine hold a part of the tokens each; together they are the definition."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ._closeness import hold
from ._module_calls import Calls
from ._module_subject import DoesNotApply, Failure, Subject
from ._rounding import expected
from ._words import tokens

_RANKS = 2
_TIMEOUT_S = 120.0


def check_ranks(subject: Subject) -> str:
    """Two processes with a gloo group, each with its part of the sequence, in order."""
    calls = subject.calls
    if calls.over_ranks is None:
        raise DoesNotApply("no module over ranks is given (Calls.over_ranks)")
    length = subject.lengths[-1]
    if length < _RANKS:
        raise DoesNotApply(f"fewer tokens than ranks; got {length}")
    try:
        sent = pickle.dumps(replace(calls, padded=None, packed=None, decoded=None))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Failure(f"over_ranks and plain must be functions of a module, to be pickled: {error}") from None
    q, k, v = subject.inputs(length)
    with tempfile.TemporaryDirectory() as folder:
        parts = _together(Path(folder), sent, (q.cpu(), k.cpu(), v.cpu()))
    problem = subject.problem(q, k, v)
    rows = (problem.times() > 0).any(-1)
    try:
        truth = expected(problem, gradients=False, through_lse=False)["out"]
        hold(problem, "out", torch.cat(parts, 2).to(subject.device), truth, rows=rows)
    except AssertionError as error:
        raise Failure(f"{tokens(length)} on {_RANKS} ranks: {error}") from None
    return f"{tokens(length)} on {_RANKS} ranks: as on one"


def _together(folder: Path, calls: bytes, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Each rank's output, in order."""
    torch.save(tensors, folder / "inputs")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, str(folder), calls), daemon=True) for rank in range(_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_TIMEOUT_S)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    for rank in range(_RANKS):
        told = folder / f"error-{rank}"
        if told.exists():
            raise Failure(f"rank {rank} of {_RANKS} raises {told.read_text(encoding='utf-8')}")
    if late:
        raise Failure(f"{len(late)} of {_RANKS} ranks did not end within {_TIMEOUT_S:.0f} s")
    for rank, process in enumerate(processes):
        if process.exitcode:
            raise Failure(f"rank {rank} of {_RANKS} died with exit code {process.exitcode}")
    return [torch.load(folder / f"out-{rank}") for rank in range(_RANKS)]


def _rank(rank: int, place: str, pickled: bytes) -> None:
    """One process: its part of the tokens through the module."""
    folder = Path(place)
    try:
        out = _own_part(rank, folder, pickle.loads(pickled))
    except Exception as error:  # told to the process that waits
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise
    torch.save(out, folder / f"out-{rank}")


def _own_part(rank: int, folder: Path, calls: Calls) -> Tensor:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    assert calls.over_ranks is not None
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=_RANKS)
    try:
        module = calls.over_ranks(init_device_mesh("cpu", (_RANKS,)))
        q, k, v = (x.tensor_split(_RANKS, dim=2)[rank].contiguous() for x in torch.load(folder / "inputs"))
        with torch.no_grad():
            result = calls.plain(module, *(calls.into_layout(x) for x in (q, k, v)))
        first = result[0] if isinstance(result, tuple | list) else result
        return calls.out_of_layout(first, q.shape[1]).clone()
    finally:
        dist.destroy_process_group()
