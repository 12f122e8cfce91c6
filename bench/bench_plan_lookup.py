"""How long does a call wait for a plan that is already there?"""

from collections.abc import Callable
from dataclasses import dataclass

from flexdilated.engines._call_key import CallKey
from flexdilated.engines.tiles._tiles_op import _programs
from flexdilated.masks.planning._planner import plan

from ._longnets import LONGNET_5, LongNet
from ._problem import Size
from ._result import Result, Row, Timing, at_most
from ._timing import Job, interleave


@dataclass(frozen=True)
class Config:
    """One LongNet at one size; each repeat times `lookups` look-ups together."""

    spec: LongNet
    size: Size
    lookups: int


FULL = Config(LONGNET_5.as_causal(), Size(65536, num_heads=16, repeats=9), lookups=2000)
SMALL = Config(LONGNET_5.shrunk(32).as_causal(), Size(2048, num_heads=16, repeats=3), lookups=100)


def run(config: Config) -> Result:
    """C6: what every call of the tiles engine looks up, and the plan behind it by pattern and sizes."""
    pattern, size = config.spec.pattern(), config.size
    heads, tokens = size.num_heads, size.num_tokens

    def plan_of_call() -> object:
        key = CallKey.of(pattern.text, heads, heads, tokens, tokens, 0, 0, 0, heads, 1, [128, 128])
        return _programs(key, [], 1)[0][1]

    def plan_of_sizes() -> object:
        return plan(pattern.bind(num_heads=size.num_heads, num_queries=size.num_tokens, num_keys=size.num_tokens))

    return Result(
        (
            _measure("a call's cached plan", plan_of_call, config),
            _measure("binding and its cached plan", plan_of_sizes, config),
        )
    )


def _measure(name: str, look_up: Callable[[], object], config: Config) -> Row:
    assert look_up() is look_up(), f"{name}: a second look-up must find what the first built"

    def many(given: None) -> None:
        for _ in range(config.lookups):
            look_up()

    (together,) = interleave((Job(f"{config.lookups} look-ups", many),), repeats=config.size.repeats)
    each = Timing("one look-up", tuple(seconds / config.lookups for seconds in together.seconds))
    return Row(
        f"{config.spec.label}, {config.size}, {config.size.num_heads} heads: look-up of {name}",
        at_most(20, "µs"),
        each.median_s * 1e6,
        (each,),
        {"lookups_a_repeat": config.lookups},
    )
