"""Attention over blocks chosen from the data, and published recipes: times as fast as dense, choosing included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.selection import recipes

from ._checks import assert_near
from ._jobs import Attention, Job, Part, Problem, Size, attention_job, interleave, race, ratio, tokens_text
from ._measures import Row, Timing, at_least, at_most, measure
from .peers import dense_attention


@dataclass(frozen=True)
class Choice:
    """Each query reads its own block and chosen blocks before it, `keys` keys in all, causally."""

    name: str
    block: int
    query_block: int
    keys: int = 512

    @property
    def most(self) -> int:
        return self.keys // self.block - 1

    def selector(self) -> fd.BlockSelector:
        summary = "first" if self.query_block > 1 else "mean"
        own, budget = masks.chunked(self.block), fd.TopK(self.most)
        return fd.BlockSelector(
            block=self.block, query_block=self.query_block, choose=budget, always=own, query_summary=summary
        )

    def pattern(self) -> masks.Pattern:
        chosen = masks.selected_blocks("chosen", block=(self.query_block, self.block), most=self.most)
        return (chosen | masks.chunked(self.block)) & masks.causal()

    def attention(self) -> Attention:
        selector, pattern = self.selector(), self.pattern()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return fd.attend(q, k, v, pattern, bindings={"chosen": selector(q.detach(), k.detach()).blocks})

        return attend


_CHOICES = (Choice("rows of 64 queries, blocks of 64", 64, 64), Choice("each query, blocks of 128", 128, 1))
_TARGETS = {4096: 1.8, 16384: 5.0}  # of the forward pass, for rows of 64 queries
_LADDER = (512, 768, 1024, 1536, 2048, 3072, 4096)


@measure(
    choices=tuple(
        replace(each, block=each.block // 8, keys=64, query_block=q) for each, q in zip(_CHOICES, (16, 1), strict=True)
    ),
    sizes=(Size(256, 2, 16, repeats=1),),
    ladder=(128, 256),
)
def selection_cost(
    choices: tuple[Choice, ...] = _CHOICES,
    sizes: tuple[Size, ...] = (Size(4096, 4), Size(16384, 4, repeats=3), Size(65536, 1, repeats=3)),
    ladder: tuple[int, ...] = _LADDER,
) -> Iterator[Row]:
    """How much faster than dense attention is attention over chosen blocks, choosing included, and from what length on?

    512 keys a query, its own block among them. Forward, and forward and backward, of causal float32 attention.
    """
    for choice in choices:
        for size in sizes:
            problem = Problem.draw(size)
            _verify(choice, problem)
            for part in ("forward", "forward + backward"):
                yield _against_dense(choice, size, problem, part)
        yield _break_even(choice, sizes[0], ladder)


def _against_dense(choice: Choice, size: Size, problem: Problem, part: Part) -> Row:
    ways = {"dense": dense_attention(causal=True), choice.name: choice.attention()}
    jobs = [attention_job(name, attention, problem, part) for name, attention in ways.items()]
    selector = choice.selector()
    choosing = torch.no_grad()(lambda _: selector(problem.q, problem.k))
    dense, ours, chosen = interleave([*jobs, Job("choosing", choosing)], repeats=size.repeats)
    bound = _TARGETS.get(size.num_tokens, 1.0) if part == "forward" and choice.query_block > 1 else 1.0
    detail = {"choosing_share": chosen.median_s / ours.median_s, "heads": size.num_heads, "keys_a_query": choice.keys}
    what = f"{choice.name}, {size}, {part}: times as fast as dense"
    return Row(what, at_least(bound, "×"), ratio(dense, ours), (dense, ours, chosen), detail)


def _break_even(choice: Choice, size: Size, ladder: Sequence[int]) -> Row:
    """The shortest length from which on no measured length is slower than dense attention."""
    ratios: dict[str, float] = {}
    timings: list[Timing] = []
    for tokens in ladder:
        problem = Problem.draw(replace(size, num_tokens=tokens))
        jobs = [
            attention_job(f"{what}, {tokens_text(tokens)}", attention, problem)
            for what, attention in (("dense", dense_attention(causal=True)), (choice.name, choice.attention()))
        ]
        for job in jobs:
            job.seconds()
        found = interleave(jobs, repeats=size.repeats)
        ratios[tokens_text(tokens)] = ratio(*found)
        timings += found
    slower = [index for index, each in enumerate(ratios.values()) if each < 1]
    first = slower[-1] + 1 if slower else 0
    even = ladder[first] if first < len(ladder) else 2 * ladder[-1]
    detail = {"times_as_fast": ratios, "heads": size.num_heads}
    return Row(
        f"{choice.name}, forward: no slower than dense from", at_most(4096, "tokens"), even, tuple(timings), detail
    )


def _verify(choice: Choice, problem: Problem) -> None:
    """Some queries by the definition: one softmax over the keys of their blocks, up to their own."""
    chosen, tokens = choice.selector()(problem.q, problem.k).blocks, problem.q.shape[2]
    out = choice.attention()(*problem.qkv)
    for query in torch.linspace(0, tokens - 1, 7).long().tolist():
        blocks = chosen[0, :, query // choice.query_block]
        keys = torch.arange(tokens) // choice.block
        seen = (keys[None, :, None] == blocks[:, None]).any(2) | (keys == query // choice.block)
        seen &= torch.arange(tokens) <= query
        scores = (problem.q[0, :, query, None].double() @ problem.k[0].double().mT)[:, 0] * problem.q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        assert_near("a query", out[0, :, query], (weights[:, None] @ problem.v[0].double())[:, 0].float())


def _recipes(size: Size) -> dict[str, tuple[Attention, bool]]:
    """Each recipe with its defaults, and whether it trains; budgets without a default are a sixteenth of the keys."""
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

    The whole sequence, forward, and forward and backward of those that train; then steps of decoding after `past`
    tokens, against a cache that reads them all. float32, random numbers, so that shares are even: ways that choose as
    many as they need take all that they may.
    """
    problem = Problem.draw(size)
    dense = dense_attention(causal=True)
    for name, (attention, trains) in _recipes(size).items():
        parts: tuple[Part, ...] = ("forward", "forward + backward")
        for part in parts[: 1 + trains]:
            jobs = [attention_job("dense", dense, problem, part), attention_job(name, attention, problem, part)]
            jobs[1].seconds()
            what = f"{name}, {size}, {part}: times as fast as dense"
            yield race(what, at_least(1.0, "×"), jobs, repeats=size.repeats)
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
    run = torch.no_grad()(lambda cache: [cache.attend(*token.qkv) for _ in range(steps)])
    jobs = [Job(name, lambda _, cache=cache: run(cache)) for name, cache in caches.items()]
    for cache, job in zip(caches.values(), jobs, strict=True):
        cache.append(problem.k, problem.v)
        job.seconds()
    dense, *others = interleave(jobs, repeats=size.repeats)
    for timing in others:
        what = f"{timing.name}, a step after {past // 1024}K, {budget} keys: times as fast as dense"
        yield Row(what, at_least(1.0, "×"), ratio(dense, timing), (dense, timing))
