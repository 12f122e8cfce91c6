"""Decoding: steps after more tokens, and calls of few queries beside steps of a cache."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexdilated as fd
from flexdilated import masks

from ._checks import assert_near, by_definition
from ._jobs import Job, Problem, Size, interleave, ratio, say, tokens_text
from ._measures import Row, at_most, measure
from ._rules import LONGNET_4, LONGNET_5, LongNet
from .peers import dense_attention


@measure(
    "C10",
    spec=LONGNET_5.shrunk(64).as_causal(),
    size=Size(1024, num_heads=16, repeats=2),
    past=(1024, 8192),
    phases=(100, 490),
    steps=4,
)
@torch.no_grad()
def decoding(
    spec: LongNet = LONGNET_5.as_causal(),
    size: Size = Size(65536, num_heads=16, repeats=31),
    past: tuple[int, int] = (65536, 1048576),
    phases: tuple[int, ...] = (1000, 11000, 21000, 32000),
    steps: int = 16,
) -> Iterator[Row]:
    """Is a decoding step as quick after a million tokens as after 64 thousand, at equal phase?

    `phases`, ascending, are the places in the longest segment at which the timed steps begin. The past numbers
    are multiples of that segment, so steps of equal phase see equally many keys. Each round times `steps` steps
    together, of tokens that follow one another. `size.num_tokens` tokens are drawn, and repeated to fill the past.
    The row is that of the phase where the growth is most.
    """
    assert all(tokens % size.num_tokens == 0 for tokens in past)
    assert size.num_tokens % max(spec.segment_lengths) == 0
    problem, caches = Problem.draw(size), []
    for tokens in past:
        caches.append(fd.KVCache(spec.pattern(), num_heads=size.num_heads))
        for _ in range(tokens // size.num_tokens):
            caches[-1].append(problem.k, problem.v)
    rows = [_at_phase(spec, size, problem, dict(zip(past, caches, strict=True)), phase, steps) for phase in phases]
    by_phase = {str(phase): row.measured for phase, row in zip(phases, rows, strict=True)}
    say(f"growth by phase: {by_phase}")
    worst = max(rows, key=lambda row: row.measured)
    yield Row(worst.measure, worst.target, worst.measured, worst.timings, {**worst.detail, "growth_by_phase": by_phase})


def _at_phase(
    spec: LongNet, size: Size, problem: Problem, caches: dict[int, fd.KVCache], phase: int, steps: int
) -> Row:
    jobs = []
    for past, cache in caches.items():
        here = slice(cache.num_tokens - past, phase)
        cache.append(problem.k[:, :, here], problem.v[:, :, here])
        out = cache.attend(*(x[:, :, phase : phase + 1] for x in (problem.q, problem.k, problem.v)))
        _check(spec, problem, out, phase, "a step")
        following = (x[:, :, phase + 1 :].split(1, dim=2) for x in (problem.q, problem.k, problem.v))
        tokens, name = zip(*following, strict=True), f"after {tokens_text(past)} tokens"
        jobs.append(Job(name, lambda _, c=cache, each=tokens: [c.attend(*next(each)) for _ in range(steps)]))
    dense, (few, many) = dense_attention(causal=False), map(tokens_text, caches)
    last = problem.q[:, :, -1:]
    jobs.append(Job(f"one dense step, {few} keys", lambda _: dense(last, problem.k, problem.v)))
    *timings, dense_timing = interleave(jobs, repeats=size.repeats)
    return Row(
        f"{spec.label}, {size.num_heads} heads, decoding step at equal phase: {many} past tokens over {few}",
        at_most(1.2, "×"),
        ratio(timings[1], timings[0]),
        (*timings, dense_timing),
        {
            "phase": phase,
            "steps_a_repeat": steps,
            "step_us": [timing.median_s / steps * 1e6 for timing in timings],
            "dense_step_us": dense_timing.median_s * 1e6,
            "keys_kept": [cache.num_kept for cache in caches.values()],
            "cache_bytes": [cache.nbytes for cache in caches.values()],
        },
    )


def _check(spec: LongNet, problem: Problem, out: Tensor, first: int, name: str) -> None:
    """The output of the queries from `first` on is that of the definition over the tokens up to the last of them."""
    stop = first + out.shape[2]
    q, k, v = (x[0, :, :stop].double() for x in (problem.q, problem.k, problem.v))
    assert_near(name, out[0], by_definition(q[:, first:], k, v, spec, torch.arange(first, stop))[0])


@measure(
    "C14",
    spec=LONGNET_4.shrunk(64).as_causal(),
    size=Size(256, num_heads=8, repeats=2),
    past=(256,),
    queries=(1, 16),
    steps=2,
    counted=50,
)
@torch.no_grad()
def few_queries(
    spec: LongNet = LONGNET_4.as_causal(),
    size: Size = Size(16384, num_heads=8, repeats=15),
    past: tuple[int, ...] = (4096, 16384),
    queries: tuple[int, ...] = (1, 4, 16),
    steps: int = 4,
    counted: int = 1000,
) -> Iterator[Row]:
    """Is a call with a new query offset as quick as a step of a cache, and does it leave anything behind?

    Steps of so many `queries` that end where `past` tokens do; each round times `steps` steps together, of tokens
    that follow one another. What is left in the cache of plans is counted over `counted` steps of one query.
    """
    problem, pattern = Problem.draw(size), spec.pattern()
    for tokens in past:
        for number in queries:
            yield _calls(spec, size, problem, tokens, number, steps)
    before = 0
    masks.cache().clear()
    for at in range(1, counted + 1):
        q, k, v = problem.q[:, :, at : at + 1], problem.k[:, :, : at + 1], problem.v[:, :, : at + 1]
        fd.attend(q, k, v, pattern, q_offset=at)
        before = before or masks.cache().stats().entries
    left = masks.cache().stats().entries - before
    what = f"{spec.label}: entries that {counted:,} calls with new offsets add to the cache of plans"
    yield Row(what, at_most(0), left, detail={"entries_of_the_first_call": before})


def _calls(spec: LongNet, size: Size, problem: Problem, past: int, queries: int, steps: int) -> Row:
    """Each way goes through the same tokens in its own time."""
    first = past - queries * (1 + steps * size.repeats)
    assert first >= 0, "the steps must begin within the tokens"
    pattern = spec.pattern()
    cache = fd.KVCache(pattern, num_heads=size.num_heads)
    cache.append(problem.k[:, :, :first], problem.v[:, :, :first])

    def step(at: int) -> Tensor:
        return cache.attend(*(x[:, :, at : at + queries] for x in (problem.q, problem.k, problem.v)))

    def call(at: int) -> Tensor:
        q, k, v = problem.q[:, :, at : at + queries], problem.k[:, :, : at + queries], problem.v[:, :, : at + queries]
        return fd.attend(q, k, v, pattern, q_offset=at)

    def dense_call(at: int) -> Tensor:
        q, k, v = problem.q[:, :, at : at + queries], problem.k[:, :, : at + queries], problem.v[:, :, : at + queries]
        shown = torch.ones(queries, at + queries, dtype=torch.bool).tril(at)
        return scaled_dot_product_attention(q, k, v, attn_mask=shown)

    ways = {"steps of a cache": step, "calls with new offsets": call, "dense calls": dense_call}
    jobs = []
    for name, way in ways.items():
        places = iter(range(first, size.num_tokens, queries))
        _check(spec, problem, way(next(places)), first, name) if way is not dense_call else way(next(places))
        jobs.append(Job(name, lambda _, way=way, each=places: [way(next(each)) for _ in range(steps)]))
    timings = interleave(jobs, repeats=size.repeats)
    return Row(
        f"{spec.label}, {size.num_heads} heads, {queries} {'query' if queries == 1 else 'queries'} "
        f"at {tokens_text(past)} tokens: a call with a new offset over a cache's step",
        at_most(1.5, "×"),
        ratio(timings[1], timings[0]),
        timings,
        {"steps_a_repeat": steps, "step_us": [each.median_s / steps * 1e6 for each in timings]},
    )
