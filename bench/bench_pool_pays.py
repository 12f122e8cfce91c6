"""Where does a pool of buffers save time or memory?"""

from dataclasses import dataclass

import torch

from flexdilated.distributed import BufferPool
from flexdilated.distributed.wire._pool import lease_from
from flexdilated.distributed.wire._pools import break_even_bytes

from . import bench_pool
from ._buffer_claims import IMPROVED_TEMPORARIES, MEMORY, PLAIN_TEMPORARIES, RING_TIME, SPARSE_RING_TIME
from ._claims import Claim
from ._pool_steps import WITH, WITHOUT, peak_of_steps
from ._rank_step import Schedule
from ._ranks import on_ranks
from ._result import Result, Row, Timing, at_least
from ._timing import Job, interleave
from .bench_pool import Found, of_ranks

_CPU = torch.device("cpu")
_MEMORY_STEPS = 2
_TIME_CLAIMS: dict[Schedule, Claim] = {"exchange": SPARSE_RING_TIME, "ring": RING_TIME}


@dataclass(frozen=True)
class Config:
    """Steps over ranks, and single buffers of these sizes."""

    steps: bench_pool.Config
    buffer_bytes: tuple[int, ...]


FULL = Config(bench_pool.FULL, tuple(1 << power for power in range(16, 27)))
SMALL = Config(bench_pool.SMALL, (1 << 16, 1 << 23, 1 << 24))


def run(config: Config) -> Result:
    """Beside what was claimed of pools elsewhere. A step's rows are those of D6, measured anew."""
    claimed = []
    for schedule, claim in _TIME_CLAIMS.items():
        made, leased = timings = _slowest(of_ranks(schedule, config.steps))
        claimed.append(claim.row(100 * (1 - leased.median_s / made.median_s), timings))
    return Result((*_buffer_rows(config), *claimed, _memory_row(config.steps)))


def _slowest(by_rank: Found) -> tuple[Timing, Timing]:
    """Without a pool and with one: a step takes as long as its slowest rank."""
    made, leased = (
        Timing(name, tuple(max(times) for times in zip(*(found[name] for found in by_rank), strict=True)))
        for name in (WITHOUT, WITH)
    )
    return made, leased


def _memory_row(config: bench_pool.Config) -> Row:
    """Each in processes of its own: what one leaves in the heap must not serve the other."""
    options = config.step("ring"), config.threshold_bytes, _MEMORY_STEPS
    made, leased = (max(on_ranks(config.num_ranks, peak_of_steps, *options, pooled)) for pooled in (False, True))
    return MEMORY.row(100 * (1 - leased / max(1, made)), peak_bytes=leased, peak_bytes_without=made)


def _buffer_rows(config: Config) -> list[Row]:
    """Single buffers by size, and the two sizes of the claims about temporaries."""
    found = {size: _lease_and_make(size, config.steps.size.repeats) for size in config.buffer_bytes}
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
