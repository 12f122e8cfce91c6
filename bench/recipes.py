"""Published ways to choose blocks, as recipes: what each costs against dense attention, choosing included."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.selection import recipes

from ._jobs import Attention, Job, Problem, Size, forward_job, interleave, ratio, training_job
from ._measures import Row, at_least, measure
from .peers import dense_attention


def _ways(size: Size) -> dict[str, tuple[Attention, bool]]:
    """Each recipe with its defaults, and whether it may train; budgets that have none are a sixteenth of the keys."""
    heads, dim, most = size.num_heads, size.head_dim, max(1, size.num_tokens // 16)
    gate = recipes.SeerGate(dim, heads, block=64)
    native = recipes.NativeSparseAttention(dim, dim, heads)

    def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return native(q[:, 0], q, k.expand(3, *k.shape), v.expand(3, *v.shape))

    chosen = {
        "moba": (recipes.moba(), True),
        "xattention": (recipes.xattention(most=max(2, most // 128)), False),
        "seer_attention": (recipes.seer_attention(gate, choose=fd.TopK(max(1, most // 64))), False),
    }
    return {
        **{name: (fd.SelectedAttention(each), trains) for name, (each, trains) in chosen.items()},
        "NativeSparseAttention": (three, True),
        "CoarseToFineAttention": (recipes.CoarseToFineAttention(), True),
    }


@measure(size=Size(512, 2, 16, repeats=1), past=256, steps=2)
def recipe_cost(size: Size = Size(16384, 4, repeats=3), past: int = 65536, steps: int = 32) -> Iterator[Row]:
    """How much faster than dense attention is each published way to choose blocks, choosing included?

    Of the whole sequence, forward, and forward and backward of those that train; then of steps of decoding after `past`
    tokens, against a cache that reads them all. float32, random numbers, so that shares are even: ways that choose as
    many as they need take all that they may.
    """
    problem = Problem.draw(size)
    dense = dense_attention(causal=True)
    for name, (attention, trains) in _ways(size).items():
        passes = [("forward", forward_job), ("forward + backward", training_job)]
        for what, make in passes[: 1 + trains]:
            jobs = [make("dense", dense, problem), make(name, attention, problem)]
            jobs[1].seconds()
            timings = interleave(jobs, repeats=size.repeats)
            yield Row(f"{name}, {size}, {what}: times as fast as dense", at_least(1.0, "×"), ratio(*timings), timings)
    yield from _steps(size, past, steps)


def _steps(size: Size, past: int, steps: int) -> Iterator[Row]:
    problem = Problem.draw(Size(past, size.num_heads, size.head_dim))
    gate = recipes.SeerGate(size.head_dim, size.num_heads, block=64, share="group")
    budget = max(64, past // 64)
    ways = {
        "quest": recipes.quest(budget=budget),
        "seer_attention_r": recipes.seer_attention_r(gate, choose=fd.TopK(max(1, budget // 64 - 1))),
    }
    caches = {"dense": fd.KVCache(masks.causal(), num_heads=size.num_heads)}
    caches |= {name: fd.SelectedAttention(each).cache(num_heads=size.num_heads) for name, each in ways.items()}
    token = Problem.draw(Size(1, size.num_heads, size.head_dim))
    for cache in caches.values():
        cache.append(problem.k, problem.v)

    @torch.no_grad()
    def run(cache: fd.KVCache) -> None:
        for _ in range(steps):
            cache.attend(token.q, token.k, token.v)

    jobs = [Job(name, lambda _, cache=cache: run(cache)) for name, cache in caches.items()]
    for job in jobs:
        job.seconds()
    dense, *others = interleave(jobs, repeats=size.repeats)
    for timing in others:
        what = f"{timing.name}, a step after {past // 1024}K, {budget} keys: times as fast as dense"
        yield Row(what, at_least(1.0, "×"), ratio(dense, timing), (dense, timing))
