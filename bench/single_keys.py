"""Attention over lists of single keys: graphs, neighbours, top-k tokens, and a learned number for each pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexdilated as fd
from flexdilated import masks

from ._checks import assert_near
from ._jobs import Attention, Job, Problem, Size, attention_job, interleave, peak_bytes, race, ratio, train
from ._measures import Row, at_most, measure
from .features import alibi

# H heads, N tokens, W keys of a query, E pairs


def neighbours(num_tokens: int, keys: int) -> Tensor:
    """(1, N, W): different random keys of each query."""
    draw = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(num_tokens, generator=draw)[:keys] for _ in range(num_tokens)])[None]


def by_scatter(q: Tensor, k: Tensor, v: Tensor, *, near: Tensor) -> Tensor:
    """Edge by edge, as graph libraries do: scores of all edges, a softmax by scatter, and a sum by scatter."""
    _, heads, tokens, width = q.shape
    query, key = torch.arange(tokens).repeat_interleave(near.shape[2]), near[0].flatten()
    scores = (q[0][:, query] * k[0][:, key]).sum(-1) * width**-0.5
    index = query.expand(heads, -1)
    top = torch.full((heads, tokens), -torch.inf).scatter_reduce(1, index, scores.detach(), "amax")
    weights = (scores - top.gather(1, index)).exp()
    total = torch.zeros(heads, tokens).index_add(1, query, weights)
    weights = weights / total.gather(1, index)
    return torch.zeros_like(q[0]).index_add(1, query, weights.unsqueeze(-1) * v[0][:, key])[None]


def by_gather(q: Tensor, k: Tensor, v: Tensor, *, near: Tensor, values: Tensor | None = None) -> Tensor:
    """Keys and values of each query side by side, and einsum; values: added to the scores, (H, N, W)."""
    groups = q.shape[1] // k.shape[1]
    keys, of_keys = (x[0][:, near[0]] for x in (k, v))
    of_groups = q[0].unflatten(0, (-1, groups))
    scores = torch.einsum("ghnd,gnwd->ghnw", of_groups, keys) * q.shape[-1] ** -0.5
    scores = scores if values is None else scores + values.unflatten(0, (-1, groups))
    return torch.einsum("ghnw,gnwd->ghnd", scores.softmax(-1), of_keys).flatten(0, 1)[None]


def dense_mask(near: Tensor) -> Tensor:
    tokens = near.shape[1]
    return torch.zeros(tokens, tokens, dtype=torch.bool).scatter_(1, near[0], True)


def by_dense_mask(q: Tensor, k: Tensor, v: Tensor, *, allowed: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=q.shape[1] != k.shape[1])


def ours(q: Tensor, k: Tensor, v: Tensor, *, pattern: Any, **options: Any) -> Tensor:
    return fd.attend(q, k, v, pattern, enable_gqa=q.shape[1] != k.shape[1], **options)


def _grouped(size: Size, kv_heads: int) -> Problem:
    """A problem with fewer key/value heads."""
    drawn = Problem.draw(size)
    return Problem(drawn.q, drawn.k[:, :kv_heads].contiguous(), drawn.v[:, :kv_heads].contiguous(), drawn.grad)


@measure("C21", sizes=((Size(200, num_heads=2, head_dim=8, repeats=1), 5),))
def neighbour_lists(
    sizes: tuple[tuple[Size, int], ...] = (
        (Size(10242, num_heads=4, head_dim=32, repeats=3), 61),
        (Size(20000, num_heads=4, head_dim=32, repeats=3), 32),
    ),
) -> Iterator[Row]:
    """What do time and memory of listed neighbours come to, over a scatter softmax, a dense mask, and the tensors?

    Forward and backward.
    """
    for size, keys in sizes:
        near, problem = neighbours(size.num_tokens, keys), Problem.draw(size)
        way, what = partial(ours, pattern=masks.selected_keys(near)), f"{size}, {keys} keys a query, forward + backward"
        others: list[tuple[str, float, Attention]] = [
            ("a softmax by scatter", 1 / 6, partial(by_scatter, near=near)),
            ("a dense mask", 1 / 10, partial(by_dense_mask, allowed=dense_mask(near))),
        ]
        for name, target, other in others:
            assert_near(name, way(*problem.qkv), other(*problem.qkv))
            jobs = [attention_job(*each, problem, "forward + backward") for each in (("ours", way), (name, other))]
            yield race(
                f"{what}: time of listed neighbours over {name}", at_most(target, "×"), jobs, repeats=size.repeats
            )
        of_tensors = 4 * problem.q.nbytes + near.nbytes  # q, k, v, the gradient of the output, and the table
        least = of_tensors + 4 * problem.q.nbytes  # and the output and three gradients
        peak = of_tensors + peak_bytes(_step_of_neighbours, size, keys)
        yield Row(f"{what}: peak memory over tensors, gradients and table", at_most(2, "×"), peak / least)


def _step_of_neighbours(size: Size, keys: int) -> Callable[[], object]:
    few = 2 * keys
    for tokens in (few, size.num_tokens):  # first a small one, which sets up what lasts
        # Spread over all tokens, and made without memory that would be free for the step.
        start = torch.randint(tokens, (1, tokens, 1), generator=torch.Generator().manual_seed(0))
        near = (start + torch.arange(keys) * (tokens // keys)) % tokens
        way = partial(ours, pattern=masks.selected_keys(near))
        problem = Problem.draw(replace(size, num_tokens=tokens))
        if tokens == few:
            train(way, problem)
    return partial(train, way, problem)


def _with_values(q: Tensor, k: Tensor, v: Tensor, *, values: Tensor, pattern: Any) -> Tensor:
    return ours(q, k, v, pattern=pattern, score_mod=fd.biases.entries(values, pattern))


def _step_of_values(attention: Callable[..., Tensor], problem: Problem, values: Tensor) -> tuple[Tensor, ...]:
    leaves = (*problem.leaves, values.detach().requires_grad_())
    return torch.autograd.grad(attention(*leaves[:3], values=leaves[3]), leaves, problem.grad)


@measure("C22", sizes=((Size(200, num_heads=2, head_dim=8, repeats=1), 5),))
def pair_values(
    sizes: tuple[tuple[Size, int], ...] = (
        (Size(3000, num_heads=4, head_dim=32, repeats=7), 8),
        (Size(10242, num_heads=4, head_dim=32, repeats=5), 61),
    ),
) -> Iterator[Row]:
    """What does a learned number for each pair and head cost, over gather and einsum by hand?

    Forward and backward, with the gradient of the numbers.
    """
    for size, keys in sizes:
        near, problem = neighbours(size.num_tokens, keys), Problem.draw(size)
        values = torch.randn(size.num_heads, size.num_tokens, keys, generator=torch.Generator().manual_seed(1))
        pattern = masks.selected_keys(near)

        ways = {"ours": partial(_with_values, pattern=pattern), "gather and einsum": partial(by_gather, near=near)}
        for found, wanted in zip(*(_step_of_values(way, problem, values) for way in ways.values()), strict=True):
            assert_near("gradients", found, wanted)
        jobs = [Job(name, lambda _, of=(way, problem, values): _step_of_values(*of)) for name, way in ways.items()]
        what = f"{size}, {keys} keys a query, a number for each pair and head, forward + backward"
        yield race(
            f"{what}: time of a learned number for each pair over gather and einsum by hand",
            at_most(1.2, "×"),
            jobs,
            repeats=size.repeats,
        )


@measure("C23", size=Size(64, num_heads=2, head_dim=8, repeats=1), keys=(4,), kv_heads=(1, 2))
def key_tables(
    size: Size = Size(2048, num_heads=8, repeats=7),
    keys: tuple[int, ...] = (64, 256),
    kv_heads: tuple[int, ...] = (1, 8),
) -> Iterator[Row]:
    """What does a table of single keys cost, over the best of gather by hand, a dense mask, and `masks.mask`?"""
    for heads, number in product(kv_heads, keys):
        near, problem = neighbours(size.num_tokens, number), _grouped(size, heads)
        allowed = dense_mask(near)
        ways: dict[str, Attention] = {
            "ours": partial(ours, pattern=masks.selected_keys(near)),
            "gather": partial(by_gather, near=near),
            "dense mask": partial(by_dense_mask, allowed=allowed),
            "masks.mask": partial(ours, pattern=masks.mask(allowed)),
        }
        found = {name: way(*problem.qkv) for name, way in ways.items()}
        for name, each in found.items():
            assert_near(name, each, found["dense mask"])
        for part in ("forward", "forward + backward"):
            jobs = [attention_job(name, way, problem, part) for name, way in ways.items()]
            timings = interleave(jobs, repeats=size.repeats)
            best = min(timings[1:], key=lambda each: each.median_s)
            of = f"{size}, {heads} key head{'s' * (heads > 1)}, {number} keys, {part}"
            what = f"{of}: time of a table of single keys over the best other way"
            yield Row(what, at_most(1.1, "×"), ratio(timings[0], best), timings, {"best": best.name})


@measure("C24", size=Size(64, num_heads=2, head_dim=8, repeats=1), keys=(4,), kv_heads=(1, 2))
def key_table_features(
    size: Size = Size(2048, num_heads=8, repeats=7),
    keys: tuple[int, ...] = (64, 256),
    kv_heads: tuple[int, ...] = (1, 8),
) -> Iterator[Row]:
    """What do a score_mod and dropout cost with a table of single keys, over the table alone? Forward and backward."""
    for heads, number in product(kv_heads, keys):
        near, problem = neighbours(size.num_tokens, number), _grouped(size, heads)
        alone = partial(ours, pattern=masks.selected_keys(near))
        features = {"ALiBi": {"score_mod": alibi(size.num_heads)}, "dropout 0.1": {"dropout_p": 0.1}}
        for name, options in features.items():
            ways = {name: partial(alone, **options), "without": alone}
            jobs = [attention_job(each, way, problem, "forward + backward") for each, way in ways.items()]
            of = f"{size}, {heads} key head{'s' * (heads > 1)}, {number} keys a query, {name}"
            what = f"{of}: time of single keys with a feature over single keys without"
            yield race(what, at_most(4, "×"), jobs, repeats=size.repeats)


@measure("C25", size=Size(300, num_heads=2, head_dim=8, repeats=1), edges=3000)
def uneven_rows(
    size: Size = Size(100_000, num_heads=4, head_dim=32, repeats=5), edges: int = 1_000_000
) -> Iterator[Row]:
    """What do rows of very different lengths cost, over equal rows with as many pairs?

    Degrees are drawn from a Pareto law of exponent 1.5. Forward, and forward and backward.
    """
    tokens, draw = size.num_tokens, torch.Generator().manual_seed(0)
    weights = (1 - torch.rand(tokens, generator=draw)) ** (-1 / 1.5)
    uneven = (weights / weights.sum() * edges).long().clamp(1, tokens // 2)
    longest, equal = int(uneven.max()), torch.full((tokens,), max(1, int(uneven.sum()) // tokens))
    problem, patterns = Problem.draw(size), {}
    for name, degrees in (("uneven rows", uneven), ("equal rows", equal)):
        query = torch.arange(tokens).repeat_interleave(degrees)
        place = torch.arange(len(query)) - (degrees.cumsum(0) - degrees)[query]
        key = (query + 1 + place * 7919) % tokens  # steps of a prime: no key twice
        graph = torch.sparse_coo_tensor(
            torch.stack([query, key]), torch.ones(len(query)), (tokens, tokens), check_invariants=True
        )
        patterns[name] = masks.sparse(graph)
    for part in ("forward", "forward + backward"):
        jobs = [attention_job(name, partial(ours, pattern=each), problem, part) for name, each in patterns.items()]
        of = f"{size}, {int(uneven.sum()):,} pairs, rows of up to {longest:,} keys, {part}"
        what = f"{of}: time of uneven rows of keys over equal ones"
        over = int(uneven.sum()) / int(equal.sum())  # the number of pairs may differ a little
        yield race(what, at_most(1.3, "×"), jobs, repeats=size.repeats, over=over)


def by_scattered_mask(q: Tensor, k: Tensor, v: Tensor, *, chosen: Tensor, causal: Tensor) -> Tensor:
    """As models of transformers do with SDPA: the chosen keys become a mask of all pairs."""
    hidden = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool).scatter(-1, chosen, False).unsqueeze(1)
    return scaled_dot_product_attention(q, k, v, attn_mask=causal & ~hidden)


def by_indices(q: Tensor, k: Tensor, v: Tensor, *, chosen: Tensor) -> Tensor:
    """As `set_pattern` does for a model that hands over the keys of its indexer."""
    pattern = masks.causal() & masks.selected_keys("chosen", most=chosen.shape[-1])
    return fd.attend(q, k, v, pattern, bindings={"chosen": chosen.unsqueeze(1)})


@measure("C26", size=Size(96, num_heads=2, head_dim=8, repeats=1), keys=4, dims=(12, 8))
def indexed_model(
    size: Size = Size(8192, num_heads=4, repeats=3), keys: int = 256, dims: tuple[int, int] = (192, 128)
) -> Iterator[Row]:
    """What does attention of DeepSeek-V3.2 cost in transformers by `set_pattern`, over its own path, SDPA with a mask?

    The attention alone, with the keys that an indexer chose; forward and backward.
    """
    tokens, draw = size.num_tokens, torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, size.num_heads, tokens, dims[0], generator=draw)
    v, grad = torch.randn(2, 1, size.num_heads, tokens, dims[1], generator=draw)
    problem = Problem(q, k, v, grad)
    # A query with fewer earlier keys than `keys` names later ones, too: models hide them by the causal mask.
    scores = torch.rand(1, tokens, tokens, generator=draw).masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -1.0)
    chosen = scores.topk(keys).indices
    del scores
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    ways = {
        "set_pattern": partial(by_indices, chosen=chosen.int()),
        "SDPA": partial(by_scattered_mask, chosen=chosen, causal=causal),
    }
    assert_near("outputs", ways["set_pattern"](q, k, v), ways["SDPA"](q, k, v))
    jobs = [attention_job(name, way, problem, "forward + backward") for name, way in ways.items()]
    what = f"{size}, head dims {dims[0]} and {dims[1]}, {keys} keys a query, forward + backward"
    yield race(f"{what}: time of set_pattern over SDPA with a mask", at_most(1 / 3, "×"), jobs, repeats=size.repeats)
