"""Run a module on two processes (ranks) with a part of the tokens each, and join their outputs and gradients."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ._closeness import cotangents
from ._subject import Calls, Failure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = 2
LIMIT_S = 240.0  # time limit of the processes, from their start

# Tensors are sent as bytes; shared memory would depend on a process that may have ended.


def run_over_ranks(calls: Calls, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Run a module on RANKS processes with a part of the tokens each; return [out, dq, dk, dv], joined on the CPU.

    q (B, H, N, D), k and v (B, G, N, D). The gradients are for `cotangents` of out. The result is [out] if out requires
    no gradient. Raises Failure if the functions cannot be pickled, or if a process raises, exits early or takes more
    than LIMIT_S.
    """
    grad, _ = cotangents(q, q[..., 0].double(), through_lse=False)
    # pickle copies tensors; multiprocessing's pickler would share them.
    parts = list(zip(*(x.cpu().tensor_split(RANKS, dim=2) for x in (q, k, v, grad)), strict=True))
    try:
        sent = pickle.dumps((replace(calls, padded=None, packed=None, decoded=None), parts))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Failure(f"over_ranks and plain are pickled, so define them at the top level of a file: {error}") from None
    answers = map(pickle.loads, _answers_of_ranks(sent))
    return [torch.cat(each, 2) for each in zip(*answers, strict=True)]


def _answers_of_ranks(sent: bytes) -> list[bytes]:
    """Run `_run_rank` in RANKS processes; return the bytes that each answers, in order of rank.

    sent: pickle for `_results_of_rank`.

    Raises Failure if a rank raises, exits early, or exceeds LIMIT_S. No process outlives the call.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name), monotonic() + LIMIT_S
        started: Any = start_processes(_run_rank, (folder, sent, LIMIT_S), nprocs=RANKS, join=False, daemon=True)
        try:
            while not started.join(timeout=max(0.0, end - monotonic())):
                if monotonic() >= end:
                    late = " and ".join(str(rank) for rank, each in enumerate(started.processes) if each.is_alive())
                    raise Failure(f"rank {late} of {RANKS} did not end within {LIMIT_S:.0f} s, and was ended")
        except ProcessRaisedException as error:
            raise Failure((folder / f"error-{error.error_index}").read_text(encoding="utf-8")) from None
        except ProcessExitedException as error:
            raise Failure(f"rank {error.error_index} of {RANKS} ended with exit code {error.exit_code}") from None
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        return [(folder / f"answer-{rank}").read_bytes() for rank in range(RANKS)]


def _run_rank(rank: int, folder: Path, sent: bytes, timeout_s: float) -> None:
    """Run one rank in a gloo group of RANKS; write its answer to `folder`. An error is written there and raised."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere gloo resolves the host name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        meeting = f"file://{folder / 'meeting'}"  # a file needs no port
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timeout)
        mesh = init_device_mesh("cpu", (RANKS,))
        dist.barrier()
        (folder / f"answer-{rank}").write_bytes(_results_of_rank(sent, mesh))
    except Exception as error:
        said = f"rank {rank} of {RANKS} raises {type(error).__name__}: {error}"
        (folder / f"error-{rank}").write_text(said, encoding="utf-8")
        raise
    # The group is not destroyed: the other process may still use it.


def _results_of_rank(sent: bytes, mesh: DeviceMesh) -> bytes:
    """Compute a rank's part of the output and, if it requires a gradient, of dq, dk and dv; return their pickle.

    sent: pickle of the `Calls` and of (q, k, v, gradient of the output) for each rank.
    """
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
