"""Are buffers for what is sent there again after warm-up, and how many are made a step?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexdilated import masks

from ._longnets import longnet_n
from ._pool_steps import times_and_statistics
from ._problem import Size
from ._rank_step import Schedule, Step
from ._ranks import on_ranks
from ._result import Result, Row, at_least, at_most

Found = Sequence[Mapping[str, Any]]

SCHEDULES: tuple[Schedule, ...] = ("exchange", "ring")
_REUSE, _ALLOCATIONS = at_least(99, "%"), at_most(0)


@dataclass(frozen=True)
class Config:
    """Steps of LongNet over so many ranks, forward and backward."""

    size: Size
    num_ranks: int
    threshold_bytes: int
    num_steps: int

    def step(self, schedule: Schedule) -> Step:
        pattern = longnet_n(self.size.num_tokens).as_causal().pattern()
        return Step(masks.to_json(pattern), self.size, self.size.num_heads, schedule, "zigzag")


FULL = Config(
    Size(4096, num_heads=8, repeats=15),
    num_ranks=4,
    threshold_bytes=1 << 20,
    num_steps=8,
)
SMALL = Config(Size(256, num_heads=2, head_dim=8, repeats=3), 2, 1 << 10, 2)


def run(config: Config) -> Result:
    """D6. With and without a pool, outputs and gradients are seen to be equal bit by bit."""
    return Result(tuple(row for schedule in SCHEDULES for row in _reuse_rows(schedule, config)))


def of_ranks(schedule: Schedule, config: Config) -> Found:
    """What each rank found: its times with a pool and without one, and the pool's statistics."""
    options = config.step(schedule), config.threshold_bytes, config.num_steps
    return on_ranks(config.num_ranks, times_and_statistics, *options)


def _reuse_rows(schedule: Schedule, config: Config) -> tuple[Row, Row]:
    by_rank = of_ranks(schedule, config)
    name = f"LongNet, causal, {config.size}, {config.num_ranks} ranks, {schedule}, forward + backward"
    detail = {
        "steps": config.num_steps,
        "threshold_bytes": config.threshold_bytes,
        "leases_a_step": max(found["num_leases"] for found in by_rank) / config.num_steps,
        "below_threshold_a_step": max(found["num_plain"] for found in by_rank) / config.num_steps,
        "peak_bytes": max(found["peak_bytes"] for found in by_rank),
        "held_over_leased_at_peak": max(found["peak_bytes"] / max(1, found["peak_leased_bytes"]) for found in by_rank),
    }
    reuse = 100 * min(found["reuse_rate"] for found in by_rank)
    allocations = max(found["num_allocations"] for found in by_rank) / config.num_steps
    return (
        Row(f"{name}: leases that find a buffer, after warm-up", _REUSE, reuse, detail=detail),
        Row(f"{name}: buffers allocated a step, after warm-up", _ALLOCATIONS, allocations, detail=detail),
    )
