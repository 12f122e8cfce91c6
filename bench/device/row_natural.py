"""What does a dilated branch gain over the same mask in the order of the tokens?"""

from dataclasses import dataclass

from .._longnets import LongNet
from .._problem import Size
from .._result import Gap, Result, Row, at_least
from ._compare import Contestant, compare
from ._ways import inference, natural
from ._where import Where


@dataclass(frozen=True)
class Branch:
    """One dilated branch, and how many times as fast it must be."""

    length: int
    rate: int
    bound: float

    @property
    def spec(self) -> LongNet:
        return LongNet(f"segments of {self.length}, rate {self.rate}", (self.length,), (self.rate,))


@dataclass(frozen=True)
class Config:
    """Each branch at one size."""

    branches: tuple[Branch, ...]
    size: Size


FULL = Config((Branch(8192, 4, 3), Branch(32768, 16, 10)), Size(128 * 1024, num_heads=16, head_dim=128))
# Both sides are compiled: one branch is enough to see that they run.
SMALL = Config((Branch(512, 4, 3),), Size(1024, num_heads=4, head_dim=16, repeats=1))
NEEDS = ("longnet forward",)

_NATURAL = "FlexAttention in natural order"


def run(config: Config, where: Where) -> Result:
    """G6: forward; the same BlockMask lists as create_block_mask's, in both."""
    return Result(tuple(_measure(branch, config.size, where) for branch in config.branches))


def _measure(branch: Branch, size: Size, where: Where) -> Row | Gap:
    way, spec, target = inference(where), branch.spec, at_least(branch.bound, "×")
    measure = f"{spec.label}, {size}, forward, {way.name}: times as fast as {_NATURAL}"
    problem, (pattern,) = where.draw(size), spec.pattern().branches()
    contestants = [
        Contestant(_NATURAL, natural(pattern), problem, spec),
        Contestant("flexdilated", way.attention(pattern), problem, spec),
    ]
    found = compare(contestants, where, part="forward", repeats=size.repeats)
    if reason := found.missing(_NATURAL, "flexdilated"):
        return Gap(measure, target, reason)
    faster = found.median_s(_NATURAL) / found.median_s("flexdilated")
    detail = {"first_call_s": found.first_call_s}
    return Row(measure, target, faster, tuple(found.timings.values()), detail, found.objections)
