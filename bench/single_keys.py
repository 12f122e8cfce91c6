"""Attention over lists of single keys: graphs, neighbours, top-k tokens, and a learned number for each pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call, Features
from flexdilated.engines.flex._portable_op import portable_run
from flexdilated.engines.kernels import _key_lists
from flexdilated.memory import LiveBytes

from ._checks import assert_near
from ._jobs import Attention, Job, Problem, Size, attention_job, interleave, race, ratio
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
    """What does attention to listed neighbours cost, over a softmax by scatter over edges, and over a dense mask?

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


class _Operations(TorchDispatchMode):
    """Counts the operations of engine portable that launch a kernel, and the bytes that they read and write.

    gathered: bytes of rows that were picked from a tensor, by the shape of that tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.moved, self.gathered = 0, 0, dict[tuple[int, ...], int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if function.is_view or not made:
            return out
        self.launches += 1
        read = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        written = sum(each.nbytes for each in made)
        if function in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor):
            source = tuple(args[0].shape)
            self.gathered[source] = self.gathered.get(source, 0) + written
            self.moved += 2 * written
        else:
            self.moved += written + sum(each.nbytes for each in read.values())
        return out


@dataclass(frozen=True)
class IndexedCall:
    """Sizes of attention to the keys that an indexer chose: query heads over one key/value head."""

    num_queries: int
    num_keys: int
    keys: int
    num_heads: int
    dims: tuple[int, int]

    def count(self, chunks: int) -> tuple[_Operations, int]:
        """(operations of a forward of this many chunks of queries, bytes of memory beyond arguments and results)."""
        torch.manual_seed(0)
        number = chunks * self.num_queries
        q = torch.randn(1, self.num_heads, number, self.dims[0], dtype=torch.bfloat16)
        k = torch.randn(1, 1, self.num_keys, self.dims[0], dtype=torch.bfloat16)
        v = k[..., : self.dims[1]].contiguous()
        chosen = torch.stack([torch.randperm(self.num_keys)[: self.keys] for _ in range(number)])[None, None]
        pattern = masks.selected_keys("chosen", most=self.keys)
        at_once = self.num_queries * self.keys * sum(self.dims) * torch.float32.itemsize
        run = portable_run(
            Call.at(q, k, pattern.text, num_heads_global=self.num_heads), q, [chosen], Features(self.dims[0] ** -0.5)
        )
        with patch.object(_key_lists, "GATHERED_BYTES", at_once), torch.no_grad(), LiveBytes(q, k, v) as live:
            with _Operations() as found:
                results = run.forward(q, k, v)
            return found, live.peak - sum(each.nbytes for each in (q, k, v, *results))


@measure("K11", call=IndexedCall(3, 40, 8, 4, (12, 8)))
def indexed_bytes(call: IndexedCall = IndexedCall(15, 131_072, 2048, 128, (576, 512))) -> Iterator[Row]:
    """What do 2,048 keys a query of a sequence of 128K tokens move on an accelerator, at DeepSeek-V3.2's sizes?

    The operations of engine portable, run on CPU in bfloat16, in chunks of as many queries as an accelerator computes
    at once. Bytes are beside one gathered read and write of each query's keys and values.
    """
    (one, _), (two, memory) = call.count(1), call.count(2)
    least = 2 * call.num_queries * call.keys * sum(call.dims) * torch.bfloat16.itemsize
    queries = 2 * call.num_heads * call.num_queries * call.dims[0] * torch.bfloat16.itemsize
    q_shape = (1, call.num_heads, 2 * call.num_queries, call.dims[0])
    what = f"{call.num_keys:,} tokens, {call.keys:,} keys a query, {call.num_heads} heads over one, dims {call.dims}"
    moved = (two.moved - one.moved) / least
    yield Row(f"{what}: bytes moved over one gathered read and write", at_most(1.5, "×"), moved)
    yield Row(f"{what}: launches a chunk", at_most(12), two.launches - one.launches)
    yield Row(f"{what}: copies of queries", at_most(0), two.gathered.get(q_shape, 0) / queries)
    yield Row(f"{what}: memory beyond q, k, v, out and lse", at_most(256, "MB"), memory / 1e6)
