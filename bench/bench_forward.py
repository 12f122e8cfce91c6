"""Does a LongNet forward do useful work at the rate of dense attention?"""

from dataclasses import dataclass

from ._longnets import FORWARD_FLOPS, LONGNET_4, LongNet, dense
from ._oracle import check_forward
from ._problem import Problem, Size, forward_job
from ._result import Result, Row, at_least
from ._timing import interleave, ratio
from .peer_dense import dense_attention


@dataclass(frozen=True)
class Config:
    """One LongNet at one size."""

    spec: LongNet
    size: Size


FULL = Config(LONGNET_4, Size(16384, num_heads=8))
SMALL = Config(LONGNET_4.shrunk(32), Size(512, num_heads=8, repeats=1))


def run(config: Config) -> Result:
    """C1: useful FLOP a second over dense SDPA's."""
    spec, size = config.spec, config.size
    problem = Problem.draw(size)
    everything = dense(size.num_tokens, causal=spec.causal)
    ours, theirs = spec.attention(), dense_attention(causal=spec.causal)
    check_forward(ours, problem, spec)
    check_forward(theirs, problem, everything)
    jobs = (forward_job("dense SDPA", theirs, problem), forward_job("flexdilated", ours, problem))
    timings = interleave(jobs, repeats=size.repeats)
    work = [
        each.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads) * FORWARD_FLOPS * size.head_dim
        for each in (everything, spec)
    ]
    rates = [flops / timing.median_s / 1e9 for flops, timing in zip(work, timings, strict=True)]
    row = Row(
        f"{spec.label}, {size}, forward: useful-FLOP rate over dense SDPA's",
        at_least(0.95),
        rates[1] / rates[0],
        timings,
        {
            "dense_gflop_per_s": rates[0],
            "useful_gflop_per_s": rates[1],
            "flop_ratio": work[0] / work[1],
            "speed_up": ratio(*timings),
        },
    )
    return Result((row,))
