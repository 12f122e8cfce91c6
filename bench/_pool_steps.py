"""Steps over ranks with and without a pool: equal results, their times, what the pool did, and peak memory."""

from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import masks
from flexdilated.distributed import BufferPool
from flexdilated.distributed._attend import attend

from ._memory import peak_here
from ._rank_step import NAMES, Step, local_tensors

_WARM_UP_STEPS = 2
_TINY_TOKENS = 64
WITHOUT, WITH = "without a pool", "with a pool"


class Taker:
    """A step of this rank: forward and backward, with the buffers of a pool or without one."""

    def __init__(self, mesh: DeviceMesh, step: Step) -> None:
        self._pattern = masks.from_json(step.pattern)
        sharding, (self._q, self._k, self._v, self._grad) = local_tensors(mesh, step)
        self._how: dict[str, Any] = {"mesh": mesh, "sharding": sharding, "schedule": step.schedule}

    def __call__(self, pool: BufferPool | None) -> tuple[Tensor, ...]:
        leaves = self._q, self._k, self._v
        out = attend(*leaves, self._pattern, pool=pool, **self._how)
        return out.detach(), *torch.autograd.grad(out, leaves, self._grad)


def times_and_statistics(mesh: DeviceMesh, step: Step, threshold_bytes: int, num_steps: int) -> dict[str, Any]:
    """Seconds of each step both ways, taken in turns, and the pool's statistics after warm-up."""
    pool, take = BufferPool("cpu", threshold_bytes=threshold_bytes), Taker(mesh, step)
    ways: dict[str, BufferPool | None] = {WITHOUT: None, WITH: pool}
    for _ in range(_WARM_UP_STEPS):
        for name, made, leased in zip(NAMES, take(None), take(pool), strict=True):
            assert torch.equal(made, leased), f"{name} must be the same with and without a pool"
    pool.reset()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_steps):
        for name, way in ways.items():
            dist.barrier()
            start = perf_counter()
            take(way)
            seconds[name].append(perf_counter() - start)
    found = pool.statistics
    return {**seconds, **asdict(found), "reuse_rate": found.reuse_rate}


def peak_of_steps(mesh: DeviceMesh, step: Step, threshold_bytes: int, num_steps: int, pooled: bool) -> int:
    """Most bytes that the steps add to this rank's memory, after a tiny one that is not counted."""
    Taker(mesh, replace(step, size=replace(step.size, num_tokens=_TINY_TOKENS)))(None)
    take = Taker(mesh, step)
    pool = BufferPool("cpu", threshold_bytes=threshold_bytes) if pooled else None
    dist.barrier()

    def steps() -> None:
        for _ in range(num_steps):
            take(pool)

    return peak_here(steps)
