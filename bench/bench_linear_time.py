"""Does the time of a token stay the same as the sequence grows?"""

from dataclasses import dataclass

from ._longnets import LONGNET_4, LongNet
from ._oracle import check_training
from ._problem import Problem, Size, training_job
from ._result import Result, Row, at_most
from ._timing import interleave


@dataclass(frozen=True)
class Config:
    """Each LongNet at growing sizes, with equal repeats; the last is held against the first."""

    specs: tuple[LongNet, ...]
    sizes: tuple[Size, ...]


FULL = Config(
    (LONGNET_4, LONGNET_4.as_causal()),
    tuple(Size(tokens, num_heads=1, repeats=3) for tokens in (16384, 65536, 262144)),
)
SMALL = Config((LONGNET_4.shrunk(32),), tuple(Size(tokens, num_heads=1, repeats=1) for tokens in (512, 1024)))


def run(config: Config) -> Result:
    """C9: time per token, forward and backward, of the longest sequence over the shortest's."""
    return Result(tuple(_measure(spec, config.sizes) for spec in config.specs))


def _measure(spec: LongNet, sizes: tuple[Size, ...]) -> Row:
    attention = spec.attention()
    problems = [Problem.draw(size) for size in sizes]
    for problem in problems:
        check_training(attention, problem, spec)
    jobs = [training_job(str(size), attention, problem) for size, problem in zip(sizes, problems, strict=True)]
    timings = interleave(jobs, repeats=sizes[0].repeats)
    token_us = [timing.median_s / size.num_tokens * 1e6 for timing, size in zip(timings, sizes, strict=True)]
    return Row(
        f"{spec.label}, {sizes[0]} to {sizes[-1]}, forward + backward: growth of the time per token",
        at_most(1.15, "×"),
        token_us[-1] / token_us[0],
        timings,
        {"us_per_token": dict(zip(map(str, sizes), token_us, strict=True))},
    )
