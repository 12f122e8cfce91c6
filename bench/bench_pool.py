"""Do buffers for what is sent come from a pool after warm-up, and where does that pay?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import masks
from flexdilated.distributed import BufferPool
from flexdilated.distributed._attend import attend
from flexdilated.distributed._pool import lease_from
from flexdilated.distributed._pools import break_even_bytes

from ._claims_pool import LEASED_TEMPORARY, RING_MEMORY, RING_TIME
from ._longnets import longnet_n
from ._memory import peak_of
from ._problem import Size
from ._rank_step import NAMES, Step, local_tensors
from ._ranks import on_ranks
from ._result import Result, Row, Timing, at_least, at_most
from ._timing import Job, interleave, ratio

_PAGE = 4096
_CPU = torch.device("cpu")
_REUSE, _ALLOCATIONS = at_least(99, "%"), at_most(0)
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Config:
    """Steps of LongNet over so many ranks, forward and backward; then single buffers of these sizes."""

    size: Size
    num_ranks: int
    threshold_bytes: int
    num_steps: int
    buffer_bytes: tuple[int, ...]
    repeats: int

    def step(self, schedule: str) -> Step:
        pattern = masks.to_json(longnet_n(self.size.num_tokens).as_causal().pattern())
        return Step(pattern, self.size, self.size.num_heads, schedule, "zigzag")


FULL = Config(
    Size(8192, num_heads=8), num_ranks=4, threshold_bytes=1 << 20, num_steps=12,
    buffer_bytes=tuple(1 << power for power in range(16, 27)), repeats=15,
)  # fmt: skip
SMALL = Config(Size(256, num_heads=2, head_dim=8), 2, 1 << 10, 2, (1 << 16, 1 << 24), repeats=3)


def run(config: Config) -> Result:
    """D6. With and without a pool, outputs and gradients are seen to be equal bit by bit."""
    rows = []
    for schedule in ("exchange", "ring"):
        step = config.step(schedule)
        by_rank = on_ranks(config.num_ranks, _with_and_without, step, config)
        rows += _reuse_rows(schedule, config, by_rank)
        if schedule == "ring":
            rows.append(_time_row(by_rank))
            rows.append(_memory_row(step, config))
    return Result((*rows, *_buffer_rows(config)))


def _reuse_rows(schedule: str, config: Config, by_rank: Sequence[dict[str, Any]]) -> list[Row]:
    worst = max(by_rank, key=lambda found: found["statistics"]["num_allocations"])["statistics"]
    reuse = min(found["reuse_rate"] for found in by_rank)
    name = f"LongNet, causal, {config.size}, {config.num_ranks} ranks, {schedule}, forward + backward"
    fragmentation = max(found["fragmentation_at_peak"] for found in by_rank)
    detail = {"steps": config.num_steps, "largest_fragmentation_at_peak": fragmentation, "statistics": worst}
    return [
        Row(f"{name}: leases that find a buffer, after warm-up", _REUSE, 100 * reuse, _timings(by_rank), detail),
        Row(f"{name}: buffers allocated a step, after warm-up", _ALLOCATIONS, worst["num_allocations"] / config.num_steps),
    ]


def _timings(by_rank: Sequence[dict[str, Any]]) -> tuple[Timing, Timing]:
    """Each step takes as long as its slowest rank."""
    made, leased = (
        Timing(name, tuple(max(times) for times in zip(*(found[name] for found in by_rank), strict=True)))
        for name in ("without pool", "with pool")
    )
    return made, leased


def _time_row(by_rank: Sequence[dict[str, Any]]) -> Row:
    made, leased = _timings(by_rank)
    return RING_TIME.row(100 * (1 - leased.median_s / made.median_s), (made, leased))


def _memory_row(step: Step, config: Config) -> Row:
    """Each in processes of its own: what one leaves behind in the heap must not serve the other."""
    made, leased = (
        max(on_ranks(config.num_ranks, _peak, step, config, pooled)) for pooled in (False, True)
    )
    return RING_MEMORY.row(100 * (1 - leased / max(1, made)), peak_bytes=leased, peak_bytes_without=made)


def _take(mesh: DeviceMesh, step: Step, tensors: Sequence[Tensor], pool: BufferPool | None) -> tuple[Tensor, ...]:
    sharding, q, k, v, grad = *tensors[:1], *tensors[1:]  # type: ignore[misc]
    raise NotImplementedError


def _with_and_without(mesh: DeviceMesh, step: Step, config: Config) -> dict[str, Any]:
    pool = BufferPool("cpu", threshold_bytes=config.threshold_bytes)
    ways = {"without pool": None, "with pool": pool}
    take = _Taker(mesh, step)
    for _ in range(_WARM_UP_STEPS):
        found = [take(way) for way in ways.values()]
        for name, made, leased in zip(NAMES, *found, strict=True):
            assert torch.equal(made, leased), f"{name} must be the same with and without a pool"
    pool.reset()
    seconds = {name: [] for name in ways}
    for _ in range(config.num_steps):
        for name, way in ways.items():
            dist.barrier()
            start = perf_counter()
            take(way)
            seconds[name].append(perf_counter() - start)
    statistics = pool.statistics
    fragmentation = statistics.peak_bytes / max(1, statistics.peak_leased_bytes)
    plain = {name: number for name, number in asdict(statistics).items()}
    return {**seconds, "statistics": plain, "reuse_rate": statistics.reuse_rate, "fragmentation_at_peak": fragmentation}


def _peak(mesh: DeviceMesh, step: Step, config: Config, pooled: bool) -> int:
    raise NotImplementedError


def _buffer_rows(config: Config) -> list[Row]:
    raise NotImplementedError
