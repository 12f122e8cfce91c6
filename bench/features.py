"""Cost of options of a call: score functions, dropout, values of another head dim, and rules that differ by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import flexdilated as fd
from flexdilated import masks

from ._checks import assert_near
from ._jobs import Attention, Job, Problem, Size, attention_job, race, step_bytes, tokens_text, train
from ._measures import Row, at_most, measure
from ._rules import LongNet, Window

# H heads, N tokens

Rule = LongNet | Window
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_RULES = (LongNet("LongNet-2", (1024, 4096), (1, 4), causal=True), Window("window of 512", 511, 0))
_SMALL = (LongNet("LongNet-2", (32, 128), (1, 4), causal=True), Window("window of 16", 15, 0))


def alibi(num_heads: int) -> ScoreMod:
    """ALiBi with learned slopes, arXiv 2108.12409."""
    slopes = (2.0 ** -torch.arange(1, num_heads + 1)).requires_grad_()
    return lambda score, b, h, q_idx, k_idx: score - slopes[h] * (q_idx - k_idx)


def learned_table(num_heads: int, num_tokens: int) -> ScoreMod:
    """A learned bias for each head and distance."""
    table = torch.zeros(num_heads, num_tokens, requires_grad=True)
    return lambda score, b, h, q_idx, k_idx: score + table[h, q_idx - k_idx]


def with_alibi(rule: Rule, size: Size, engine: str | None = None) -> Attention:
    return partial(fd.attend, pattern=rule.pattern(), score_mod=alibi(size.num_heads), engine=engine)


def with_learned_table(rule: Rule, size: Size, engine: str | None = None) -> Attention:
    table = learned_table(size.num_heads, size.num_tokens)
    return partial(fd.attend, pattern=rule.pattern(), score_mod=table, engine=engine)


def with_dropout(rule: Rule, size: Size, engine: str | None = None) -> Attention:
    return partial(fd.attend, pattern=rule.pattern(), dropout_p=0.1, engine=engine)


def narrow_values(rule: Rule, size: Size, engine: str | None = None) -> Attention:
    """Values of two thirds of the keys' head dim, as in multi-head latent attention; zeros pad the output."""
    width, pattern = size.head_dim * 2 // 3, rule.pattern()
    return lambda q, k, v: pad(fd.attend(q, k, v[..., :width], pattern, engine=engine), (0, size.head_dim - width))


def without(rule: Rule, size: Size) -> Attention:
    return rule.attention()


# Head dims in units of the size's: values of 128 channels for keys of 192.
FEATURES = {
    "ALiBi": (with_alibi, 1),
    "a learned table": (with_learned_table, 1),
    "dropout": (with_dropout, 1),
    "narrow values": (narrow_values, 3),
}
_VERIFIED_TOKENS = 512


@measure("C20", rules=_SMALL, size=Size(128, num_heads=2, head_dim=12, repeats=1))
def features(rules: tuple[Rule, ...] = _RULES, size: Size = Size(4096, num_heads=8, repeats=7)) -> Iterator[Row]:
    """What do a learned bias, dropout, or values of another head dim than keys cost, over the pattern alone?

    Forward and backward; the pattern alone is computed by the fast kernels.
    """
    for rule, (name, (make, times)) in product(rules, FEATURES.items()):
        own = replace(size, head_dim=size.head_dim * times)
        few = replace(own, num_tokens=min(own.num_tokens, _VERIFIED_TOKENS))
        found, exact = (
            make(rule, few, engine)(*Problem.draw(few).qkv)
            for engine in (None, "reference")
            for _ in [torch.manual_seed(0)]  # equal draws of dropout
        )
        assert_near(name, found, exact)
        problem = Problem.draw(own)
        ways = {name: partial(make, rule, own), "without": partial(without, rule, own)}
        jobs = [attention_job(each, way(), problem, "forward + backward") for each, way in ways.items()]
        what = f"{rule.label}, {own}, {name}, forward + backward"
        yield race(
            f"{what}: time of a step with the feature over one without", at_most(4, "×"), jobs, repeats=size.repeats
        )
        ours, theirs = (step_bytes(each, way, own) for each, way in ways.items())
        detail = {"peak_bytes": ours, "peak_bytes_without": theirs}
        yield Row(
            f"{what}: peak memory of a step with the feature over one without",
            at_most(2, "×"),
            ours / max(1, theirs),
            detail=detail,
        )


def _problem(batch: int, num_queries: int, num_keys: int, size: Size) -> Problem:
    draw = torch.Generator().manual_seed(0)
    lengths = (num_queries, num_keys, num_keys, num_queries)
    return Problem(*(torch.randn(batch, size.num_heads, n, size.head_dim, generator=draw) for n in lengths))


def _masks(batch: int, num_tokens: int) -> Iterator[Tensor]:
    """Yield random masks (batch, 1, N, N) that allow each pair with probability 0.3."""
    draw = torch.Generator().manual_seed(0)
    while True:
        yield torch.rand(batch, 1, num_tokens, num_tokens, generator=draw) < 0.3


def _lengths(documents: int, *totals: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield, for each total, random lengths (documents,) of at least 1 that add up to it."""
    draw = torch.Generator().manual_seed(0)
    while True:
        cuts = (torch.randperm(total - 1, generator=draw)[: documents - 1].sort().values + 1 for total in totals)
        ends = ((cut, torch.tensor([0]), torch.tensor([total])) for cut, total in zip(cuts, totals, strict=True))
        yield tuple(torch.diff(torch.cat(end).sort().values) for end in ends)


def masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return fd.attend(q, k, v, masks.mask(allowed))


def masked_by_torch(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, ...]) -> Tensor:
    ids = (torch.arange(len(each)).repeat_interleave(each) for each in lengths)
    return fd.attend(q, k, v, masks.same_document(*ids))


def pair_by_pair(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, ...]) -> Tensor:
    of_queries, of_keys = (each.tolist() for each in lengths)
    parts = zip(q.split(of_queries, 2), k.split(of_keys, 2), v.split(of_keys, 2), strict=True)
    return torch.cat([scaled_dot_product_attention(*part) for part in parts], 2)


@measure(size=Size(64, num_heads=2, head_dim=16, repeats=1), documents=4)
def samples(
    size: Size = Size(512, num_heads=8, repeats=15), batch: int = 4, documents: int = 64, longer: int = 8
) -> Iterator[Row]:
    """What do a mask for each sample, and packed cross-attention, cost relative to PyTorch's kernel?

    Forward and backward. The packed documents have `longer` times as many queries as `size` has tokens, and twice as
    many keys as queries.
    """
    tokens, num_queries = size.num_tokens, longer * size.num_tokens
    one_mask = next(_masks(batch, tokens))
    of_masks, of_documents = _problem(batch, tokens, tokens, size), _problem(1, num_queries, 2 * num_queries, size)
    text = f"{batch} samples of {tokens} tokens, {size.num_heads} heads"
    pairs = f"{documents} packed documents, {tokens_text(num_queries)} queries, {tokens_text(2 * num_queries)} keys"
    by_mask, by_documents = (masked, masked_by_torch), (packed, pair_by_pair)
    lengths = _lengths(documents, num_queries, 2 * num_queries)
    cases: list[tuple[str, float, tuple[Callable[..., Tensor], ...], Problem, Iterator[Any]]] = [
        (f"a mask for each of {text}", 1.3, by_mask, of_masks, repeat(one_mask)),
        ("the same, new masks in each step", 2, by_mask, of_masks, _masks(batch, tokens)),
        (f"{pairs}, new lengths in each step", 2, by_documents, of_documents, lengths),
    ]
    for what, target, ways, problem, drawn in cases:
        given = next(drawn)
        found, wanted = (way(*problem.qkv, given) for way in ways)
        assert_near(what, found, wanted)
        jobs = [_job_of(way, problem, drawn) for way in ways]
        name = "PyTorch's kernel" if ways is by_mask else "PyTorch's kernel for each document"
        yield race(f"{what}, forward + backward: time over {name}", at_most(target, "×"), jobs, repeats=size.repeats)


def _job_of(way: Callable[..., Tensor], problem: Problem, drawn: Iterator[Any]) -> Job:
    return Job(way.__name__, lambda given: train(lambda *x: way(*x, given), problem), lambda: next(drawn))
