"""Is attention on many ranks as exact as on one?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import Tensor

from flexdilated import masks
from flexdilated.distributed._sharding import Order

from ._longnets import LONGNET_4, LongNet, dense
from ._problem import Size
from ._rank_step import NAMES, Schedule, Step, by_rule, errors, take_alone, take_cut, take_steps
from ._result import Result, Row, at_most
from .device.row_window import Window

_Case = tuple[LongNet | Window, Step]
_Known = tuple[dict[str, Tensor], dict[str, float]]


@dataclass(frozen=True)
class Config:
    """Each rule at one size, which must allow an N x N matrix in float64, by every schedule in every order."""

    specs: tuple[LongNet | Window, ...]
    size: Size
    ranks: tuple[int, ...]
    schedules: tuple[Schedule, ...] = ("exchange", "ring", "heads")
    orders: tuple[Order, ...] = ("contiguous", "zigzag")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


_LONGNET = LONGNET_4.shrunk(16)
_WINDOW = Window("window of 400", 300, 99, 1, 0.0)
FULL = Config(
    (_LONGNET, _LONGNET.as_causal(), dense(1024, causal=True), _WINDOW),
    Size(1024, num_heads=8, head_dim=32),
    (2, 4, 8),
)
SMALL = Config(
    (LONGNET_4.shrunk(64).as_causal(), replace(_WINDOW, left=40, right=9)),
    Size(256, num_heads=4, head_dim=8),
    (2,),
    orders=("zigzag",),
)


def run(config: Config) -> Result:
    """D3: error of output and gradients against float64, over one rank's error; the worst of all."""
    rows = []
    for dtype in config.dtypes:
        cases = _cases(config, dtype)
        known = {(step.pattern, step.num_kv_heads): _on_one_rank(spec, step) for spec, step in cases}
        rows += [_row(config, dtype, num_ranks, cases, known) for num_ranks in config.ranks]
    return Result(tuple(rows))


def _on_one_rank(spec: LongNet | Window, step: Step) -> _Known:
    """What the definition gives in float64, and by how much one call is off."""
    wanted = by_rule(step, spec)
    return wanted, errors(take_alone(step), wanted)


def _row(config: Config, dtype: str, num_ranks: int, cases: Sequence[_Case], known: Mapping[Any, _Known]) -> Row:
    """Beside it the kernel's share: the ratio where one rank computes the ranks' queries in turn, nothing sent."""
    taken = take_steps(num_ranks, [step for _, step in cases])
    detail, kernel = {}, {}
    for (spec, step), found in zip(cases, taken, strict=True):
        key = step.pattern, step.num_kv_heads
        wanted, alone = known[key]
        if key not in kernel:
            kernel[key] = _ratios(errors(take_cut(step, num_ranks), wanted), alone)
        many = errors(found.tensors, wanted)
        detail[_name(spec, step)] = {**_ratios(many, alone), "kernel": kernel[key], "many": many, "one": alone}
    worst = {name: max(case[name] for name in NAMES) for name, case in detail.items()}
    return Row(
        f"{dtype}, {config.size.num_tokens} tokens, {num_ranks} ranks: error of out, dq, dk, dv over one rank's",
        at_most(1.1, "×"),
        max(worst.values()),
        detail={
            "worst": max(worst, key=worst.__getitem__),
            "worst_of_kernel": max(max(ratios.values()) for ratios in kernel.values()),
            "cases": detail,
        },
    )


def _ratios(many: Mapping[str, float], one: Mapping[str, float]) -> dict[str, float]:
    return {name: many[name] / one[name] for name in NAMES}


def _cases(config: Config, dtype: str) -> Sequence[_Case]:
    """All, with as many key/value heads as query heads, and with half."""
    heads = config.size.num_heads
    drawn = product(config.specs, config.schedules, config.orders, (heads, heads // 2))
    return [
        (spec, Step(masks.to_json(spec.pattern()), config.size, num_kv_heads, schedule, order, dtype))
        for spec, schedule, order, num_kv_heads in drawn
    ]


def _name(spec: LongNet | Window, step: Step) -> str:
    label = spec.label if isinstance(spec, LongNet) else spec.name
    return f"{label}; {step.schedule}, {step.order}, {step.num_kv_heads} heads of keys"
