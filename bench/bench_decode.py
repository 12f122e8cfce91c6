"""Is a decoding step as quick after a million tokens as after 64 thousand, at equal phase?"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import flexdilated as fd

from ._longnets import LONGNET_5, LongNet
from ._oracle import by_definition, relative_error
from ._problem import Problem, Size, tokens_text
from ._result import Result, Row, at_most
from ._timing import Job, interleave, ratio, say
from .peer_dense import dense_attention

_TOLERANCE = 1e-5  # as for whole passes


@dataclass(frozen=True)
class Config:
    """One causal LongNet, and steps after each number of past tokens.

    `phases`, ascending, are the places in the longest segment at which the timed steps begin. The past numbers
    are multiples of that segment, so steps of equal phase see equally many keys. Each of `size.repeats` rounds
    times `steps` steps together, of tokens that follow one another. `size.num_tokens` tokens are drawn, and
    repeated to fill the past.
    """

    spec: LongNet
    size: Size
    past: tuple[int, int]
    phases: tuple[int, ...]
    steps: int


FULL = Config(
    LONGNET_5.as_causal(),
    Size(65536, num_heads=16, repeats=31),
    past=(65536, 1048576),
    phases=(1000, 11000, 21000, 32000),
    steps=16,
)
SMALL = Config(
    LONGNET_5.shrunk(64).as_causal(),
    Size(1024, num_heads=16, repeats=2),
    past=(1024, 8192),
    phases=(100, 490),
    steps=4,
)


@torch.no_grad()
def run(config: Config) -> Result:
    """C10: the step after more past tokens over the step after fewer, at the phase where that is most."""
    assert all(past % config.size.num_tokens == 0 for past in config.past)
    assert config.size.num_tokens % max(config.spec.segment_lengths) == 0
    problem = Problem.draw(config.size)
    caches = [_filled(config, problem, past) for past in config.past]
    rows = [_measure(config, problem, caches, phase) for phase in config.phases]
    by_phase = {str(phase): row.measured for phase, row in zip(config.phases, rows, strict=True)}
    say(f"growth by phase: {by_phase}")
    worst = max(rows, key=lambda row: row.measured)
    detail = {**worst.detail, "growth_by_phase": by_phase}
    return Result((Row(worst.measure, worst.target, worst.measured, worst.timings, detail),))


def _filled(config: Config, problem: Problem, past: int) -> fd.KVCache:
    cache = fd.KVCache(config.spec.pattern(), num_heads=config.size.num_heads)
    for _ in range(past // config.size.num_tokens):
        cache.append(problem.k, problem.v)
    return cache


def _measure(config: Config, problem: Problem, caches: list[fd.KVCache], phase: int) -> Row:
    texts = [tokens_text(past) for past in config.past]
    for cache, past in zip(caches, config.past, strict=True):
        here = slice(cache.num_tokens - past, phase)
        cache.append(problem.k[:, :, here], problem.v[:, :, here])
        _check_step(config.spec, problem, cache, phase)
    tokens = [_tokens_from(problem, phase + 1) for _ in caches]
    jobs = [
        Job(f"after {text} tokens", lambda _, cache=cache, ahead=ahead: _steps(cache, ahead, config.steps))
        for cache, ahead, text in zip(caches, tokens, texts, strict=True)
    ]
    dense = dense_attention(causal=False)
    last = problem.q[:, :, -1:]
    jobs.append(Job(f"one dense step, {texts[0]} keys", lambda _: dense(last, problem.k, problem.v)))
    *timings, dense_timing = interleave(jobs, repeats=config.size.repeats)
    return Row(
        f"{config.spec.label}, {config.size.num_heads} heads, decoding step at equal phase: "
        f"{texts[1]} past tokens over {texts[0]}",
        at_most(1.2, "×"),
        ratio(timings[1], timings[0]),
        (*timings, dense_timing),
        {
            "phase": phase,
            "steps_a_repeat": config.steps,
            "step_us": [timing.median_s / config.steps * 1e6 for timing in timings],
            "dense_step_us": dense_timing.median_s * 1e6,
            "keys_kept": [cache.num_kept for cache in caches],
            "cache_bytes": [cache.nbytes for cache in caches],
        },
    )


def _check_step(spec: LongNet, problem: Problem, cache: fd.KVCache, phase: int) -> None:
    """The step's output is that of the definition, which sees the tokens of the longest segment alone."""
    out = cache.attend(*(x[:, :, phase : phase + 1] for x in (problem.q, problem.k, problem.v)))
    k, v = (x[0, :, : phase + 1].double() for x in (problem.k, problem.v))
    q = problem.q[0, :, phase : phase + 1].double()
    expected, _ = by_definition(q, k, v, spec, torch.tensor([phase]))
    error = relative_error(out[0], expected)
    assert error <= _TOLERANCE, f"a step must be within {_TOLERANCE} of the definition; it is off by {error:.2e}"


def _tokens_from(problem: Problem, first: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each token from `first` on."""
    return zip(*(x[:, :, first:].split(1, dim=2) for x in (problem.q, problem.k, problem.v)), strict=True)


def _steps(cache: fd.KVCache, tokens: Iterator[tuple[Tensor, Tensor, Tensor]], number: int) -> None:
    for _ in range(number):
        cache.attend(*next(tokens))
