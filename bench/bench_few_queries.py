"""Is a call with a new query offset as quick as a step of a cache, and does it leave anything behind?"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexdilated as fd
from flexdilated import masks

from ._longnets import LONGNET_4, LongNet
from ._oracle import by_definition, relative_error
from ._problem import Problem, Size, tokens_text
from ._result import Result, Row, at_most
from ._timing import Job, interleave, ratio

_TOLERANCE = 1e-5  # as for whole passes


@dataclass(frozen=True)
class Config:
    """One causal LongNet, and steps of so many `queries` that end where `past` tokens do.

    Each of `size.repeats` rounds times `steps` steps together, of tokens that follow one another. `size.num_tokens`
    tokens are drawn. What is left behind is counted over `counted` steps of one query.
    """

    spec: LongNet
    size: Size
    past: tuple[int, ...]
    queries: tuple[int, ...]
    steps: int
    counted: int


FULL = Config(
    LONGNET_4.as_causal(),
    Size(16384, num_heads=8, repeats=15),
    past=(4096, 16384),
    queries=(1, 4, 16),
    steps=4,
    counted=1000,
)
SMALL = Config(
    LONGNET_4.shrunk(64).as_causal(),
    Size(256, num_heads=8, repeats=2),
    past=(256,),
    queries=(1, 16),
    steps=2,
    counted=50,
)


@torch.no_grad()
def run(config: Config) -> Result:
    """C14: `attend` with a new query offset each call over a KVCache's step, and entries that the calls leave."""
    problem = Problem.draw(config.size)
    cases = [(past, queries) for past in config.past for queries in config.queries]
    return Result((*(_measure(config, problem, *case) for case in cases), _left_behind(config, problem)))


def _measure(config: Config, problem: Problem, past: int, queries: int) -> Row:
    first = past - queries * (1 + config.steps * config.size.repeats)
    assert first >= 0, "the steps must begin within the tokens"
    pattern = config.spec.pattern()
    cache = fd.KVCache(pattern, num_heads=config.size.num_heads)
    cache.append(problem.k[:, :, :first], problem.v[:, :, :first])
    # Each way goes through the same tokens in its own time.
    from_cache, by_calls, dense = (_steps(problem, first, queries) for _ in range(3))

    def step(_: None) -> Tensor:
        at, q = next(from_cache)
        return cache.attend(q, *(x[:, :, at : at + queries] for x in (problem.k, problem.v)))

    def call(_: None) -> Tensor:
        at, q = next(by_calls)
        k, v = problem.k[:, :, : at + queries], problem.v[:, :, : at + queries]
        return fd.attend(q, k, v, pattern, q_offset=at)

    def dense_call(_: None) -> Tensor:
        at, q = next(dense)
        shown = torch.ones(queries, at + queries, dtype=torch.bool).tril(at)
        k, v = problem.k[:, :, : at + queries], problem.v[:, :, : at + queries]
        return scaled_dot_product_attention(q, k, v, attn_mask=shown)

    for name, found in (("a cache", step(None)), ("a call", call(None))):
        _check(config.spec, problem, found, first, name)
    dense_call(None)
    ways = (("steps of a cache", step), ("calls with new offsets", call), ("dense calls", dense_call))
    jobs = [Job(name, lambda _, way=way: [way(None) for _ in range(config.steps)]) for name, way in ways]
    timings = interleave(jobs, repeats=config.size.repeats)
    return Row(
        f"{config.spec.label}, {config.size.num_heads} heads, {queries} {'query' if queries == 1 else 'queries'} "
        f"at {tokens_text(past)} tokens: a call with a new offset over a cache's step",
        at_most(1.5, "×"),
        ratio(timings[1], timings[0]),
        timings,
        {"steps_a_repeat": config.steps, "step_us": [each.median_s / config.steps * 1e6 for each in timings]},
    )


def _left_behind(config: Config, problem: Problem) -> Row:
    """Entries of the cache of plans after many calls, over those after the first."""
    pattern, before = config.spec.pattern(), 0
    masks.cache().clear()
    for at in range(1, config.counted + 1):
        q, k, v = problem.q[:, :, at : at + 1], problem.k[:, :, : at + 1], problem.v[:, :, : at + 1]
        fd.attend(q, k, v, pattern, q_offset=at)
        before = before or masks.cache().stats().entries
    left = masks.cache().stats().entries - before
    measure = f"{config.spec.label}: entries that {config.counted:,} calls with new offsets add to the cache of plans"
    return Row(measure, at_most(0), left, detail={"entries_of_the_first_call": before})


def _steps(problem: Problem, first: int, queries: int) -> Iterator[tuple[int, Tensor]]:
    """The position of each step's first query, and its queries."""
    for at in range(first, problem.q.shape[2] - queries + 1, queries):
        yield at, problem.q[:, :, at : at + queries]


def _check(spec: LongNet, problem: Problem, out: Tensor, first: int, name: str) -> None:
    """The first step's output is that of the definition."""
    rows = torch.arange(first, first + out.shape[2])
    q, k, v = (x[0, :, : first + out.shape[2]].double() for x in (problem.q, problem.k, problem.v))
    expected, _ = by_definition(q[:, first:], k, v, spec, rows)
    error = relative_error(out[0], expected)
    assert error <= _TOLERANCE, f"{name} must be within {_TOLERANCE} of the definition; it is off by {error:.2e}"
