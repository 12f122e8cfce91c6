"""Do buffers for what is sent come from a pool after warm-up, and where does that pay?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexdilated import masks
from flexdilated.distributed import BufferPool
from flexdilated.distributed._pool import lease_from
from flexdilated.distributed._pools import break_even_bytes

from ._buffer_claims import IMPROVED_TEMPORARIES, MEMORY, PLAIN_TEMPORARIES, RING_TIME, SPARSE_RING_TIME
from ._claims import Claim
from ._longnets import longnet_n
from ._pool_steps import WITH, WITHOUT, peak_of_steps, times_and_statistics
from ._problem import Size
from ._rank_step import Schedule, Step
from ._ranks import on_ranks
from ._result import Result, Row, Timing, at_least, at_most
from ._timing import Job, interleave

Found = Sequence[Mapping[str, Any]]

_CPU = torch.device("cpu")
_REUSE, _ALLOCATIONS = at_least(99, "%"), at_most(0)
_MEMORY_STEPS = 2
_TIME_CLAIMS: dict[Schedule, Claim] = {"exchange": SPARSE_RING_TIME, "ring": RING_TIME}


@dataclass(frozen=True)
class Config:
    """Steps of LongNet over so many ranks, forward and backward; then single buffers of these sizes."""

    size: Size
    num_ranks: int
    threshold_bytes: int
    num_steps: int
    buffer_bytes: tuple[int, ...]

    def step(self, schedule: Schedule) -> Step:
        pattern = longnet_n(self.size.num_tokens).as_causal().pattern()
        return Step(masks.to_json(pattern), self.size, self.size.num_heads, schedule, "zigzag")


FULL = Config(
    Size(4096, num_heads=8, repeats=15),
    num_ranks=4,
    threshold_bytes=1 << 20,
    num_steps=8,
    buffer_bytes=tuple(1 << power for power in range(16, 27)),
)
SMALL = Config(Size(256, num_heads=2, head_dim=8, repeats=3), 2, 1 << 10, 2, (1 << 16, 1 << 23, 1 << 24))


def run(config: Config) -> Result:
    """D6. With and without a pool, outputs and gradients are seen to be equal bit by bit."""
    reused, claimed = [], []
    for schedule, claim in _TIME_CLAIMS.items():
        options = config.step(schedule), config.threshold_bytes, config.num_steps
        by_rank = on_ranks(config.num_ranks, times_and_statistics, *options)
        reused += _reuse_rows(schedule, config, by_rank)
        made, leased = timings = _slowest(by_rank)
        claimed.append(claim.row(100 * (1 - leased.median_s / made.median_s), timings))
    return Result((*reused, *_buffer_rows(config), *claimed, _memory_row(config)))


def _reuse_rows(schedule: str, config: Config, by_rank: Found) -> tuple[Row, Row]:
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


def _slowest(by_rank: Found) -> tuple[Timing, Timing]:
    """Without a pool and with one: a step takes as long as its slowest rank."""
    made, leased = (
        Timing(name, tuple(max(times) for times in zip(*(found[name] for found in by_rank), strict=True)))
        for name in (WITHOUT, WITH)
    )
    return made, leased


def _memory_row(config: Config) -> Row:
    """Each in processes of its own: what one leaves in the heap must not serve the other."""
    options = config.step("ring"), config.threshold_bytes, _MEMORY_STEPS
    made, leased = (max(on_ranks(config.num_ranks, peak_of_steps, *options, pooled)) for pooled in (False, True))
    return MEMORY.row(100 * (1 - leased / max(1, made)), peak_bytes=leased, peak_bytes_without=made)


def _buffer_rows(config: Config) -> list[Row]:
    """Single buffers by size, and the two sizes of the claims about temporaries."""
    found = {size: _lease_and_make(size, config.size.repeats) for size in config.buffer_bytes}
    saved = {size: 100 * (1 - leased.median_s / made.median_s) for size, (leased, made) in found.items()}
    largest = max(config.buffer_bytes)
    detail = {
        "break_even_bytes": break_even_bytes(_CPU),
        "sizes": [
            {"bytes": size, "leased_s": leased.median_s, "made_s": made.median_s}
            for size, (leased, made) in found.items()
        ],
    }
    name = f"a buffer of {largest >> 20} MiB, written once: time saved by a lease"
    claims = ((PLAIN_TEMPORARIES, 8 << 20), (IMPROVED_TEMPORARIES, 16 << 20))
    return [
        Row(name, at_least(0, "%"), saved[largest], found[largest], detail),
        *(claim.row(saved[size], found[size]) for claim, size in claims),
    ]


def _lease_and_make(num_bytes: int, repeats: int) -> tuple[Timing, Timing]:
    pool = BufferPool(_CPU, threshold_bytes=0)

    def touch(lessor: BufferPool | None) -> None:
        with lease_from(lessor, (num_bytes,), torch.uint8, _CPU, role="keys") as buffer:
            buffer.zero_()

    jobs = Job(WITH, lambda _: touch(pool)), Job(WITHOUT, lambda _: touch(None))
    for job in jobs:
        job.run(None)
    leased, made = interleave(jobs, repeats=repeats)
    return leased, made
