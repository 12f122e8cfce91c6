"""Does a LongNet training step gain over dense attention what its smaller work promises?"""

from dataclasses import dataclass

from ._longnets import LONGNET_4, LongNet, dense
from ._oracle import check_training
from ._problem import Problem, Size, training_job
from ._result import Result, Row, at_least
from ._timing import interleave, ratio
from .peer_dense import dense_attention


@dataclass(frozen=True)
class Config:
    """Each LongNet at each size."""

    specs: tuple[LongNet, ...]
    sizes: tuple[Size, ...]


FULL = Config(
    (LONGNET_4, LONGNET_4.as_causal()),
    (Size(16384, num_heads=4, repeats=3), Size(65536, num_heads=1, repeats=2)),
)
SMALL = Config((LONGNET_4.shrunk(32), LONGNET_4.shrunk(32).as_causal()), (Size(512, num_heads=4, repeats=1),))


def run(config: Config) -> Result:
    """C3: speed-up over dense SDPA divided by the ratio of their useful FLOP; causal against causal."""
    return Result(tuple(_measure(spec, size) for size in config.sizes for spec in config.specs))


def _measure(spec: LongNet, size: Size) -> Row:
    problem = Problem.draw(size)
    everything = dense(size.num_tokens, causal=spec.causal)
    ours, theirs = spec.attention(), dense_attention(causal=spec.causal)
    check_training(ours, problem, spec)
    check_training(theirs, problem, everything)
    jobs = (training_job("dense SDPA", theirs, problem), training_job("flexdilated", ours, problem))
    timings = interleave(jobs, repeats=size.repeats)
    pairs = [each.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads) for each in (everything, spec)]
    flop_ratio = pairs[0] / pairs[1]
    return Row(
        f"{spec.label}, {size}, forward + backward: speed-up over dense SDPA over FLOP ratio",
        at_least(0.80 if spec.causal else 0.92),
        ratio(*timings) / flop_ratio,
        timings,
        {"speed_up": ratio(*timings), "flop_ratio": flop_ratio},
    )
