"""A LongNet's useful work a second over dense FlexAttention's, on the same kernels: rows of G1 and G2."""

from .._longnets import FORWARD_FLOPS, LongNet, dense
from .._problem import Size
from .._result import Gap, Result, Row, Target
from ._compare import Contestant, Part, compare
from ._sizes import Config
from ._ways import Way, dense_flex, ways
from ._where import Where

_BACKWARD_OVER_FORWARD = 2.5  # five products a pair instead of two


def rate_rows(config: Config, where: Where, part: Part, target_full: Target, target_causal: Target) -> Result:
    """One row a LongNet and way."""
    targets = {False: target_full, True: target_causal}
    return Result(
        tuple(
            _row(spec, config.size, way, where, part, targets[spec.causal])
            for spec in config.specs
            for way in ways(where)
        )
    )


def flops(spec: LongNet, size: Size, part: Part) -> float:
    """Useful floating point operations."""
    factor = {"forward": 1.0, "backward": _BACKWARD_OVER_FORWARD, "forward + backward": 1 + _BACKWARD_OVER_FORWARD}
    pairs = spec.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads)
    return pairs * FORWARD_FLOPS * size.head_dim * factor[part]


def _row(spec: LongNet, size: Size, way: Way, where: Where, part: Part, target: Target) -> Row | Gap:
    everything = dense(size.num_tokens, causal=spec.causal)
    peer, theirs = dense_flex(everything, way, where, training=part != "forward")
    measure = f"{spec.label}, {size}, {part}, {way.name}: useful-FLOP rate over {peer}'s"
    if way.missing:
        return Gap(measure, target, way.missing)
    problem = where.draw(size)
    ours = Contestant("flexdilated", way.attention(spec.pattern()), problem, spec)
    found = compare([Contestant(peer, theirs, problem, everything), ours], where, part=part, repeats=size.repeats)
    if reason := found.missing("flexdilated", peer):
        return Gap(measure, target, reason)
    work = {peer: flops(everything, size, part), "flexdilated": flops(spec, size, part)}
    rates = {name: work[name] / found.median_s(name) / 1e12 for name in work}
    detail = {
        "dense_tflop_per_s": rates[peer],
        "useful_tflop_per_s": rates["flexdilated"],
        "flop_ratio": work[peer] / work["flexdilated"],
        "first_call_s": found.first_call_s,
    }
    ratio = rates["flexdilated"] / rates[peer]
    return Row(measure, target, ratio, tuple(found.timings.values()), detail, found.objections)
