"""Is attention on many ranks as exact as on one?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import Tensor

from flexdilated import masks
from flexdilated.distributed.group._sharding import Order

from ._longnets import LONGNET_4, LongNet, dense
from ._problem import Size
from ._rank_step import NAMES, Schedule, Step, by_rule, errors, take_alone, take_cut, take_steps
from ._result import Result, Row, at_most
from .device.row_window import Window

_Case = tuple[LongNet | Window, Step]
_Problem = tuple[str, int, str]
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
    cases = [case for dtype in config.dtypes for case in _cases(config, dtype)]
    known = {_problem(step): _on_one_rank(spec, step) for spec, step in _problems(cases)}
    rows = [row for num_ranks in config.ranks for row in _rows(config, num_ranks, cases, known)]
    return Result(tuple(sorted(rows, key=lambda row: config.dtypes.index(row.measure.partition(",")[0]))))


def _on_one_rank(spec: LongNet | Window, step: Step) -> _Known:
    """What the definition gives in float64, and by how much one call is off."""
    wanted = by_rule(step, spec)
    return wanted, errors(take_alone(step), wanted)


def _rows(config: Config, num_ranks: int, cases: Sequence[_Case], known: Mapping[_Problem, _Known]) -> list[Row]:
    """A row for each dtype; all steps are taken by the same processes, which know the plans from the first one on."""
    taken = take_steps(num_ranks, [step for _, step in cases])
    kernel = {
        _problem(step): _ratios(errors(take_cut(step, num_ranks), wanted), alone)
        for _, step in _problems(cases)
        for wanted, alone in [known[_problem(step)]]
    }
    detail: dict[str, dict[str, dict[str, Any]]] = {dtype: {} for dtype in config.dtypes}
    for (spec, step), found in zip(cases, taken, strict=True):
        wanted, alone = known[_problem(step)]
        many = errors(found.tensors, wanted)
        shown = {**_ratios(many, alone), "kernel": kernel[_problem(step)], "many": many, "one": alone}
        detail[step.dtype][_name(spec, step)] = shown
    return [_row(config, dtype, num_ranks, shown) for dtype, shown in detail.items()]


def _row(config: Config, dtype: str, num_ranks: int, cases: Mapping[str, Mapping[str, Any]]) -> Row:
    """`kernel` beside each case: the ratio where one rank computes the ranks' queries in turn, and nothing is sent."""
    worst = {name: max(case[tensor] for tensor in NAMES) for name, case in cases.items()}
    kernel = max(case["kernel"][tensor] for case in cases.values() for tensor in NAMES)
    return Row(
        f"{dtype}, {config.size.num_tokens} tokens, {num_ranks} ranks: error of out, dq, dk, dv over one rank's",
        at_most(1.1, "×"),
        max(worst.values()),
        detail={"worst": max(worst, key=worst.__getitem__), "worst_of_kernel": kernel, "cases": dict(cases)},
    )


def _ratios(many: Mapping[str, float], one: Mapping[str, float]) -> dict[str, float]:
    return {name: many[name] / one[name] for name in NAMES}


def _problem(step: Step) -> _Problem:
    """What one rank computes does not depend on schedule and order."""
    return step.pattern, step.num_kv_heads, step.dtype


def _problems(cases: Sequence[_Case]) -> list[_Case]:
    """One case of each problem."""
    return list({_problem(step): (spec, step) for spec, step in cases}.values())


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
