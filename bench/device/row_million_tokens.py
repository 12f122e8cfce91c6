"""Does a LongNet training step complete at a million tokens, at the same time a token?"""

from dataclasses import dataclass

from .._longnets import LONGNET_5, LongNet
from .._problem import Size
from .._result import Gap, Result, Row, at_most
from ._compare import Contestant, compare
from ._sizes import TINY
from ._ways import Way, ways
from ._where import Where


@dataclass(frozen=True)
class Config:
    """One LongNet at two sizes that differ in the tokens."""

    spec: LongNet
    short: Size
    long: Size


FULL = Config(
    LONGNET_5,
    Size(128 * 1024, num_heads=8, head_dim=128, repeats=3),
    Size(1024 * 1024, num_heads=8, head_dim=128, repeats=3),
)
SMALL = Config(TINY, Size(1024, num_heads=4, head_dim=16, repeats=1), Size(4096, num_heads=4, head_dim=16, repeats=1))
NEEDS = ("longnet forward", "longnet backward")


def run(config: Config, where: Where) -> Result:
    """G10: forward and backward; time a token at the greater size over the smaller, in the first way that can."""
    rows: list[Row | Gap] = []
    for way in ways(where):
        rows.append(_measure(config, where, way))
        if isinstance(rows[-1], Row):
            break
    return Result(tuple(rows))


def _measure(config: Config, where: Where, way: Way) -> Row | Gap:
    spec, target = config.spec, at_most(1.15, "×")
    measure = f"{spec.label}, {config.short} → {config.long}, forward + backward, {way.name}: time a token"
    if way.missing:
        return Gap(measure, target, way.missing)
    attention = way.attention(spec.pattern())
    # The definition's own float64 tensors would not fit beside the step at a million tokens.
    contestants = [
        Contestant(str(config.short), attention, where.draw(config.short), spec),
        Contestant(str(config.long), attention, where.draw(config.long), None),
    ]
    found = compare(contestants, where, part="forward + backward", repeats=config.long.repeats)
    if reason := found.missing(str(config.short), str(config.long)):
        return Gap(measure, target, reason)
    micros = {str(size): 1e6 * found.median_s(str(size)) / size.num_tokens for size in (config.short, config.long)}
    detail = {"us_a_token": micros, "first_call_s": found.first_call_s, "checked_at": str(config.short)}
    ratio = micros[str(config.long)] / micros[str(config.short)]
    return Row(measure, target, ratio, tuple(found.timings.values()), detail, found.objections)
