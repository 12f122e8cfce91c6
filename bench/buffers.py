"""What travels between ranks: pools of buffers, what they bring, and codecs of keys and values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import BufferPool
from flexdilated.distributed._attend import attend
from flexdilated.distributed.wire._codec import (
    BF16_ERROR,
    INT8_ERROR,
    Codec,
    CodecName,
    choose_codec,
    codec_named,
    row_peak,
)
from flexdilated.distributed.wire._pool import lease_from

from ._checks import relative_error
from ._jobs import Job, Problem, Size, interleave, peak_here
from ._measures import Row, Target, Timing, at_least, at_most, measure
from ._rank_steps import NAMES, Schedule, Step, local_tensors, on_ranks
from ._rules import longnet_n

# N tokens, G key/value heads, D head dim

# Claims of others about pools of buffers and compressed messages, in our words: figure, source, what is measured here.
_SOURCE = "DarcStar-Solutions-Tech/dilated-attention-pytorch, commit f6094f7, "
_FIRST_RUN = "docs/benchmarks/all-implementations-optimization-2025-06-27-2217-UTC.md"
_SECOND_RUN = "docs/benchmarks/all-implementations-with-block-sparse-2025-06-28-0013-UTC.md"
_CLAIMS: dict[str, tuple[str, str, Target]] = {
    # A lease of a tensor of its size (8,192 tokens, 8 heads of 64, float16 and float32), written once: time saved.
    "a pool costs dilated attention time, at most this": ("−95.7 % (the same benchmark, run again: −729.5 %)",
        f"{_FIRST_RUN}; again: {_SECOND_RUN}", at_least(-95.7, "%")),
    "a pool makes a variant of it faster": ("+73.4 % (the same benchmark, run again: +17.0 %)",
        f"{_FIRST_RUN}; again: {_SECOND_RUN}", at_least(73.4, "%")),
    # A step of the exchange, the schedule of sparse patterns, and of the ring, with every message leased: time saved.
    "a pool makes a block-sparse ring faster": ("+24.9 %", _SECOND_RUN, at_least(24.9, "%")),
    "a pool makes a ring faster": ("+4.3 % (two hours before: −35.2 %)",
        f"{_SECOND_RUN}; before: {_FIRST_RUN}", at_least(4.3, "%")),
    # The peak that these steps of the ring add to a rank's memory: share saved.
    "a pool saves memory": ("15 to 30 % (expected; its own benchmarks measured 32 to 120 % more)",
        "CHANGELOG.md and README.md; measured: docs/reports/memory-pool-integration-summary-2025-06-28-0014-UTC.md",
        at_least(15, "%")),
    # Bytes of keys and values in float32, heads of 64.
    "compressed messages save communication": ("50 to 70 % (expected)",
        "docs/benchmarks/by-type/other/2025-06-26-1121-UTC/block-sparse-optimization-findings.md", at_least(50, "%")),
}  # fmt: skip
PLAIN_TEMPORARIES, IMPROVED_TEMPORARIES, SPARSE_RING_TIME, RING_TIME, MEMORY, MESSAGES = _CLAIMS


def _claim(says: str, measured: float, timings: tuple[Timing, ...] = (), **detail: Any) -> Row:
    claimed, source, target = _CLAIMS[says]
    return Row(says, target, measured, timings, {"claimed": claimed, "source": _SOURCE + source, **detail})


Found = Sequence[Mapping[str, Any]]

WITHOUT, WITH = "without a pool", "with a pool"
_CPU = torch.device("cpu")
_WARM_UP_STEPS = 2
_MEMORY_STEPS = 2
_TINY_TOKENS = 64


@dataclass(frozen=True)
class Steps:
    """Steps of LongNet over `num_ranks` ranks, forward and backward."""

    size: Size
    num_ranks: int
    threshold_bytes: int
    num_steps: int

    def step(self, schedule: Schedule) -> Step:
        pattern = longnet_n(self.size.num_tokens).as_causal().pattern()
        return Step(masks.to_json(pattern), self.size, self.size.num_heads, schedule, "zigzag")

    def of_ranks(self, schedule: Schedule) -> Found:
        """Each rank's times with a pool and without one, and the pool's statistics."""
        return on_ranks(self.num_ranks, times_and_statistics, self.step(schedule), self.threshold_bytes, self.num_steps)


_FULL = Steps(Size(4096, num_heads=8, repeats=15), num_ranks=4, threshold_bytes=1 << 20, num_steps=8)
_SMALL = Steps(Size(256, num_heads=2, head_dim=8, repeats=3), 2, 1 << 10, 2)


@measure("D6", steps=_SMALL)
def buffer_reuse(steps: Steps = _FULL) -> Iterator[Row]:
    """Are buffers for what is sent there again after warm-up, and how many are made a step?

    Outputs and gradients with a pool and without are compared bit by bit.
    """
    for schedule in ("exchange", "ring"):
        by_rank = steps.of_ranks(schedule)
        name = f"LongNet, causal, {steps.size}, {steps.num_ranks} ranks, {schedule}, forward + backward"
        over = (found["peak_bytes"] / max(1, found["peak_leased_bytes"]) for found in by_rank)
        detail = {
            "steps": steps.num_steps,
            "threshold_bytes": steps.threshold_bytes,
            "leases_a_step": max(found["num_leases"] for found in by_rank) / steps.num_steps,
            "below_threshold_a_step": max(found["num_plain"] for found in by_rank) / steps.num_steps,
            "peak_bytes": max(found["peak_bytes"] for found in by_rank),
            "held_over_leased_at_peak": max(over),
        }
        reuse = 100 * min(found["reuse_rate"] for found in by_rank)
        made = max(found["num_allocations"] for found in by_rank) / steps.num_steps
        yield Row(f"{name}: leases that find a buffer, after warm-up", at_least(99, "%"), reuse, detail=detail)
        yield Row(f"{name}: buffers allocated a step, after warm-up", at_most(0), made, detail=detail)


@measure(steps=_SMALL, buffer_bytes=(1 << 16, 1 << 23, 1 << 24))
def pool(
    steps: Steps = _FULL, buffer_bytes: tuple[int, ...] = tuple(1 << power for power in range(16, 27))
) -> Iterator[Row]:
    """Where does a pool of buffers save time or memory?

    With claims about pools elsewhere, and the steps of `buffer_reuse`.
    """
    found = {size: _lease_and_make(size, steps.size.repeats) for size in buffer_bytes}
    saved = {size: _saved(made.median_s, leased.median_s) for size, (leased, made) in found.items()}
    largest = max(buffer_bytes)
    each = [{"bytes": size, "leased_s": a.median_s, "made_s": b.median_s} for size, (a, b) in found.items()]
    what = f"a buffer of {largest >> 20} MiB, written once: time saved by a lease"
    yield Row(what, at_least(0, "%"), saved[largest], found[largest], {"sizes": each})
    for claim, size in ((PLAIN_TEMPORARIES, 8 << 20), (IMPROVED_TEMPORARIES, 16 << 20)):
        yield _claim(claim, saved[size], found[size])
    claims: dict[Schedule, str] = {"exchange": SPARSE_RING_TIME, "ring": RING_TIME}
    for schedule, claim in claims.items():
        by_rank = steps.of_ranks(schedule)
        # A step takes as long as its slowest rank.
        made, leased = (
            Timing(name, tuple(map(max, zip(*(times[name] for times in by_rank), strict=True))))
            for name in (WITHOUT, WITH)
        )
        yield _claim(claim, _saved(made.median_s, leased.median_s), (made, leased))
    # Each in processes of its own: what one leaves in the heap must not serve the other.
    options = steps.step("ring"), steps.threshold_bytes, _MEMORY_STEPS
    made, leased = (max(on_ranks(steps.num_ranks, peak_of_steps, *options, pooled)) for pooled in (False, True))
    yield _claim(MEMORY, _saved(max(1, made), leased), peak_bytes=leased, peak_bytes_without=made)


def _saved(without: float, with_it: float) -> float:
    """In percent."""
    return 100 * (1 - with_it / without)


def _lease_and_make(num_bytes: int, repeats: int) -> tuple[Timing, Timing]:
    pool = BufferPool(_CPU, threshold_bytes=0)

    def touch(lessor: BufferPool | None) -> None:
        with lease_from(lessor, (num_bytes,), torch.uint8, _CPU) as buffer:
            buffer.zero_()

    jobs = Job(WITH, lambda _: touch(pool)), Job(WITHOUT, lambda _: touch(None))
    for job in jobs:
        job.run(None)
    leased, made = interleave(jobs, repeats=repeats)
    return leased, made


def _taker(mesh: DeviceMesh, step: Step) -> Callable[[BufferPool | None], tuple[Tensor, ...]]:
    """A step of this rank, forward and backward, with the buffers of a pool or without one."""
    pattern = masks.from_json(step.pattern)
    sharding, (q, k, v, grad) = local_tensors(mesh, step)
    how: dict[str, Any] = {"mesh": mesh, "sharding": sharding, "schedule": step.schedule}

    def take(pool: BufferPool | None) -> tuple[Tensor, ...]:
        out = attend(q, k, v, pattern, pool=pool, **how)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    return take


def times_and_statistics(mesh: DeviceMesh, step: Step, threshold_bytes: int, num_steps: int) -> dict[str, Any]:
    """Seconds of each step both ways, taken in turns, and the pool's statistics after warm-up."""
    pool, take = BufferPool("cpu", threshold_bytes=threshold_bytes), _taker(mesh, step)
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
    """Peak bytes that the steps add to this rank's memory, after a tiny one that is not counted."""
    _taker(mesh, replace(step, size=replace(step.size, num_tokens=_TINY_TOKENS)))(None)
    take = _taker(mesh, step)
    pool = BufferPool("cpu", threshold_bytes=threshold_bytes) if pooled else None
    dist.barrier()

    def steps() -> None:
        for _ in range(num_steps):
            take(pool)

    return peak_here(steps)


_CODECS: tuple[CodecName, ...] = ("bf16", "int8")
_ERROR_BOUND = 0.02


def _heavy_tailed(x: Float[Tensor, "1 G N D"]) -> Float[Tensor, "1 G N D"]:
    """Student's t with 3 degrees of freedom: the normal numbers over the root of a mean of three squares."""
    generator = torch.Generator().manual_seed(1)
    squares = torch.randn((3, *x.shape), generator=generator).square().mean(0)
    return x / squares.sqrt()


def _outlier_channels(x: Float[Tensor, "1 G N D"]) -> Float[Tensor, "1 G N D"]:
    """Two channels of each head 20 times as large, as keys of language models have them."""
    scales = torch.ones(x.shape[-1])
    scales[[3, x.shape[-1] // 2]] = 20
    return x * scales


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy-tailed": _heavy_tailed,
    "outlier channels": _outlier_channels,
}


@measure(size=Size(128, num_heads=2, head_dim=16, repeats=1), window=32)
def codec(size: Size = Size(4096, num_heads=8, repeats=5), window: int = 1024) -> Iterator[Row]:
    """How many bytes do the wire codecs save, what does that do to rows and to what attention makes of them?

    Keys and values of each kind, under causal attention to a window. Errors are relative, in the Euclidean norm: of
    each row, and of the whole output against undamaged keys.
    """
    q, k, v = Problem.draw(size).qkv
    drawn = {kind: (q, change(k), change(v)) for kind, change in KINDS.items()}
    for name in _CODECS:
        yield _saved_row(name, drawn["normal"], size.repeats)
        errors = {kind: _errors(name, *qkv, window) for kind, qkv in drawn.items()}
        worst = max(each["largest_row_error"] / each["proven_bound"] for each in errors.values())
        what = f"{name}: largest error of a row over the bound that is proven for it"
        yield Row(what, at_most(1, "×"), worst, detail=errors)
    for kind, (_, k, v) in drawn.items():
        chosen = choose_codec(k, v, _ERROR_BOUND)
        report = wire_report(k, v, chosen)
        detail = {"codec": str(chosen.name), "percent_saved": 100 * report.saved, "peak": max(row_peak(k), row_peak(v))}
        what = f'"auto" within {100 * _ERROR_BOUND:.0f} %, {kind} rows: largest error of a row'
        yield Row(what, at_most(100 * _ERROR_BOUND, "%"), 100 * report.largest_error, detail=detail)


def _errors(name: CodecName, q: Tensor, k: Tensor, v: Tensor, window: int) -> dict[str, float]:
    """Errors of rows, the bound that is proven for them, and the error of attention's output."""
    used = codec_named(name)
    report = wire_report(k, v, used)
    pattern = masks.causal() & masks.local_window(left=window - 1, right=0)
    keys, values = (used.decode(used.encode(x), x.shape[-1], x.dtype) for x in (k, v))
    return {
        "largest_row_error": report.largest_error,
        "mean_row_error": report.mean_error,
        "proven_bound": BF16_ERROR if name == "bf16" else INT8_ERROR * max(row_peak(k), row_peak(v)),
        "output_error": relative_error(fd.attend(q, keys, values, pattern), fd.attend(q, k, v, pattern)),
    }


def _saved_row(name: CodecName, qkv: tuple[Tensor, Tensor, Tensor], repeats: int) -> Row:
    """Of float32, which decides, and of bfloat16; and how fast rows are written and read."""
    used, (_, k, v) = codec_named(name), qkv
    report, halves = wire_report(k, v, used), wire_report(k.bfloat16(), v.bfloat16(), used)
    wire, out = used.encode(k), torch.empty_like(k)
    jobs = (
        Job("encode", lambda _: used.encode(k)),
        Job("decode", lambda _: used.decode(wire, k.shape[-1], k.dtype, out=out)),
    )
    timings = interleave(jobs, repeats=repeats)
    row = _claim(
        MESSAGES,
        100 * report.saved,
        timings,
        codec=name,
        bytes=report.num_bytes,
        plain_bytes=report.plain_bytes,
        percent_saved_of_bfloat16=100 * halves.saved,
        pays_below_bytes_a_second=(k.nbytes - wire.nbytes) / sum(timing.median_s for timing in timings),
    )
    return replace(row, measure=f"{name}: {row.measure}")


@dataclass(frozen=True)
class WireReport:
    """Bytes on the wire, and as they are; |decoded − row| / |row|, the largest and the mean over rows of K and V.

    An error is NaN where a row is not finite.
    """

    num_bytes: int
    plain_bytes: int
    largest_error: float
    mean_error: float

    @property
    def saved(self) -> float:
        return 1 - self.num_bytes / self.plain_bytes


@torch.no_grad()
def wire_report(k: Float[Tensor, "B G L D"], v: Float[Tensor, "B G L D"], codec: Codec) -> WireReport:
    """Encodes and decodes all rows. Raises ValueError where there is none."""
    if k.numel() + v.numel() == 0:
        raise ValueError("a report needs at least one row; got none")
    wires = [codec.encode(x) for x in (k, v)]
    errors = torch.cat([_row_errors(x, wire, codec) for x, wire in zip((k, v), wires, strict=True)])
    return WireReport(
        num_bytes=sum(wire.nbytes for wire in wires),
        plain_bytes=k.nbytes + v.nbytes,
        largest_error=errors.amax().item(),
        mean_error=errors.mean().item(),
    )


def _row_errors(x: Float[Tensor, "... D"], wire: Tensor, codec: Codec) -> Float[Tensor, " rows"]:
    rows = x.double()
    found = codec.decode(wire, x.shape[-1], x.dtype, out=torch.empty_like(rows))
    lengths = rows.norm(dim=-1)
    return ((found - rows).norm(dim=-1) / lengths).where(lengths != 0, found.norm(dim=-1)).flatten()
