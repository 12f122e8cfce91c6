"""Functions on many ranks: `on_ranks(4, function, *args)` runs one on four processes that share a gloo group.

    def sum_over_ranks(value):
        total = torch.tensor(value) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        return total

    assert on_ranks(3, sum_over_ranks, 2) == [12, 12, 12]

The function is one of a module's own, and its arguments and results are pickled, tensors by value. It finds the default
process group made; the next call gets a new one. The processes stay for the next call, with all that they keep:
compiled code, caches, counters. A warning is an error there, as in the suite. After a call that failed on any rank, its
processes are killed, and the next call gets new ones. Workers are forked from one process that has imported what most
of them need. Where it matters that a group gives up soon, ranks call `set_group_timeout` where they begin to fail.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench._processes import PRELOADED
from tests.support.rank_worker import Order, serve

START_TIMEOUT_S = 300
TIMEOUT_S = 300  # by which a call hangs; none that is right comes near it, however busy the machine is
GRACE_S = 2.0  # once a rank has failed, the others get this long to say that they failed too

context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    # A pytest process has one server: the benchmark's processes are forked from it too.
    PRELOADED += ["pytest", "torch._inductor.compile_fx", "tests.support.sharded_cases"]
    context.set_forkserver_preload(PRELOADED)
_folder = tempfile.TemporaryDirectory(prefix="ranks-")
_workers: list["_Worker"] = []


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its result, or what went wrong (a traceback, "died with exit code 7", "did not end ...")."""

    rank: int
    result: Any = None
    error: str | None = None


@contextmanager
def one_rank(axis: str | None = None) -> Iterator[DeviceMesh]:
    """A mesh of this process alone; its gloo group ends with the block."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=(axis,) if axis else None)
    finally:
        dist.destroy_process_group()


class _Worker:
    """A process, and the connection to it."""

    def __init__(self, number: int) -> None:
        self.stacks = Path(_folder.name, f"stacks-{number}-{time.monotonic_ns()}")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(self.stacks)), daemon=True)
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        assert self.pipe.poll(START_TIMEOUT_S), "a worker did not start"
        assert self.pipe.recv_bytes() == b"ready"

    def stack(self) -> str:
        """Where the process is now, all threads."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stacks.read_text(encoding="utf-8")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.stacks.unlink(missing_ok=True)


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S, group_timeout: float | None = None
) -> list[Any]:
    """Each rank's result. Raises AssertionError with every rank's error if any failed or did not end in time.

    Both times are in seconds. The group's is that of its collectives, by default half of the other.
    """
    ended = _run(size, function, args, timeout, group_timeout, GRACE_S)
    errors = [f"rank {outcome.rank} of {size}: {outcome.error}" for outcome in ended if outcome.error is not None]
    if errors:
        raise AssertionError("\n".join([f"{function.__qualname__} failed on ranks", *errors]))
    return [outcome.result for outcome in ended]


def outcomes_on_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S, group_timeout: float | None = None
) -> list[Outcome]:
    """How each rank ended, also where it raised, died (`os._exit(7)`) or did not end in time; nothing is raised."""
    return _run(size, function, args, timeout, group_timeout, grace=timeout)


def _run(
    size: int, function: Callable[..., Any], args: tuple, timeout: float, group_timeout: float | None, grace: float
) -> list[Outcome]:
    group_timeout = timeout / 2 if group_timeout is None else group_timeout
    assert group_timeout < timeout, "a collective that hangs ends before the call does"
    call = pickle.dumps((function, args))
    workers = _at_least(size)[:size]
    store = str(Path(_folder.name, f"store-{time.monotonic_ns()}"))
    try:
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps(tuple(Order(call, rank, size, store, group_timeout))))
        outcomes = _collect(workers, timeout, grace)
    except BaseException:  # the test's own timeout, or a key pressed: these workers are somewhere in a call
        _replace(workers)
        raise
    if any(outcome.error is not None for outcome in outcomes):
        _replace(workers)
    Path(store).unlink(missing_ok=True)
    return outcomes


def _at_least(size: int) -> list[_Worker]:
    new = [_Worker(number) for number in range(len(_workers), size)]
    _workers.extend(new)
    try:
        for worker in new:
            worker.wait_until_ready()
    except BaseException:
        _replace(new)
        raise
    return _workers


def _collect(workers: list[_Worker], timeout: float, grace: float) -> list[Outcome]:
    """Outcomes by rank; who is not done at the deadline gets its stack as an error."""
    start = time.monotonic()
    deadline = start + timeout
    running = {worker.pipe: rank for rank, worker in enumerate(workers)}
    outcomes: dict[int, Outcome] = {}
    while running and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(running), left):
            rank = running.pop(pipe)
            outcomes[rank] = _outcome(rank, workers[rank])
            if outcomes[rank].error is not None:
                deadline = min(deadline, time.monotonic() + grace)
    elapsed = time.monotonic() - start
    for rank in running.values():
        text = f"did not end in {elapsed:.1f} s; it was here:\n{workers[rank].stack()}"
        outcomes[rank] = Outcome(rank, error=text)
    return [outcomes[rank] for rank in sorted(outcomes)]


def _outcome(rank: int, worker: _Worker) -> Outcome:
    try:
        well, value = pickle.loads(worker.pipe.recv_bytes())
    except EOFError:
        worker.process.join(5)
        return Outcome(rank, error=f"died with exit code {worker.process.exitcode}")
    return Outcome(rank, result=value) if well else Outcome(rank, error=value)


def _replace(workers: list[_Worker]) -> None:
    for worker in list(workers):
        _workers.remove(worker)
        worker.end()


@atexit.register
def _end_all() -> None:
    _replace(_workers)
    _folder.cleanup()
