"""What a cached plan is worth: in time, in memory, and how often it is there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._call_key import CallKey
from flexdilated.engines.tiles._tiles_op import _programs

from ._claims import CACHED_MEMORY, CACHED_PASS, HITS, LOOK_UP
from ._longnets import LongNet
from ._memory import peak_bytes
from ._oracle import check_forward
from ._problem import Problem, Size, forward_job, train
from ._result import Row
from ._timing import Job, interleave, ratio

_WARM_UP_TOKENS = 64
_LOOK_UPS = 100


@dataclass(frozen=True)
class Caching:
    """One LongNet at one size; `steps` of `layers` layers each are the training run, in lengths that take turns."""

    spec: LongNet
    size: Size
    lengths: tuple[int, ...]
    steps: int
    layers: int = 4


def measure(config: Caching) -> list[Row]:
    """The claims on caching, in the order of the table."""
    spec, size = config.spec, config.size
    problem = Problem.draw(size)
    check_forward(spec.attention(), problem, spec)
    return [_look_up(spec, size), _passes(spec, problem, size.repeats), _memory(spec, size), _hits(config)]


def _look_up(spec: LongNet, size: Size) -> Row:
    jobs = (
        Job("planning", lambda _: _plan(spec, size), prepare=lambda: masks.cache().clear()),
        Job("look-ups", lambda _: [_plan(spec, size) for _ in range(_LOOK_UPS)], prepare=lambda: _plan(spec, size)),
    )
    planning, together = interleave(jobs, repeats=size.repeats)
    return LOOK_UP.row(ratio(planning, together) * _LOOK_UPS, (planning, together), look_ups_a_repeat=_LOOK_UPS)


def _plan(spec: LongNet, size: Size) -> object:
    heads, tokens = size.num_heads, size.num_tokens
    key = CallKey.of(spec.pattern().text, heads, heads, tokens, tokens, 0, 0, 0, heads, 1, [128, 128])
    return _programs(key, [], 1)


def _passes(spec: LongNet, problem: Problem, repeats: int) -> Row:
    attention = spec.attention()
    cached = forward_job("cached", attention, problem)
    cleared = Job("nothing cached", cached.run, prepare=lambda: masks.cache().clear())
    timings = interleave((cleared, cached), repeats=repeats)
    return CACHED_PASS.row(ratio(*timings), timings)


def _memory(spec: LongNet, size: Size) -> Row:
    without, cached = (peak_bytes(_forward, spec, size, planned) for planned in (False, True))
    saved = 100 * (1 - cached / max(1, without))
    return CACHED_MEMORY.row(saved, peak_bytes=cached, peak_bytes_without=without)


def _forward(spec: LongNet, size: Size, planned: bool) -> Callable[[], object]:
    _pass(spec, Size(_WARM_UP_TOKENS, size.num_heads, size.head_dim))
    if planned:
        _plan(spec, size)
    return lambda: _pass(spec, size)


@torch.no_grad()
def _pass(spec: LongNet, size: Size) -> object:
    q, k, v = torch.randn(3, 1, size.num_heads, size.num_tokens, size.head_dim).unbind()
    return fd.attend(q, k, v, spec.pattern())


def _hits(config: Caching) -> Row:
    problems = [Problem.draw(Size(length, config.size.num_heads, config.size.head_dim)) for length in config.lengths]
    masks.cache().clear()
    for step in range(config.steps):
        for _ in range(config.layers):
            train(config.spec.attention(), problems[step % len(problems)])
    stats = masks.cache().stats()
    return HITS.row(100 * stats.hit_rate, hits=stats.hits, misses=stats.misses)
