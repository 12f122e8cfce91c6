"""How much faster is it than torchscale's way, a loop over branches, on the same kernels?"""

from dataclasses import dataclass

from ._longnets import LONGNET_4, LongNet
from ._oracle import check_training
from ._problem import Problem, Size, training_job
from ._result import Result, Row, at_least
from ._timing import interleave, ratio
from .peer_branch_loop import branch_loop


@dataclass(frozen=True)
class Config:
    """Each LongNet at each size."""

    specs: tuple[LongNet, ...]
    sizes: tuple[Size, ...]


FULL = Config((LONGNET_4, LONGNET_4.as_causal()), (Size(16384, num_heads=4), Size(65536, num_heads=1)))
SMALL = Config((LONGNET_4.shrunk(32), LONGNET_4.shrunk(32).as_causal()), (Size(512, num_heads=4, repeats=1),))


def run(config: Config) -> Result:
    """C4: forward and backward. The loop leaves the branch weights out of its gradient."""
    return Result(tuple(_measure(spec, size) for size in config.sizes for spec in config.specs))


def _measure(spec: LongNet, size: Size) -> Row:
    problem = Problem.draw(size)
    ours, theirs = spec.attention(), branch_loop(spec)
    check_training(ours, problem, spec)
    check_training(theirs, problem, spec, constant_weights=True)
    jobs = (training_job("loop over branches", theirs, problem), training_job("flexdilated", ours, problem))
    timings = interleave(jobs, repeats=size.repeats)
    return Row(
        f"{spec.label}, {size}, forward + backward: times as fast as a loop over branches",
        at_least(1.5, "×"),
        ratio(*timings),
        timings,
    )
