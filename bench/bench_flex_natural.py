"""How much faster is it than compiled FlexAttention in natural token order?"""

from dataclasses import dataclass

from ._longnets import LONGNET_4, LongNet, Union
from ._oracle import Rule, check_forward
from ._problem import Attention, Problem, Size, forward_job
from ._result import Result, Row, at_least
from ._timing import interleave, ratio, say
from .peer_flex import natural_attention, natural_block_mask


@dataclass(frozen=True)
class Config:
    """One LongNet at one size; `repeats` counts the rounds of each comparison."""

    spec: LongNet
    size: Size


FULL = Config(LONGNET_4.shrunk(2), Size(8192, num_heads=4, repeats=3))
SMALL = Config(LONGNET_4.shrunk(64), Size(256, num_heads=2, head_dim=16, repeats=1))


def run(config: Config) -> Result:
    """C2: the same mixture (a score_mod there), and the union of its branches as a mask."""
    spec, size = config.spec, config.size
    problem = Problem.draw(size)
    say("create_block_mask")
    block_mask = natural_block_mask(spec, num_heads=size.num_heads, num_tokens=size.num_tokens)
    mixture = natural_attention(spec, block_mask, mixture=True)
    union = natural_attention(spec, block_mask, mixture=False)
    rows = (
        _compare(f"{spec.label}, {size}, mixture", 30, spec.attention(), mixture, problem, spec, size),
        _compare(f"{spec.label}, {size}, union", 15, Union(spec).attention(), union, problem, Union(spec), size),
    )
    return Result(rows)


def _compare(
    name: str, bound: float, ours: Attention, theirs: Attention, problem: Problem, rule: Rule, size: Size
) -> Row:
    check_forward(ours, problem, rule)
    say("compiling FlexAttention")
    check_forward(theirs, problem, rule)
    jobs = (forward_job("FlexAttention", theirs, problem), forward_job("flexdilated", ours, problem))
    timings = interleave(jobs, repeats=size.repeats)
    return Row(
        f"{name}, forward: times as fast as compiled FlexAttention in natural order",
        at_least(bound, "×"),
        ratio(*timings),
        timings,
    )
