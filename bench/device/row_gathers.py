"""What share of a LongNet forward are its gathers, and do they run at the rate of a copy?"""

from .._longnets import LONGNET_5
from .._result import Gap, Result, Row, at_least, at_most
from ._parts import measure_parts
from ._sizes import LARGE, TINY, TINY_SIZE, Config
from ._where import Where

FULL = Config((LONGNET_5,), LARGE)
SMALL = Config((TINY,), TINY_SIZE)
NEEDS = ("longnet forward",)

_SHARE, _RATE = at_most(8, "%"), at_least(80, "%")


def run(config: Config, where: Where) -> Result:
    """G5: gathers by themselves over the whole forward; their bytes a second over a copy's."""
    rows: list[Row | Gap] = []
    for spec in config.specs:
        name = f"{spec.label}, {config.size}, forward"
        share, rate = f"{name}: gathers' share of the time", f"{name}: gathers' share of copy bandwidth"
        parts = measure_parts(spec, config.size, where)
        if isinstance(parts, str) or not parts.gathered_bytes:
            reason = parts if isinstance(parts, str) else "nothing is gathered"
            rows += [Gap(share, _SHARE, reason), Gap(rate, _RATE, reason)]
            continue
        gathers_s, objections = parts.gathers.median_s, parts.found.objections
        timings = (parts.found.timings[parts.way], parts.gathers, parts.copy)
        speed = parts.gathered_bytes / gathers_s
        detail = {"gathered_bytes": parts.gathered_bytes, "gather_gb_per_s": speed / 1e9}
        detail |= {"copy_gb_per_s": parts.copy_rate / 1e9, "way": parts.way}
        detail |= {"first_call_s": parts.found.first_call_s}
        rows += [
            Row(share, _SHARE, 100 * gathers_s / parts.whole_s, timings, detail, objections),
            Row(rate, _RATE, 100 * speed / parts.copy_rate, timings, detail, objections),
        ]
    return Result(tuple(rows))
