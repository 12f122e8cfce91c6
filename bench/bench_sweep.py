"""How do forward, backward and peak memory grow with the sequence?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._longnets import LONGNET_4, LongNet, dense
from ._oracle import check_training
from ._problem import Problem, Size, backward_job, forward_job
from ._result import Result
from ._step import dense_step_bytes, library_step_bytes
from ._timing import interleave
from .peer_dense import dense_attention


@dataclass(frozen=True)
class Config:
    """One LongNet at growing sizes; dense attention only up to `dense_tokens`, beyond it takes too long."""

    spec: LongNet
    sizes: tuple[Size, ...]
    dense_tokens: int


FULL = Config(
    LONGNET_4,
    tuple(Size(1024 * kilo, num_heads=1, repeats=2 if kilo > 16 else 5) for kilo in (4, 8, 16, 32, 64, 128, 256)),
    dense_tokens=65536,
)
SMALL = Config(
    LONGNET_4.shrunk(8),
    tuple(Size(tokens, num_heads=1, repeats=1) for tokens in (2048, 4096)),
    dense_tokens=2048,
)


def run(config: Config) -> Result:
    """The sweep: measured points only, none extrapolated; a point an attention and size."""
    return Result(points=tuple(point for size in config.sizes for point in _points(config, size)))


def _points(config: Config, size: Size) -> list[Mapping[str, Any]]:
    spec = config.spec
    everything = dense(size.num_tokens, causal=spec.causal)
    attentions = {"flexdilated": (spec.attention(), spec)}
    peaks = {"flexdilated": library_step_bytes(spec, size)}
    if size.num_tokens <= config.dense_tokens:
        attentions["dense SDPA"] = (dense_attention(causal=spec.causal), everything)
        peaks["dense SDPA"] = dense_step_bytes(size, causal=spec.causal)
    problem = Problem.draw(size)
    jobs = []
    for name, (attention, rule) in attentions.items():
        check_training(attention, problem, rule)
        jobs.append(forward_job(f"{name} forward", attention, problem))
        jobs.append(backward_job(f"{name} backward", attention, problem))
    timings = {timing.name: timing.to_data() for timing in interleave(jobs, repeats=size.repeats)}
    return [
        {
            "attention": name,
            "num_tokens": size.num_tokens,
            "forward": timings[f"{name} forward"],
            "backward": timings[f"{name} backward"],
            "peak_bytes": peaks[name],
        }
        for name in attentions
    ]
