"""Decoding steps, calls of few queries, and packed documents, each against a plainer way."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexdilated as fd
from flexdilated import masks

from ._checks import TOLERANCE, assert_near, by_definition, check_training
from ._jobs import Attention, Job, Problem, Size, attention_job, interleave, ratio, say, tokens_text, train
from ._measures import Row, at_most, measure
from ._rules import LONGNET_4, LONGNET_5, LongNet, attention_by
from .peers import dense_attention

_TRAIN = "forward + backward"


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

    `phases`, ascending, are the places in the longest segment at which the timed steps begin. `past` are multiples of
    that segment, so steps of equal phase see equally many keys. Each round times `steps` successive tokens together.
    `size.num_tokens` tokens are drawn, and repeated to fill the past. The row is the phase with the largest growth.
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
    yield replace(worst, detail={**worst.detail, "growth_by_phase": by_phase})


def _at_phase(
    spec: LongNet, size: Size, problem: Problem, caches: dict[int, fd.KVCache], phase: int, steps: int
) -> Row:
    jobs = []
    for past, cache in caches.items():
        here = slice(cache.num_tokens - past, phase)
        cache.append(problem.k[:, :, here], problem.v[:, :, here])
        out = cache.attend(*(x[:, :, phase : phase + 1] for x in problem.qkv))
        _check(spec, problem, out, phase, "a step")
        following = (x[:, :, phase + 1 :].split(1, dim=2) for x in problem.qkv)
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
    """AssertionError unless the queries from `first` on have the definition's output over tokens up to the last."""
    stop = first + out.shape[2]
    q, k, v = (x[0, :, :stop].double() for x in problem.qkv)
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

    Steps of `queries` each that end at `past` tokens; each round times `steps` successive ones together. Entries added
    to the cache of plans are counted over `counted` steps of one query.
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
    first = past - queries * (1 + steps * size.repeats)
    assert first >= 0, "the steps must begin within the tokens"
    pattern = spec.pattern()
    cache = fd.KVCache(pattern, num_heads=size.num_heads)
    cache.append(problem.k[:, :, :first], problem.v[:, :, :first])

    def until(at: int) -> tuple[Tensor, Tensor, Tensor]:
        """The queries from `at` on, and all keys up to the last of them."""
        stop = at + queries
        return problem.q[:, :, at:stop], problem.k[:, :, :stop], problem.v[:, :, :stop]

    def step(at: int) -> Tensor:
        return cache.attend(*(x[:, :, at : at + queries] for x in problem.qkv))

    def call(at: int) -> Tensor:
        return fd.attend(*until(at), pattern, q_offset=at)

    def dense_call(at: int) -> Tensor:
        shown = torch.ones(queries, at + queries, dtype=torch.bool).tril(at)
        return scaled_dot_product_attention(*until(at), attn_mask=shown)

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


@measure("C15", lengths=(1, 17), size=Size(512, num_heads=2, repeats=1))
def many_documents(lengths: tuple[int, ...] = (1, 4, 17, 128), size: Size = Size(65536, num_heads=1)) -> Iterator[Row]:
    """Do many short documents take no longer than the same rule written as chunks of equal length?

    Forward and backward, causal; with ids that a call before had, and with ids that are planned anew.
    """
    for length in lengths:
        problem, rule = Problem.draw(size), LongNet("chunks", (length,), (1,), causal=True)
        packed = masks.causal() & masks.documents(torch.arange(size.num_tokens) // length)
        chunks, documents = attention_by(masks.chunked(length) & masks.causal()), attention_by(packed)
        for attention in (chunks, documents):
            if length > 1:
                check_training(attention, problem, rule)
            else:
                _check_alone(attention, problem)
        jobs = (
            attention_job("chunks", chunks, problem, _TRAIN),
            attention_job("documents, known ids", documents, problem, _TRAIN),
            replace(
                attention_job("documents, new ids", documents, problem, _TRAIN),
                prepare=partial(masks.cache().forget, packed),
            ),
        )
        written, known, new = interleave(jobs, repeats=size.repeats)
        what, target = f"{size}, documents of {length} tokens, causal, forward + backward", at_most(2, "×")
        yield Row(f"{what}: time over chunks", target, ratio(known, written), (known, written))
        yield Row(f"{what}, planned anew: time over chunks", target, ratio(new, written), (new, written))


@measure("C17", size=Size(300, num_heads=1, repeats=1))
def factors_of_unions(size: Size = Size(65536, num_heads=4, repeats=5)) -> Iterator[Row]:
    """Does a run-time tensor over a union of windows leave it as fast as it is without?

    Forward and backward of a window and a dilated window, as planned and planned anew, over the rule without.
    """
    problem, small = Problem.draw(size), Problem.draw(replace(size, num_tokens=min(size.num_tokens, 1024)))
    for rule in _factors(small.q.shape[2]).values():
        found, wanted = fd.attend(*small.qkv, rule), fd.attend(*small.qkv, rule, engine="reference")
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    rules = _factors(size.num_tokens)
    jobs = [attention_job(name, attention_by(rule), problem, _TRAIN) for name, rule in rules.items()]
    anew = [replace(job, name=f"{job.name}, planned anew", prepare=masks.cache().clear) for job in jobs]
    for target, timed in ((at_most(2, "×"), anew), (at_most(1.3, "×"), jobs)):
        for job in timed:
            job.seconds()
        without, *found = interleave(timed, repeats=size.repeats)
        for each in found:
            what = f"{size}, union of windows, forward + backward, {each.name}: time over the rule without"
            yield Row(what, target, ratio(each, without), (each, without))


def _factors(tokens: int) -> dict[str, masks.Pattern]:
    """A union of windows, alone and with run-time tensors."""
    union = masks.local_window(left=256, right=256) | masks.dilated_window(left=64, right=64, rate=64)
    documents = torch.arange(tokens) * 4 // tokens
    return {
        "without": union,
        "lengths": union & masks.lengths(torch.tensor(tokens - tokens // 64)),
        "visible keys": union & masks.visible_keys(torch.arange(tokens) % 10 > 0),
        "documents": union & masks.documents(documents),
        "per document": union.per_document(documents),
    }


def _check_alone(attention: Attention, problem: Problem) -> None:
    """Raise AssertionError unless each token sees itself alone: out is v, dv is grad, dq and dk are 0.

    Nothing is relative to a gradient of 0, so these are held against dv.
    """
    out = attention(*problem.qkv)
    dq, dk, dv = train(attention, problem)
    errors = {"out": out - problem.v, "dq": dq, "dk": dk, "dv": dv - problem.grad}
    for name, error in errors.items():
        off = float(error.norm() / problem.grad.norm())
        assert off <= TOLERANCE, f"{name} must be within {TOLERANCE} of the definition; it is off by {off:.2e}"
