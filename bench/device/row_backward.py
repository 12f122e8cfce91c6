"""Does a LongNet backward do useful work at the rate of dense FlexAttention's on the same kernels?"""

from .._result import Result, at_least
from ._rate import rate_rows
from ._sizes import BOTH, LARGE, TINY, TINY_SIZE, Config
from ._where import Where

FULL = Config(BOTH, LARGE)
SMALL = Config((TINY, TINY.as_causal()), TINY_SIZE)
NEEDS = ("longnet forward", "longnet backward")


def run(config: Config, where: Where) -> Result:
    """G2: useful-FLOP rate over dense FlexAttention's; causal against causal."""
    return rate_rows(config, where, "backward", at_least(0.85), at_least(0.75))
