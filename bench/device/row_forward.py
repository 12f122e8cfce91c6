"""Does a LongNet forward do useful work at the rate of dense FlexAttention on the same kernels?"""

from .._result import Result, at_least
from ._rate import rate_rows
from ._sizes import BOTH, LARGE, TINY, TINY_SIZE, Config
from ._where import Where

FULL = Config(BOTH, LARGE)
# Each dense peer is compiled: one is enough to see that it runs.
SMALL = Config((TINY,), TINY_SIZE)
NEEDS = ("longnet forward",)


def run(config: Config, where: Where) -> Result:
    """G1: useful-FLOP rate over dense FlexAttention's; causal against causal."""
    return rate_rows(config, where, "forward", at_least(0.90), at_least(0.80))
