"""What a call may ask for besides a pattern: the price of score functions, dropout and values of another head dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

import flexdilated as fd

from ._checks import assert_near
from ._jobs import Attention, Problem, Size, attention_job, race, step_bytes
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
