"""Planning: how long a plan that is there takes, what plans compute, and whether they choose the fastest way."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from flexdilated import masks
from flexdilated.engines._call_key import CallKey
from flexdilated.engines.tiles._tiles_op import _programs
from flexdilated.masks import recipes
from flexdilated.masks.planning._options import Choice, way_of
from flexdilated.masks.planning._planner import plan
from flexdilated.tuning._tune import BRANCH_BY_BRANCH, Inputs, Trialled
from flexdilated.tuning._tune import measure as measure_ways
from flexdilated.tuning._tune_machine import ON_CPU, Sizes, measure_machine

from ._jobs import Job, Size, interleave, say, tokens_text
from ._measures import Row, Timing, at_most, measure
from ._rules import GIGAPATH_5, LONGNET_4, LONGNET_5, PAPER_5, LongNet

_CPU = torch.device("cpu")


def planned_call(pattern: masks.Pattern | masks.Mixture, num_heads: int, num_tokens: int) -> object:
    """What every call of the tiles engine looks up, and plans where it is not there."""
    sizes = (num_heads, num_heads, num_tokens, num_tokens, 0, 0, 0, num_heads, 1)
    return _programs(CallKey.of(pattern.text, *sizes, [128, 128]), [], 1)[0][1]


@measure("C6", spec=LONGNET_5.shrunk(32).as_causal(), size=Size(2048, num_heads=16, repeats=3), lookups=100)
def plan_lookup(
    spec: LongNet = LONGNET_5.as_causal(), size: Size = Size(65536, num_heads=16, repeats=9), lookups: int = 2000
) -> Iterator[Row]:
    """How long does a call wait for a plan that is already there?

    What every call of the tiles engine looks up, and the plan behind it by pattern and sizes.
    """
    pattern, heads, tokens = spec.pattern(), size.num_heads, size.num_tokens
    ways: dict[str, Callable[[], object]] = {
        "a call's cached plan": lambda: planned_call(pattern, heads, tokens),
        "binding and its cached plan": lambda: plan(pattern.bind(num_heads=heads, num_queries=tokens, num_keys=tokens)),
    }
    for name, look_up in ways.items():
        assert look_up() is look_up(), f"{name}: a second look-up must find what the first built"
        many = Job(f"{lookups} look-ups", lambda _, look_up=look_up: [look_up() for _ in range(lookups)])
        (together,) = interleave((many,), repeats=size.repeats)
        each = Timing("one look-up", tuple(seconds / lookups for seconds in together.seconds))
        what = f"{spec.label}, {size}, {heads} heads: look-up of {name}"
        yield Row(what, at_most(20, "µs"), each.median_s * 1e6, (each,), {"lookups_a_repeat": lookups})


@measure("C18", union_tokens=(1024, 2048), grid=(4, 8, 8), repeats=1)
def cold_plans(
    union_tokens: tuple[int, ...] = (65536, 1 << 20), grid: tuple[int, ...] = (16, 32, 32), repeats: int = 3
) -> Iterator[Row]:
    """How long does a first call wait for its plan, with nothing cached: plan, block lists and calls, of 4 heads?"""
    union = masks.local_window(left=256, right=256) | masks.dilated_window(left=64, right=64, rate=64)
    union = union | masks.global_tokens(16)
    cases = [("window, dilated window and global tokens", union, tokens) for tokens in union_tokens]
    cases.append(("3-D neighbourhood", masks.neighborhood(grid, min(3, (min(grid) - 1) // 2)), prod(grid)))
    for (name, pattern, tokens), target in zip(cases, (0.5, 2, 1), strict=True):
        job = Job(name, lambda _, rule=pattern, size=tokens: planned_call(rule, 4, size), masks.cache().clear)
        (cold,) = interleave((job,), repeats=repeats)
        yield Row(f"{tokens_text(tokens)}: cold plan of {name}", at_most(target, "s"), cold.median_s, (cold,))


@measure("C12", specs=(LONGNET_4, PAPER_5, GIGAPATH_5), num_tokens=(4096, 16384), num_heads=4)
def computed_pairs(
    specs: tuple[LongNet, ...] = (LONGNET_4, LONGNET_5, PAPER_5, GIGAPATH_5),
    num_tokens: tuple[int, ...] = (16384, 32768, 65536, 131072, 262144),
    num_heads: int = 16,
) -> Iterator[Row]:
    """How many pairs does the planner's choice compute for each useful one?

    Pairs in the plan's listed blocks of 128 over useful pairs; the worst size of each LongNet, full and causal. The
    useful pairs that `describe` counts are held against the closed form.
    """
    for spec in (each for full in specs for each in (full, full.as_causal())):
        ratios = {}
        for tokens in num_tokens:
            described = masks.describe(spec.pattern(), tokens, num_heads=num_heads)
            useful = spec.pairs(num_tokens=tokens, num_heads=num_heads)
            counted = described.useful_pairs
            assert counted == useful, f"{spec.label}, {tokens} tokens: {useful} useful pairs; describe counts {counted}"
            ratios[tokens_text(tokens)] = described.computed_pairs / useful
        say(f"{spec.label}: {', '.join(f'{size} {value:.3f}' for size, value in ratios.items())}")
        name = f"{spec.label}, {tokens_text(num_tokens[0])} to {tokens_text(num_tokens[-1])}"
        what = f"{name}: computed over useful pairs, worst size"
        yield Row(what, at_most(1.15), max(ratios.values()), detail=ratios)


@measure(
    names=("LongNet-4", "strided"), size=Size(256, num_heads=1, head_dim=16), constants=Sizes(128, 2, 128), seconds=0.0
)
def choice(
    names: tuple[str, ...] = ("LongNet-4", "GigaPath-5", "local window", "BigBird", "strided"),
    size: Size = Size(16384, num_heads=2),
    constants: Sizes = ON_CPU,
    seconds: float = 1.0,
) -> Iterator[Row]:
    """Is the planner's choice the fastest way, and how far are its predictions off?

    Forward and backward of what the planner takes over the fastest of all ways, with constants measured before.
    """
    found = measure_machine(_CPU, seconds=seconds, sizes=constants)
    masks.set_machine(found.machine)
    try:
        detail = {name: _measure(name, _pattern(name, size.num_tokens), size, seconds) for name in names}
    finally:
        masks.set_machine(None)
    yield Row(
        f"planner's choice, {size}, forward + backward: time over that of the fastest way, the worst pattern",
        at_most(1.10),
        max(each["over_best"] for each in detail.values()),
        detail={"patterns": detail, "constants": found.to_data()},
    )


def _pattern(name: str, num_tokens: int) -> masks.Pattern | masks.Mixture:
    specs = {"LongNet-4": LONGNET_4, "GigaPath-5": GIGAPATH_5}
    if name in specs:
        lengths = [max(1, length * num_tokens // 16384) for length in specs[name].segment_lengths]
        return masks.longnet(lengths, specs[name].dilation_rates)
    return {
        "local window": lambda: masks.local_window(left=num_tokens // 16 - 1, right=0),
        "BigBird": lambda: recipes.bigbird(num_tokens),
        "strided": lambda: recipes.sparse_transformer_strided(min(128, num_tokens // 16)),
    }[name]()


def _measure(name: str, pattern: masks.Pattern | masks.Mixture, size: Size, seconds: float) -> dict[str, Any]:
    bound = pattern.bind(num_heads=size.num_heads, num_queries=size.num_tokens, num_keys=size.num_tokens)
    x = Inputs.of(bound, num_kv_heads=size.num_heads, head_dim=size.head_dim, dtype=torch.float32, device=_CPU)
    found, fastest = measure_ways(bound, x, backward=True, seconds=seconds)
    planned = plan(bound)
    chosen = tuple(options[0] for options in planned.options)
    choice = _taken(found, Choice(chosen[0] in planned.together, tuple(map(way_of, chosen))))
    best = _seconds(found, _taken(found, fastest))
    measured, predicted = _seconds(found, choice), sum(each.predicted_s for each in choice)
    say(f"{name}: planned {measured:.3g} s, fastest {best:.3g} s, predicted {predicted:.3g} s")
    ways = [
        {
            "branch": each.branch,
            "way": each.name,
            "predicted_s": each.predicted_s,
            "measured_s": each.times.median_s,
            "spread": each.times.spread,
        }
        for each in found
    ]
    return {
        "over_best": max(1.0, measured / best),
        "predicted_over_measured": predicted / measured,
        "planned": [each.name for each in choice],
        "ways": ways,
    }


def _taken(found: list[Trialled], choice: Choice) -> list[Trialled]:
    """The trials of a choice: one of all branches together, or one a branch."""
    branches = [None] if choice.together else range(len(choice.ways))
    return [
        each
        for branch, way in zip(branches, choice.ways, strict=True)
        for each in found
        if each.branch == branch and way_of(each.option) == way
    ]


def _seconds(found: list[Trialled], some: list[Trialled]) -> float:
    """What a way of all branches took; where branches were also run as one, that tells how their times add up."""
    whole = next((each for each in found if each.option.layout == BRANCH_BY_BRANCH), None)
    total = sum(each.times.median_s for each in some)
    if whole is None or some[0].branch is None:
        return total
    fastest = [
        min(each.times.median_s for each in found if each.branch == index)
        for index in {each.branch for each in found if each.branch is not None}
    ]
    return total / sum(fastest) * whole.times.median_s
