"""How near to the device's own matrix product does a LongNet come, in useful work a second?"""

from dataclasses import dataclass

import torch

from .._longnets import LONGNET_5, LongNet
from .._machine import driver_and_clocks
from .._problem import Size
from .._result import Gap, Result, Row, at_least
from .._timing import Job
from ._compare import Contestant, Part, compare
from ._rate import flops
from ._sizes import LARGE, TINY, TINY_SIZE
from ._ways import Way, ways
from ._where import Where


@dataclass(frozen=True)
class Config:
    """One LongNet at one size, against square matrices of this side."""

    spec: LongNet
    size: Size
    side: int


FULL = Config(LONGNET_5, LARGE, 8192)
SMALL = Config(TINY, TINY_SIZE, 256)
NEEDS = ("longnet forward", "longnet backward")

_BOUNDS: dict[Part, float] = {"forward": 0.70, "backward": 0.55}


def run(config: Config, where: Where) -> Result:
    """G3: useful-FLOP rate over that of a bfloat16 matrix product, in the fastest way there is."""
    return Result(tuple(_best(config, where, part) for part in _BOUNDS))


def _best(config: Config, where: Where, part: Part) -> Row | Gap:
    spec, size, target = config.spec, config.size, at_least(_BOUNDS[part])
    measure = f"{spec.label}, {size}, {part}, best way: useful-FLOP rate over a matrix product's"
    able = [way for way in ways(where) if way.missing is None]
    problem, pattern = where.draw(size), spec.pattern()
    contestants = [Contestant(way.name, way.attention(pattern), problem, spec) for way in able]
    found = compare(contestants, where, part=part, repeats=size.repeats, extra=[_matmul(config.side, where)])
    rates = _rates(able, found.timings.keys(), flops(spec, size, part), found.median_s)
    reason = found.missing("matrix product") or (None if rates else found.missing(*(way.name for way in able)))
    if reason:
        return Gap(measure, target, reason)
    product = 2 * config.side**3 / found.median_s("matrix product") / 1e12
    best = max(rates, key=lambda name: rates[name])
    # Read while the device is still warm from the runs.
    clocks = driver_and_clocks() if where.is_cuda else {}
    detail = {
        "clocks": clocks,
        "matmul_tflop_per_s": product,
        "useful_tflop_per_s": rates,
        "best": best,
        "failed": found.failed,
        "first_call_s": found.first_call_s,
    }
    # A check that another way failed says nothing about the best one.
    objections = tuple(text for text in found.objections if text.startswith(f"{best}: "))
    return Row(measure, target, rates[best] / product, tuple(found.timings.values()), detail, objections)


def _rates(able: list[Way], timed, work: float, median_s) -> dict[str, float]:
    return {way.name: work / median_s(way.name) / 1e12 for way in able if way.name in timed}


def _matmul(side: int, where: Where) -> Job:
    a, b = (torch.randn(side, side, dtype=where.dtype, device=where.device) for _ in range(2))
    return Job("matrix product", lambda _: a @ b)
