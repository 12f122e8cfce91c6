"""How much faster is the library than a loop over branches on flash SDPA, as torchscale runs it?"""

from .._longnets import LongNet
from .._problem import Size
from .._result import Gap, Result, Row, at_least
from ..peer_branch_loop import branch_loop, cpu_flash, cuda_flash
from ._compare import Contestant, compare
from ._sizes import BOTH, LARGE, TINY, TINY_SIZE, Config
from ._ways import Way, ways
from ._where import Where

FULL = Config(BOTH, LARGE)
SMALL = Config((TINY, TINY.as_causal()), TINY_SIZE)
NEEDS = ("longnet forward", "longnet backward")

_LOOP = "loop over branches"


def run(config: Config, where: Where) -> Result:
    """G7: forward and backward. The loop leaves the branch weights out of its gradient."""
    return Result(tuple(_measure(spec, config.size, way, where) for spec in config.specs for way in ways(where)))


def _measure(spec: LongNet, size: Size, way: Way, where: Where) -> Row | Gap:
    measure = f"{spec.label}, {size}, forward + backward, {way.name}: times as fast as a {_LOOP}"
    target = at_least(1.5, "×")
    if way.missing:
        return Gap(measure, target, way.missing)
    problem = where.draw(size)
    loop = branch_loop(spec, cuda_flash if where.is_cuda else cpu_flash)
    contestants = [
        Contestant(_LOOP, loop, problem, spec, constant_weights=True),
        Contestant("flexdilated", way.attention(spec.pattern()), problem, spec),
    ]
    found = compare(contestants, where, part="forward + backward", repeats=size.repeats)
    if reason := found.missing(_LOOP, "flexdilated"):
        return Gap(measure, target, reason)
    faster = found.median_s(_LOOP) / found.median_s("flexdilated")
    detail = {"first_call_s": found.first_call_s}
    return Row(measure, target, faster, tuple(found.timings.values()), detail, found.objections)
