"""Attention over blocks chosen from the data: what it costs, choosing included, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import flexdilated as fd
from flexdilated import masks

from ._checks import assert_near
from ._jobs import Attention, Job, Problem, Size, forward_job, interleave, ratio, say, tokens_text, training_job
from ._measures import Row, Timing, at_least, at_most, measure
from ._seeds import beyond
from .peers import dense_attention

# B batch, H heads, N tokens, D head dim


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
            for name, make in (("forward", forward_job), ("forward + backward", training_job)):
                yield _against_dense(choice, size, problem, name, make)
        yield _break_even(choice, sizes[0], ladder)


def _against_dense(
    choice: Choice, size: Size, problem: Problem, name: str, make: Callable[[str, Attention, Problem], Job]
) -> Row:
    jobs = [make("dense", dense_attention(causal=True), problem), make(choice.name, choice.attention(), problem)]
    selector = choice.selector()

    def choosing(_: None) -> None:
        with torch.no_grad():
            selector(problem.q, problem.k)

    dense, ours, chosen = interleave([*jobs, Job("choosing", choosing)], repeats=size.repeats)
    bound = _TARGETS.get(size.num_tokens, 1.0) if name == "forward" and choice.query_block > 1 else 1.0
    detail = {"choosing_share": chosen.median_s / ours.median_s, "heads": size.num_heads, "keys_a_query": choice.keys}
    what = f"{choice.name}, {size}, {name}: times as fast as dense"
    return Row(what, at_least(bound, "×"), ratio(dense, ours), (dense, ours, chosen), detail)


def _break_even(choice: Choice, size: Size, ladder: Sequence[int]) -> Row:
    """The first length from which on it is no slower than dense attention at any that is measured."""
    ratios: dict[str, float] = {}
    timings: list[Timing] = []
    for tokens in ladder:
        problem = Problem.draw(replace(size, num_tokens=tokens))
        jobs = [
            forward_job(f"{what}, {tokens_text(tokens)}", attention, problem)
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
    out = choice.attention()(problem.q, problem.k, problem.v)
    for query in torch.linspace(0, tokens - 1, 7).long().tolist():
        blocks = chosen[0, :, query // choice.query_block]
        keys = torch.arange(tokens) // choice.block
        seen = (keys[None, :, None] == blocks[:, None]).any(2) | (keys == query // choice.block)
        seen &= torch.arange(tokens) <= query
        scores = (problem.q[0, :, query, None].double() @ problem.k[0].double().mT)[:, 0] * problem.q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        assert_near("a query", out[0, :, query], (weights[:, None] @ problem.v[0].double())[:, 0].float())


# Retrieval

_VALUES = 32  # that a key may carry


@dataclass(frozen=True)
class Task:
    """Each of `queries` asks for the values that its key carries, at `needles` places of a context of `tokens`."""

    name: str
    needles: int
    tokens: int = 1024
    queries: int = 64
    vocabulary: int = 4096

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(key of each place, its value, key of each query, places that hold it (size, queries, needles))."""
        asked = self.queries * self.needles
        ids = torch.rand(size, self.vocabulary, generator=generator).argsort(1)[:, : self.tokens]
        values = torch.randint(_VALUES, (size, self.tokens), generator=generator)
        places = torch.rand(size, self.tokens, generator=generator).argsort(1)[:, :asked].view(size, self.queries, -1)
        key = ids.gather(1, places[:, :, 0])
        ids = ids.scatter(1, places.flatten(1), key.repeat_interleave(self.needles, 1))
        # The values of one key differ, so that each can be told.
        first = torch.randint(_VALUES, (size, self.queries, 1), generator=generator)
        steps = torch.arange(self.needles) * (_VALUES // self.needles)
        values = values.scatter(1, places.flatten(1), ((first + steps) % _VALUES).flatten(1))
        return ids, values, key, places


class Retriever(nn.Module):
    """One layer of attention from queries to a context of keys that carry values; one projection makes q and k."""

    def __init__(self, task: Task, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.keys, self.values = nn.Embedding(task.vocabulary, width), nn.Embedding(_VALUES, width)
        self.to_key, self.to_value = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.to_values = nn.Linear(width, _VALUES)

    def operands(self, ids: Tensor, values: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of (B, H, tokens, D)."""
        context, asked = self.keys(ids) + self.values(values), self.keys(key)
        projected = self.to_key(asked), self.to_key(context), self.to_value(context)
        q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in projected)
        return q, k, v

    def forward(self, out: Float[Tensor, "B H N D"]) -> Float[Tensor, "B N V"]:
        return self.to_values(out.transpose(1, 2).flatten(2))


def _wanted(values: Int64[Tensor, "B N"], places: Int64[Tensor, "B Q n"]) -> Float[Tensor, "B Q V"]:
    named = values.gather(1, places.flatten(1)).view(places.shape)
    return torch.zeros(*places.shape[:2], _VALUES).scatter(2, named, 1.0)


def _found(logits: Float[Tensor, "B Q V"], wanted: Float[Tensor, "B Q V"], needles: int) -> float:
    """The share of values among the best that are wanted."""
    best = torch.zeros_like(wanted).scatter(2, logits.topk(needles, dim=2).indices, 1.0)
    return float((best * wanted).sum() / wanted.sum())


Reading = Callable[[Tensor, Tensor, Tensor], Tensor]


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _static(tokens: int, keys: int) -> Reading:
    """The last keys before the queries, as a window."""
    return lambda q, k, v: _dense(q, k[:, :, tokens - keys :], v[:, :, tokens - keys :])


def _random(block: int, keys: int, generator: torch.Generator) -> Reading:
    """Blocks drawn for each query and head."""

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = k.shape[2] // block
        chosen = torch.rand(*q.shape[:3], blocks, generator=generator).argsort(3)[..., : keys // block]
        rule = masks.selected_blocks("chosen", block=(1, block), most=keys // block)
        return fd.attend(q, k, v, rule, bindings={"chosen": chosen}, q_offset=k.shape[2])

    return read


def _chosen(scorer: str, block: int, keys: int) -> Reading:
    selector = fd.BlockSelector(block=block, scorer=scorer, choose=fd.TopK(keys // block))
    rule = masks.selected_blocks("chosen", block=(1, block), most=keys // block)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = selector(q.detach(), k.detach(), q_offset=k.shape[2]).blocks
        return fd.attend(q, k, v, rule, bindings={"chosen": chosen}, q_offset=k.shape[2])

    return read


def _trained(task: Task, read: Reading, seed: int, steps: int, sizes: tuple[int, int, int]) -> Retriever:
    torch.manual_seed(seed)
    batch, heads, head_dim = sizes
    model = Retriever(task, heads, head_dim)
    generator = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        ids, values, key, places = task.batch(batch, generator)
        logits = model(read(*model.operands(ids, values, key)))
        loss = binary_cross_entropy_with_logits(logits, _wanted(values, places)) * _VALUES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def _score(model: Retriever, task: Task, read: Reading, seed: int, batches: int) -> float:
    generator = torch.Generator().manual_seed(5000 + seed)
    scores = []
    for _ in range(batches):
        ids, values, key, places = task.batch(16, generator)
        scores.append(_found(model(read(*model.operands(ids, values, key))), _wanted(values, places), task.needles))
    return mean(scores)


@measure(tasks=(Task("one needle", 1, 64, 4, 128),), keys=16, blocks=(8,), seeds=2, steps=3, sizes=(2, 2, 8), batches=1)
def needles(
    tasks: tuple[Task, ...] = (Task("one needle", 1), Task("four needles", 4)),
    keys: int = 128,
    blocks: tuple[int, ...] = (64, 16, 8),
    seeds: int = 3,
    steps: int = 600,
    sizes: tuple[int, int, int] = (16, 4, 32),
    batches: int = 8,
) -> Iterator[Row]:
    """Do chosen blocks find what a window of as many keys does not, and how far are they below the exact choice?

    One layer is trained with dense attention, and with blocks chosen by their mean keys; the first is then read in each
    way, all with `keys` keys a query but dense. The share of wanted values found, mean over seeds, and paired
    differences with 95 % confidence. The row is the lower end of the difference to the window, of mean keys of 16.
    """
    for task in tasks:
        ways = _ways(task, keys, blocks)
        scores: dict[str, list[float]] = {}
        for seed in range(seeds):
            dense = _trained(task, _dense, seed, steps, sizes)
            for name, read in ways.items():
                scores.setdefault(name, []).append(_score(dense, task, read, seed, batches))
            middle = blocks[len(blocks) // 2]
            own = _chosen("mean", middle, keys)
            name = f"trained with mean keys of {middle}"
            scores.setdefault(name, []).append(
                _score(_trained(task, own, seed, steps, sizes), task, own, seed, batches)
            )
            say(f"{task.name}, seed {seed}: " + ", ".join(f"{name} {each[-1]:.3f}" for name, each in scores.items()))
        yield _row(task, keys, blocks[len(blocks) // 2], scores)


def _ways(task: Task, keys: int, blocks: tuple[int, ...]) -> dict[str, Reading]:
    ways: dict[str, Reading] = {"dense": _dense, "window": _static(task.tokens, keys)}
    ways["random blocks"] = _random(blocks[0], keys, torch.Generator().manual_seed(7))
    for name, scorer in (("exact mass", "mass"), ("mean keys", "mean"), ("bounds", "minmax")):
        ways |= {f"{name} of {block}": _chosen(scorer, block, keys) for block in blocks}
    return ways


def _row(task: Task, keys: int, block: int, scores: dict[str, list[float]]) -> Row:
    ways: dict[str, Any] = {}
    for name, each in scores.items():
        of_block = name.rpartition(" of ")[2]
        exact = scores.get(f"exact mass of {of_block}")
        ways[name] = {"found": mean(each), "by_seed": each}
        ways[name]["over_window"] = beyond(each, scores["window"])
        if exact is not None:
            ways[name]["over_exact"] = beyond(each, exact)
    low, _ = ways[f"mean keys of {block}"]["over_window"]
    what = f"{task.name} in {task.tokens} keys, {keys} read: found by mean keys of {block} beyond a window, at least"
    return Row(what, at_least(0.0), low, detail={"ways": ways, "seeds": len(scores["dense"])})
