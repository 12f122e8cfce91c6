"""What share of a LongNet forward is the merge of its branches?"""

from .._longnets import LONGNET_5, LongNet
from .._result import Gap, Result, Row, at_most
from ._parts import measure_parts
from ._sizes import LARGE, TINY, TINY_SIZE, Config
from ._where import Where

FULL = Config((LONGNET_5,), LARGE)
SMALL = Config((TINY,), TINY_SIZE)
NEEDS = ("longnet forward",)

_TARGET = at_most(5, "%")


def run(config: Config, where: Where) -> Result:
    """G8: the merges by themselves over the whole forward."""
    return Result(tuple(_measure(spec, config, where) for spec in config.specs))


def _measure(spec: LongNet, config: Config, where: Where) -> Row | Gap:
    measure = f"{spec.label}, {config.size}, forward: merge's share of the time"
    parts = measure_parts(spec, config.size, where)
    if isinstance(parts, str):
        return Gap(measure, _TARGET, parts)
    share = 100 * parts.merges.median_s / parts.whole_s
    timings = (parts.found.timings[parts.way], parts.merges)
    detail = {"way": parts.way, "first_call_s": parts.found.first_call_s}
    return Row(measure, _TARGET, share, timings, detail, parts.found.objections)
