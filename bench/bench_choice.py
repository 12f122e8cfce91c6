"""Is the planner's choice the fastest way, and how far are its predictions off?"""

from dataclasses import dataclass
from typing import Any

import torch

from flexdilated import masks
from flexdilated.masks import recipes
from flexdilated.masks.planning._choice import way_of
from flexdilated.masks.planning._planner import Plan, plan
from flexdilated.tuning._tune import BRANCH_BY_BRANCH, Trialled, Trials, measure
from flexdilated.tuning._tune_machine import ON_CPU, Sizes, measure_machine
from flexdilated.tuning._tune_trial import Inputs

from ._longnets import GIGAPATH_5, LONGNET_4, LongNet
from ._problem import Size
from ._result import Result, Row, at_most
from ._timing import say

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Config:
    """All patterns at one size; how large the problems are on which the machine's constants are measured first."""

    size: Size
    constants: Sizes
    seconds: float


FULL = Config(Size(16384, num_heads=2), ON_CPU, seconds=1.0)
SMALL = Config(Size(512, num_heads=2, head_dim=16), Sizes(512, 2, 256), seconds=0.0)


def run(config: Config) -> Result:
    """Forward and backward of what the planner takes over the fastest of all ways, with constants measured before."""
    patterns = _patterns(config.size.num_tokens)
    constants = measure_machine(_CPU, seconds=config.seconds, sizes=config.constants)
    masks.set_machine(constants.machine)
    try:
        detail = {name: _measure(name, pattern, config) for name, pattern in patterns.items()}
    finally:
        masks.set_machine(None)
    worst = max(each["over_best"] for each in detail.values())
    row = Row(
        f"planner's choice, {config.size}, forward + backward: time over that of the fastest way, the worst pattern",
        at_most(1.10),
        worst,
        detail={"patterns": detail, "constants": constants.to_data()},
    )
    return Result((row,))


def _patterns(num_tokens: int) -> dict[str, masks.Pattern | masks.Mixture]:
    def longnet(spec: LongNet) -> masks.Mixture:
        lengths = [max(1, length * num_tokens // 16384) for length in spec.segment_lengths]
        mixture = masks.longnet(lengths, spec.dilation_rates)
        assert isinstance(mixture, masks.Mixture)
        return mixture

    return {
        "LongNet-4": longnet(LONGNET_4),
        "GigaPath-5": longnet(GIGAPATH_5),
        "local window": masks.local_window(left=num_tokens // 16 - 1, right=0),
        "BigBird": recipes.bigbird(num_tokens),
        "strided": recipes.sparse_transformer_strided(min(128, num_tokens // 16)),
    }


def _measure(name: str, pattern: masks.Pattern | masks.Mixture, config: Config) -> dict[str, Any]:
    size = config.size
    bound = pattern.bind(num_heads=size.num_heads, num_queries=size.num_tokens, num_keys=size.num_tokens)
    x = Inputs.of(bound, num_kv_heads=size.num_heads, head_dim=size.head_dim, dtype=torch.float32, device=_CPU)
    found = measure(bound, x, backward=True, seconds=config.seconds)
    choice = _chosen(found, plan(bound))
    won = [each for each in found.all if found.won(each) and each.option.layout != BRANCH_BY_BRANCH]
    best = _seconds(found, won)
    measured, predicted = _seconds(found, choice), sum(each.predicted_s for each in choice)
    say(f"{name}: planned {measured:.3g} s, fastest {best:.3g} s, predicted {predicted:.3g} s")
    return {
        "over_best": max(1.0, measured / best),
        "predicted_over_measured": predicted / measured,
        "planned": [each.name for each in choice],
        "ways": [_way(each) for each in found.all],
    }


def _chosen(found: Trials, planned: Plan) -> list[Trialled]:
    """The trials of what the planner takes: one of all branches together, or one a branch."""
    chosen = [options[0] for options in planned.options]
    if planned.together is not None and chosen[0] is planned.together:
        return [each for each in found.all if each.branch is None and each.option.layout != BRANCH_BY_BRANCH]
    return [
        each
        for index, option in enumerate(chosen)
        for each in found.all
        if each.branch == index and way_of(each.option) == way_of(option)
    ]


def _seconds(found: Trials, some: list[Trialled]) -> float:
    """What a way of all branches took; where branches were also run as one, that tells how their times add up."""
    whole = next((each for each in found.all if each.option.layout == BRANCH_BY_BRANCH), None)
    total = sum(each.times.median_s for each in some)
    if whole is None or some[0].branch is None:
        return total
    fastest = [
        min(each.times.median_s for each in found.all if each.branch == index)
        for index in {each.branch for each in found.all if each.branch is not None}
    ]
    return total / sum(fastest) * whole.times.median_s


def _way(each: Trialled) -> dict[str, object]:
    return {
        "branch": each.branch,
        "way": each.name,
        "predicted_s": each.predicted_s,
        "measured_s": each.times.median_s,
        "spread": each.times.spread,
    }
