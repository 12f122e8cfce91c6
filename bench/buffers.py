"""What travels between ranks: pools of buffers, and codecs of keys and values."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
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
    peak_to_rms,
)
from flexdilated.distributed.wire._pool import lease_from

from ._checks import relative_error
from ._jobs import Job, Problem, Size, interleave
from ._measures import Row, at_least, at_most, measure
from ._rank_steps import NAMES, Step, local_tensors, on_ranks
from ._rules import longnet_n

# N tokens, G key/value heads, D head dim

_CPU = torch.device("cpu")
_WARM_UP_STEPS = 2


@measure("D6", size=Size(256, num_heads=2, head_dim=8), num_ranks=2, threshold_bytes=1 << 10, num_steps=2)
def buffer_reuse(
    size: Size = Size(4096, num_heads=8), num_ranks: int = 4, threshold_bytes: int = 1 << 20, num_steps: int = 8
) -> Iterator[Row]:
    """Are buffers for what is sent there again after warm-up, and how many are made a step?

    Outputs and gradients with a pool and without are compared bit by bit.
    """
    pattern = masks.to_json(longnet_n(size.num_tokens).as_causal().pattern())
    for schedule in ("exchange", "ring"):
        step = Step(pattern, size, size.num_heads, schedule, "zigzag")
        by_rank = on_ranks(num_ranks, pool_statistics, step, threshold_bytes, num_steps)
        name = f"LongNet, causal, {size}, {num_ranks} ranks, {schedule}, forward + backward"
        detail = {
            "steps": num_steps,
            "threshold_bytes": threshold_bytes,
            "leases_a_step": max(found["num_leases"] for found in by_rank) / num_steps,
            "below_threshold_a_step": max(found["num_plain"] for found in by_rank) / num_steps,
            "peak_bytes": max(found["peak_bytes"] for found in by_rank),
            "held_over_leased_at_peak": max(each["peak_bytes"] / max(1, each["peak_leased_bytes"]) for each in by_rank),
        }
        reuse = 100 * min(found["reuse_rate"] for found in by_rank)
        made = max(found["num_allocations"] for found in by_rank) / num_steps
        yield Row(f"{name}: leases that find a buffer, after warm-up", at_least(99, "%"), reuse, detail=detail)
        yield Row(f"{name}: buffers allocated a step, after warm-up", at_most(0), made, detail=detail)


def pool_statistics(mesh: DeviceMesh, step: Step, threshold_bytes: int, num_steps: int) -> dict[str, Any]:
    """Statistics of this rank's pool over steps after warm-up, forward and backward."""
    pattern, pool = masks.from_json(step.pattern), BufferPool("cpu", threshold_bytes=threshold_bytes)
    sharding, (q, k, v, grad) = local_tensors(mesh, step)
    how: dict[str, Any] = {"mesh": mesh, "sharding": sharding, "schedule": step.schedule}

    def take(pool: BufferPool | None) -> tuple[Tensor, ...]:
        out = attend(q, k, v, pattern, pool=pool, **how)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    for _ in range(_WARM_UP_STEPS):
        for name, made, leased in zip(NAMES, take(None), take(pool), strict=True):
            assert torch.equal(made, leased), f"{name} must be the same with and without a pool"
    pool.reset()
    for _ in range(num_steps):
        take(pool)
    return {**asdict(pool.statistics), "reuse_rate": pool.statistics.reuse_rate}


@measure(buffer_bytes=(1 << 16, 1 << 23, 1 << 24), repeats=3)
def pool(
    buffer_bytes: tuple[int, ...] = tuple(1 << power for power in range(16, 27)), repeats: int = 15
) -> Iterator[Row]:
    """From what size on does a pool of buffers save time?"""
    sizes, size, saved, timings = [], 0, 0.0, ()
    for size in buffer_bytes:
        jobs = [
            Job(f"{name} a pool", lambda _, lessor=lessor, size=size: _touch(lessor, size))
            for name, lessor in (("with", BufferPool(_CPU, threshold_bytes=0)), ("without", None))
        ]
        for job in jobs:
            job.run(None)
        timings = leased, made = interleave(jobs, repeats=repeats)
        sizes.append({"bytes": size, "leased_s": leased.median_s, "made_s": made.median_s})
        saved = 100 * (1 - leased.median_s / made.median_s)
    what = f"a buffer of {size >> 20} MiB, written once: time saved by a lease"
    yield Row(what, at_least(0, "%"), saved, timings, {"sizes": sizes})


def _touch(lessor: BufferPool | None, num_bytes: int) -> None:
    with lease_from(lessor, (num_bytes,), torch.uint8, _CPU) as buffer:
        buffer.zero_()


# A claim of another project, in our words, about float32 keys and values, heads of 64.
_CLAIM = {
    "claimed": "50 to 70 % (expected)",
    "source": "DarcStar-Solutions-Tech/dilated-attention-pytorch, commit f6094f7, "
    "docs/benchmarks/by-type/other/2025-06-26-1121-UTC/block-sparse-optimization-findings.md",
}
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
        detail = {
            "codec": str(chosen.name),
            "percent_saved": 100 * report.saved,
            "peak": max(peak_to_rms(k), peak_to_rms(v)),
        }
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
        "proven_bound": BF16_ERROR if name == "bf16" else INT8_ERROR * max(peak_to_rms(k), peak_to_rms(v)),
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
    detail = {
        **_CLAIM,
        "codec": name,
        "bytes": report.num_bytes,
        "plain_bytes": report.plain_bytes,
        "percent_saved_of_bfloat16": 100 * halves.saved,
        "pays_below_bytes_a_second": (k.nbytes - wire.nbytes) / sum(timing.median_s for timing in timings),
    }
    what = f"{name}: compressed messages save communication"
    return Row(what, at_least(50, "%"), 100 * report.saved, timings, detail)


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
