"""How much of the machine's matmul rate does useful work get, pattern by pattern, and what takes the rest?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.planning._planner import plan

from ._catalogue_rules import names_for
from ._kernel_rates import Shape, kernel_jobs, kernel_rate
from ._oracle import check_training
from ._parts import KINDS, parts_of
from ._problem import Attention, Problem, Size, backward_job, forward_job
from ._result import Result, Row, Timing, at_least
from ._timing import Job, interleave, say
from .peer_dense import dense_attention

_FLOPS = {"forward": 4, "backward": 10}  # of a pair, times the head dim: two and five products
MATMUL, DENSE = "matmul", "dense"


@dataclass(frozen=True)
class Case:
    """A pattern by its name in the table and its expression, in the words of `names_for`."""

    name: str
    text: str
    head_dim: int = 64

    def pattern(self, num_tokens: int) -> masks.Pattern | masks.Mixture:
        """The pattern over this many tokens."""
        return eval(self.text, names_for(num_tokens))


@dataclass(frozen=True)
class Config:
    """The patterns, of which the first is held to the targets; the side of the product; shapes of the kernel alone."""

    cases: tuple[Case, ...]
    size: Size
    matmul: int
    shapes: tuple[Shape, ...]


_LONGNET_4 = "masks.longnet([2048, 4096, 8192, 16384], [1, 2, 4, 8])"
_LONGNET_5 = "masks.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])"
_PAPER_5 = "masks.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])"
_GIGAPATH_5 = "masks.longnet([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])"

CASES = (
    Case("window of 1024, causal", "masks.local_window(left=1023, right=0)"),
    Case("window of 256, causal", "masks.local_window(left=255, right=0)"),
    Case("window of 4096, causal", "masks.local_window(left=4095, right=0)"),
    Case("window of 512 each side", "masks.local_window(left=512, right=512)"),
    Case("LongNet-4", _LONGNET_4),
    Case("LongNet-4, causal", f"{_LONGNET_4} & masks.causal()"),
    Case("LongNet-5, causal", f"{_LONGNET_5} & masks.causal()"),
    Case("paper-5", _PAPER_5),
    Case("GigaPath-5, head dim 48", _GIGAPATH_5, head_dim=48),
    Case("dilated window, rate 4", "masks.dilated_window(left=1023, right=0, rate=4)"),
    Case("Sparse Transformer, strided", "masks.recipes.sparse_transformer_strided(128)"),
    Case("BigBird", "masks.recipes.bigbird(num_tokens)"),
    Case("Longformer", "masks.recipes.longformer(256, 64)"),
    Case("128 global tokens", "masks.global_tokens(128)"),
    Case("documents, causal", "masks.documents(ids) & masks.causal()"),
)
_SIDES = ((128, 384), (128, 1152), (256, 512), (256, 1280), (512, 1536), (1024, 2048), (2048, 2048))
SHAPES = tuple(Shape(*sides, pairs=1 << 24) for sides in _SIDES)
FULL = Config(CASES, Size(16384, num_heads=2, repeats=3), 4096, SHAPES)
SMALL = Config(CASES[:2], Size(512, num_heads=2, repeats=1), 64, (Shape(8, 16, pairs=1 << 8),))


@dataclass(frozen=True)
class Rule:
    """A pattern by its own rule, pair by pair: what the check compares its attention with."""

    pattern: masks.Pattern | masks.Mixture

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        """The pairs of the sampled query rows that each branch allows."""
        h, q, k = torch.arange(num_heads)[:, None, None], rows[None, :, None], torch.arange(num_tokens)[None, None]
        sizes = {"num_heads": num_heads, "num_queries": num_tokens, "num_keys": num_tokens}
        rules = [branch.bind(**sizes).mask_mod() for branch in self.pattern.branches()]
        return [rule(torch.tensor(0), h, q, k).expand(num_heads, len(rows), num_tokens) for rule in rules]


def run(config: Config) -> Result:
    """Verify every pattern; time them all in turns, beside a matmul and dense attention; take one run of each apart."""
    size = config.size
    problems = {dim: Problem.draw(replace(size, head_dim=dim)) for dim in {case.head_dim for case in config.cases}}
    works: dict[str, tuple[Attention, Problem]] = {DENSE: (dense_attention(causal=False), problems[size.head_dim])}
    for case in config.cases:
        pattern, problem = case.pattern(size.num_tokens), problems[case.head_dim]
        works[case.name] = partial(fd.attend, pattern=pattern), problem
        check_training(works[case.name][0], problem, Rule(pattern))
    matrix = torch.randn(config.matmul, config.matmul)
    jobs = [Job(MATMUL, lambda _: matrix @ matrix)]
    jobs += [job for name, work in works.items() for job in _jobs(name, *work)]
    jobs += [job for shape in config.shapes for job in kernel_jobs(shape)]
    timings = {timing.name: timing for timing in interleave(jobs, repeats=size.repeats)}
    matmul_rate = 2 * config.matmul**3 / timings[MATMUL].median_s
    figures = {}
    for direction in _FLOPS:
        dense = 1.0 * size.num_heads * size.num_tokens**2
        pairs = {DENSE: (dense, dense), **{case.name: _pairs(case, size) for case in config.cases}}
        figures[direction] = {
            name: _figures(jobs, timings[_label(name, direction)], pairs[name], work[1], direction, matmul_rate)
            for name, work in works.items()
        }
    return Result(tuple(_rows(config, figures, timings, matmul_rate)))


def _label(name: str, direction: str) -> str:
    return f"{name}, {direction}"


def _jobs(name: str, attention: Attention, problem: Problem) -> tuple[Job, Job]:
    return (
        forward_job(_label(name, "forward"), attention, problem),
        backward_job(_label(name, "backward"), attention, problem),
    )


def _pairs(case: Case, size: Size) -> tuple[float, float]:
    """(useful pairs, pairs in what the planner chose to compute) of all heads."""
    pattern, num_tokens = case.pattern(size.num_tokens), size.num_tokens
    useful = masks.describe(pattern, num_tokens, num_heads=size.num_heads).useful_pairs
    bound = pattern.bind(num_heads=size.num_heads, num_queries=num_tokens, num_keys=num_tokens)
    return useful, plan(bound).cost.computed_pairs


def _figures(
    jobs: Sequence[Job],
    timing: Timing,
    pairs: tuple[float, float],
    problem: Problem,
    direction: str,
    matmul_rate: float,
) -> dict[str, Any]:
    """Rates, and what the time is made of: shares that sum to 1.

    What the kernel does is split by what the same work would take at the matmul's rate: useful pairs, pairs beyond
    these (less than none where branches share work), and the kernel's distance from that rate.
    """
    (job,) = (job for job in jobs if job.name == timing.name)
    measured = parts_of(job.prepare or (lambda: None), job.run)
    useful, computed = (
        count * _FLOPS[direction] * problem.q.shape[-1] / matmul_rate / timing.median_s for count in pairs
    )
    split = {"useful": useful, "beyond": computed - useful, "below": measured["kernel"] - computed}
    say(f"{timing.name}: {useful:.1%} of the matmul rate, {measured['kernel']:.1%} in the kernel")
    return {
        "seconds": timing.median_s,
        "rate": useful * matmul_rate,
        "of_matmul": useful,
        "waste": pairs[1] / pairs[0],
        "in_kernel": measured["kernel"],
        "shares": {**split, **{kind: measured[kind] for kind in KINDS if kind != "kernel"}},
    }


def _rows(config: Config, figures: Mapping[str, Any], timings: Mapping[str, Timing], matmul_rate: float) -> list[Row]:
    kernel = {
        str(shape): {direction: kernel_rate(shape, direction, flops, timings) for direction, flops in _FLOPS.items()}
        for shape in config.shapes
    }
    detail = {"matmul_rate": matmul_rate, "kernel_rates": kernel, "patterns": figures}
    window, rows = config.cases[0].name, []
    for direction, bound in (("forward", 0.6), ("backward", 0.7)):
        ours, dense = figures[direction][window], figures[direction][DENSE]
        both = tuple(timings[_label(name, direction)] for name in (DENSE, window))
        measure = f"{window}, {config.size}, {direction}: useful-FLOP rate over dense SDPA's"
        rows.append(Row(measure, at_least(bound), ours["rate"] / dense["rate"], both, detail if not rows else {}))
    shares = {
        _label(case.name, direction): figures[direction][case.name]["in_kernel"]
        for direction in figures
        for case in config.cases
    }
    worst = min(shares, key=lambda name: shares[name])
    measure = f"{config.size}: share of the time inside the attention kernel, least of {len(config.cases)} patterns"
    return [*rows, Row(measure, at_least(0.65), shares[worst], detail={"least": worst, "shares": shares})]
