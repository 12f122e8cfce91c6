"""The roofline: how much of the machine's matmul rate useful work gets, and what takes the rest of the time."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call, FlexSide, allowed_on, make_flex_program, merge
from flexdilated.engines.flex import allow_gathers_in_graph
from flexdilated.engines.kernels._kernel import flash_backward, flash_forward
from flexdilated.masks.planning._planner import plan

from ._catalogue import names_for
from ._checks import check_training
from ._jobs import Attention, Job, Part, Problem, Size, attention_job, interleave, say
from ._measures import Row, Timing, at_least, measure
from ._rules import LibraryRule, LongNet
from .peers import dense_attention

_PARTS: tuple[Part, ...] = ("forward", "backward")
_FLOPS = {"forward": 4, "backward": 10}  # of a pair, times the head dim: two and five products
MATMUL, DENSE = "matmul", "dense"


@dataclass(frozen=True)
class Case:
    """A pattern by its name in the table and its expression, in the words of `names_for`."""

    name: str
    text: str
    head_dim: int = 64

    def pattern(self, num_tokens: int) -> masks.Pattern | masks.Mixture:
        return eval(self.text, names_for(num_tokens))


@dataclass(frozen=True)
class Shape:
    """Problems of `queries` by `keys`, `pairs` in all."""

    queries: int
    keys: int
    pairs: int
    head_dim: int = 64

    def __str__(self) -> str:
        return f"{self.queries:,} × {self.keys:,}"

    @property
    def count(self) -> int:
        """Problems in a call."""
        return max(1, self.pairs // (self.queries * self.keys))

    def flops(self, a_pair: int) -> int:
        """FLOPs of a call with `a_pair` times the head dim for each pair."""
        return a_pair * self.head_dim * self.count * self.queries * self.keys


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


@measure(cases=CASES[:2], size=Size(512, num_heads=2, repeats=1), matmul=64, shapes=(Shape(8, 16, pairs=1 << 8),))
def roofline(
    cases: tuple[Case, ...] = CASES,
    size: Size = Size(16384, num_heads=2, repeats=3),
    matmul: int = 4096,
    shapes: tuple[Shape, ...] = SHAPES,
) -> list[Row]:
    """How much of the machine's matmul rate does useful work get, pattern by pattern, and what takes the rest?

    Every pattern is verified; all are timed in turns, beside a product of matrices of side `matmul` and dense
    attention; one run of each is taken apart. The first pattern is held to the targets.
    """
    problems = {dim: Problem.draw(replace(size, head_dim=dim)) for dim in {case.head_dim for case in cases}}
    works: dict[str, tuple[Attention, Problem]] = {DENSE: (dense_attention(causal=False), problems[size.head_dim])}
    dense_pairs = 1.0 * size.num_heads * size.num_tokens**2
    pairs: dict[str, tuple[float, float]] = {DENSE: (dense_pairs, dense_pairs)}
    for case in cases:
        pattern = case.pattern(size.num_tokens)
        works[case.name] = partial(fd.attend, pattern=pattern), problems[case.head_dim]
        check_training(*works[case.name], LibraryRule(pattern))
        pairs[case.name] = _pairs(pattern, size)
    matrix = torch.randn(matmul, matmul)
    jobs = [Job(MATMUL, lambda _: matrix @ matrix)]
    for name, work in works.items():
        jobs += [attention_job(f"{name}, {part}", *work, part) for part in _PARTS]
    jobs += [job for shape in shapes for job in kernel_jobs(shape)]
    timings = {timing.name: timing for timing in interleave(jobs, repeats=size.repeats)}
    by_name = {job.name: job for job in jobs}
    matmul_rate = 2 * matmul**3 / timings[MATMUL].median_s
    figures: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for part, (name, (_, problem)) in product(_PARTS, works.items()):
        key, flops = f"{name}, {part}", _FLOPS[part] * problem.q.shape[-1]
        figures[part][name] = _figures(by_name[key], timings[key], pairs[name], flops, matmul_rate)
    kernel = {
        str(shape): {part: shape.flops(_FLOPS[part]) / timings[f"kernel {shape}, {part}"].median_s for part in _PARTS}
        for shape in shapes
    }
    detail = {"matmul_rate": matmul_rate, "kernel_rates": kernel, "patterns": figures}
    first, rows = cases[0].name, []
    for part, bound in (("forward", 0.6), ("backward", 0.7)):
        rate = figures[part][first]["rate"] / figures[part][DENSE]["rate"]
        both = tuple(timings[f"{name}, {part}"] for name in (DENSE, first))
        what = f"{first}, {size}, {part}: useful-FLOP rate over dense SDPA's"
        rows.append(Row(what, at_least(bound), rate, both, {} if rows else detail))
    shares = {f"{each.name}, {part}": figures[part][each.name]["in_kernel"] for part in _PARTS for each in cases}
    worst = min(shares, key=lambda name: shares[name])
    what = f"{size}: share of the time inside the attention kernel, least of {len(cases)} patterns"
    return [*rows, Row(what, at_least(0.65), shares[worst], detail={"least": worst, "shares": shares})]


def _pairs(pattern: masks.Pattern | masks.Mixture, size: Size) -> tuple[float, float]:
    """(useful pairs, pairs computed by the planner's choice) of all heads."""
    heads, tokens = size.num_heads, size.num_tokens
    bound = pattern.bind(num_heads=heads, num_queries=tokens, num_keys=tokens)
    return masks.describe(pattern, tokens, num_heads=heads).useful_pairs, plan(bound).cost.computed_pairs


def _figures(
    job: Job, timing: Timing, pairs: tuple[float, float], flops_a_pair: int, matmul_rate: float
) -> dict[str, Any]:
    """Rates, and shares of the time that sum to 1.

    The kernel's share is split by the time that its work takes at the matmul's rate: useful pairs, pairs beyond these
    (negative where branches share work), and the rest of its time.
    """
    measured = parts_of(job.prepare or (lambda: None), job.run)
    useful, computed = (count * flops_a_pair / matmul_rate / timing.median_s for count in pairs)
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


def kernel_jobs(shape: Shape) -> tuple[Job, Job]:
    """Forward and backward, named after the shape."""
    generator = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, shape.count, 1, shape.queries, shape.head_dim, generator=generator)
    k, v = torch.randn(2, shape.count, 1, shape.keys, shape.head_dim, generator=generator)
    scale = shape.head_dim**-0.5
    out, lse = flash_forward(q, k, v, scale=scale)
    return (
        Job(f"kernel {shape}, forward", lambda _: flash_forward(q, k, v, scale=scale)),
        Job(f"kernel {shape}, backward", lambda _: flash_backward(grad, q, k, v, out, lse, scale=scale)),
    )


# What an operator's own time counts as, by the first of these that is in its name.
_KINDS = {
    "kernel": ("flash_attention",),
    "moves": ("copy_", "index_select", "aten::index", "aten::cat", "clone", "constant_pad"),
    "sums": ("add_", "aten::sum"),
    "merges": ("lerp", "sigmoid", "logaddexp", "aten::sub"),
    "masks": ("where", "any", "bitwise_not", "masked_fill", "aten::eq"),
    "fills": ("fill_", "zero_"),
}
_ORDER = ("kernel", "masks", "sums", "merges", "moves", "fills")  # masked_fill_ is no fill_, index_add_ no index
KINDS = (*_KINDS, "rest")


def parts_of(prepare: Callable[[], Any], work: Callable[[Any], object], *, runs: int = 2) -> Mapping[str, float]:
    """The share of each of KINDS in the quickest run; they sum to 1. `prepare` is left out.

    kernel: attention itself. moves: gathers, copies, rows put in their place. sums: gradients added up. merges: of
    branches, by lse. fills: memory that starts at zero. rest: all other operators, Python and views.
    """
    return min((_profiled(prepare(), work) for _ in range(runs)), key=lambda run: run[0])[1]


def _profiled(given: Any, work: Callable[[Any], object]) -> tuple[float, Mapping[str, float]]:
    """(seconds, shares) of one run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events", UserWarning)  # torch 2.11 says so at every use
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            start = perf_counter()
            work(given)
            whole = perf_counter() - start
    seconds = dict.fromkeys(_KINDS, 0.0)
    for event in profiled.key_averages():
        kind = _kind(event.key)
        if kind is not None:
            seconds[kind] += event.self_cpu_time_total / 1e6
    shares = {kind: spent / whole for kind, spent in seconds.items()}
    return whole, {**shares, "rest": 1.0 - sum(shares.values())}


def _kind(name: str) -> str | None:
    return next((kind for kind in _ORDER if any(part in name for part in _KINDS[kind])), None)


def beside_attention(spec: LongNet, problem: Problem) -> tuple[tuple[Job, Job], int]:
    """The flex engine's compiled steps without attention, gathers and merge, and the bytes that it gathers."""
    (batch, heads, tokens, dim), device = problem.q.shape, problem.q.device
    key = Call(spec.pattern().text, heads, heads, tokens, tokens, 0, 0, 0, heads, 1, ())
    best = key.plan(device=device, allowed=allowed_on(torch.device("cuda")))
    options = {"num_kv_heads": heads, "block_size": key.sides, "device": device}
    steps = make_flex_program(best, key.layout, **options).steps
    moved = [step for step in steps if step.structure.queries.kind != "all"]

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [
            side.slots.take(x, side.rows, side.start, step.mask.seq_lengths[axis])
            for step in moved
            for x, side, axis in ((q, step.queries, 0), (k, step.keys, 1), (v, step.keys, 1))
        ]

    def merged(parts: list[Tensor], lses: list[Tensor]) -> Tensor:
        def whole(x: Tensor, side: FlexSide, empty: float) -> Tensor:
            return side.slots.put(x, side.rows, side.start, tokens, empty)

        own = zip(parts, lses, (step.queries for step in steps), strict=True)
        return merge([(whole(part, side, 0.0), whole(lse, side, -torch.inf)) for part, lse, side in own])[0]

    allow_gathers_in_graph()
    run_gather = torch.no_grad()(torch.compile(gathered, dynamic=False))
    run_merge = torch.no_grad()(torch.compile(merged, dynamic=False))
    slots = [step.mask.seq_lengths[0] for step in steps]
    parts = [torch.randn(batch, heads, length, dim, dtype=problem.q.dtype, device=device) for length in slots]
    lses = [torch.randn(batch, heads, length, device=device) for length in slots]
    jobs = Job("gathers", lambda _: run_gather(*problem.qkv)), Job("merges", lambda _: run_merge(parts, lses))
    return jobs, sum(x.nbytes for x in run_gather(*problem.qkv))
