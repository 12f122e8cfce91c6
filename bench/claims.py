"""Published figures on dilated and block-sparse attention, measured again: caching, memory, kernels, length.

DarcStar is DarcStar-Solutions-Tech/dilated-attention-pytorch, fkodom is fkodom/dilated-attention-pytorch. Where a
range was claimed, its lower end is what has to be reached.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks

from ._checks import check_forward
from ._jobs import (
    WARM_UP_TOKENS,
    Attention,
    Job,
    Problem,
    Size,
    forward_job,
    interleave,
    peak_bytes,
    ratio,
    train,
)
from ._measures import DARCSTAR, Claim, Row, Timing, at_least, at_most, measure
from ._rules import LongNet, same_branch
from .peers import block_rows, dense_attention
from .planning import planned_call

_CACHING = f"{DARCSTAR}, commit f6094f7, docs/guides/optimization-guide.md"
_REPORT = f"{DARCSTAR}, commit f6094f7, docs/reports/pattern-caching-performance-2025-06-29-1400-UTC.md"
_HEAD_PARALLEL = f"{DARCSTAR}, commit c905f2b, docs/guides/head-parallel-optimization-fixes.md"
_FINDINGS = (
    f"{DARCSTAR}, commit f6094f7, "
    "docs/benchmarks/by-type/other/2025-06-26-1121-UTC/block-sparse-optimization-findings.md"
)
_ANALYSIS = f"{DARCSTAR}, commit f6094f7, docs/feasibility/memory-analysis.md"
_FKODOM = "fkodom/dilated-attention-pytorch, commit 87cda75, doc/benchmark.png and benchmark.py"

LOOK_UP = Claim(
    "a cached pattern is found sooner than it is made",
    "2.04 times as fast, on average",
    _REPORT,
    "planning a call of LongNet's branches 1024, 2048, 4096, with nothing cached, over looking the plan up",
    at_least(2.0, "×"),
)
CACHED_PASS = Claim(
    "caching patterns speeds up repeated forward passes",
    "2 times as fast",
    _CACHING,
    "the forward pass of that call, with the cache cleared before each pass, over the pass with all cached",
    at_least(2.0, "×"),
)
CACHED_MEMORY = Claim(
    "caching patterns lowers the peak memory of a forward pass",
    "276.01 MB to 212.01 MB: 23.2 % saved",
    _REPORT,
    "peak of the forward pass, inputs and output included, planned before it against planned within it",
    at_least(23.2, "%"),
)
HITS = Claim(
    "patterns are found in the cache while training",
    "at least 90 % hits",
    _CACHING,
    "share of hits over a short training run of several layers, in which batches of three lengths take turns",
    at_least(90.0, "%"),
)
NAIVE_MEMORY = Claim(
    "dilated attention needs less memory than naive attention, 8,192 tokens, 8 heads",
    "114 MB instead of 2,048 MB (computed): 94.4 % less",
    _HEAD_PARALLEL,
    "peak of a forward pass, inputs and output included, against attention by two matmuls and a softmax, measured too",
    at_least(94.4, "%"),
)
TOKEN_BYTES = Claim(
    "that peak for each token",
    "14.25 KB",
    _HEAD_PARALLEL,
    "the same peak over the number of tokens; q, k, v and the output alone are 8 KB of it",
    at_most(14.25, "KB"),
)
TUNED_BLOCKS = Claim(
    "tuned block sizes are faster than the default of 128",
    "10 to 20 % (expected)",
    _FINDINGS,
    "BigBird's pattern, whose own blocks have 64 tokens, forward: the time at block sides of 128 over the best of "
    "64, 128 and 256",
    at_least(1.10, "×"),
)
BLOCK_ORDER = Claim(
    "blocks that share keys, computed one after the other, use the processor's cache better",
    "5 to 15 % (expected)",
    _FINDINGS,
    "rows of blocks of a window, gathered in eager PyTorch: drawn order over ascending order",
    at_least(1.05, "×"),
)
FUSED_KERNEL = Claim(
    "a fused kernel is faster than separate matmuls over the active blocks",
    "20 to 30 % (expected)",
    _FINDINGS,
    "the same gathered blocks: two matmuls and a softmax over one call of flash attention",
    at_least(1.20, "×"),
)
FUSED_QKV = Claim(
    "one fused projection is faster than three, for q, k and v",
    "20 to 30 %",
    _ANALYSIS,
    "three linear layers over one of three times the width, forward",
    at_least(1.20, "×"),
)
LONG = Claim(
    "dilated attention is faster than dense attention at 128K tokens",
    "about 25 times: 56 s to 2.25 s, read off the figure",
    _FKODOM,
    "the source's sizes (4 heads of 8, one branch each: 8192, 16384, 32768 at rates 1, 2, 8), forward; dense "
    "attention is timed on a slice of the query rows over all keys and multiplied, as its cost is linear in them",
    at_least(25.0, "×"),
)

# In the order of the page of claims.
CLAIMS = (
    LOOK_UP, CACHED_PASS, CACHED_MEMORY, HITS, NAIVE_MEMORY, TOKEN_BYTES, TUNED_BLOCKS, BLOCK_ORDER, FUSED_KERNEL,
    FUSED_QKV, LONG,
)  # fmt: skip

_LOOK_UPS = 100
_SIDES, _DEFAULT = (64, 128, 256), 128
_WINDOW_BLOCKS = 5


@dataclass(frozen=True)
class Caching:
    """One LongNet at one size; `steps` of `layers` layers each are the training run, in lengths that take turns."""

    spec: LongNet
    size: Size
    lengths: tuple[int, ...]
    steps: int
    layers: int = 4


@dataclass(frozen=True)
class Kernels:
    """The size for block sides, that for rows of blocks, and tokens and width of the projections."""

    tuned: Size
    rows: Size
    projected: tuple[int, int]


@dataclass(frozen=True)
class Length:
    """One branch a head: each branch has one head, but the first has what is left, too.

    As in the source, branch i starts at token i mod its rate of each segment.

    Dense attention is timed on `rows` query rows. `check_tokens` is where it is timed whole too, to see that the
    slice stands for it.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    size: Size
    rows: int
    check_tokens: int

    def pattern(self) -> masks.Pattern:
        """The same as a pattern of the library."""
        return masks.per_head(
            [masks.dilated(length, rate, branch % rate) for length, rate, branch in self.branch_of_head]
        )

    def masks(self, rows: Tensor, *, num_tokens: int, num_heads: int) -> list[Tensor]:
        """The pairs of the sampled query rows, as the one branch of a set."""
        q, k = rows[:, None], torch.arange(num_tokens)[None]
        allowed = [
            same_branch(torch.tensor(branch), q, k, length=length, rate=rate)
            for length, rate, branch in self.branch_of_head
        ]
        return [torch.stack(allowed)]

    @property
    def ratio_of_pairs(self) -> float:
        """Pairs of dense attention over those of the branches; each segment's active tokens see one another."""
        tokens = self.size.num_tokens
        sparse = sum(tokens // length * (length // rate) ** 2 for length, rate, _ in self.branch_of_head)
        return self.size.num_heads * tokens**2 / sparse

    @property
    def branch_of_head(self) -> list[tuple[int, int, int]]:
        """(segment length, rate, branch) of each head."""
        branches = list(zip(self.segment_lengths, self.dilation_rates, range(len(self.dilation_rates)), strict=True))
        return [branches[0]] * (self.size.num_heads - len(branches)) + branches


_CACHED = LongNet("LongNet-3", (1024, 2048, 4096), (1, 2, 4))


@measure(
    full={
        "caching": Caching(_CACHED, Size(4096, num_heads=8, repeats=5), lengths=(256, 512, 1024), steps=24),
        "memory": Size(8192, num_heads=8),
        "kernels": Kernels(Size(8192, num_heads=2, repeats=5), Size(32768, num_heads=2, repeats=7), (8192, 512)),
        "length": Length((8192, 16384, 32768), (1, 2, 8), Size(131072, 4, head_dim=8, repeats=3), 4096, 32768),
    },
    small={
        "caching": Caching(
            _CACHED.shrunk(16), Size(256, num_heads=2, head_dim=16, repeats=1), lengths=(128, 256), steps=4
        ),
        "memory": Size(512, num_heads=4, head_dim=16),
        "kernels": Kernels(Size(2048, num_heads=1, repeats=1), Size(2048, num_heads=1, repeats=1), (64, 32)),
        "length": Length((128, 256, 512), (1, 2, 8), Size(2048, 4, head_dim=8, repeats=1), 128, 512),
    },
)
def claims(caching: Caching, memory: Size, kernels: Kernels, length: Length) -> Iterator[Row]:
    """Which published figures on dilated and block-sparse attention are reached here?

    Claimed against measured, at the sizes of the sources, where they name any. A target is the claim's figure; that
    it is missed is an answer, too.
    """
    yield from _cached(caching)
    yield from _naive_memory(memory)
    yield _tuned_blocks(kernels.tuned)
    yield from _rows_of_blocks(kernels.rows)
    yield _projections(*kernels.projected, kernels.rows.repeats)
    yield _long(length)


def _cached(config: Caching) -> Iterator[Row]:
    """What a cached plan is worth: in time, in memory, and how often it is there."""
    spec, size, clear = config.spec, config.size, masks.cache().clear
    pattern, problem, attention = spec.pattern(), Problem.draw(size), spec.attention()
    check_forward(attention, problem, spec)
    plan = partial(planned_call, pattern, size.num_heads, size.num_tokens)
    planning, together = interleave(
        (
            Job("planning", lambda _: plan(), prepare=clear),
            Job("look-ups", lambda _: [plan() for _ in range(_LOOK_UPS)], prepare=plan),
        ),
        repeats=size.repeats,
    )
    found = ratio(planning, together) * _LOOK_UPS
    yield LOOK_UP.row(found, (planning, together), look_ups_a_repeat=_LOOK_UPS)
    cached = forward_job("cached", attention, problem)
    timings = interleave((Job("nothing cached", cached.run, clear), cached), repeats=size.repeats)
    yield CACHED_PASS.row(ratio(*timings), timings)
    without, within = (peak_bytes(_library_pass, pattern, size, planned) for planned in (False, True))
    saved = 100 * (1 - within / max(1, without))
    yield CACHED_MEMORY.row(saved, peak_bytes=within, peak_bytes_without=without)
    problems = [Problem.draw(replace(size, num_tokens=length)) for length in config.lengths]
    clear()
    for step in range(config.steps):
        for _ in range(config.layers):
            train(spec.attention(), problems[step % len(problems)])
    stats = masks.cache().stats()
    yield HITS.row(100 * stats.hit_rate, hits=stats.hits, misses=stats.misses)


def _naive_memory(size: Size) -> Iterator[Row]:
    """How much memory a forward pass needs beside naive attention, which forms queries x keys."""
    q, k, v = _draw(Size(WARM_UP_TOKENS, num_heads=2))
    assert_close(naive(q, k, v), dense_attention(causal=False)(q, k, v), rtol=1e-4, atol=1e-5)
    pattern = masks.longnet((1024, 2048, 4096), (1, 2, 4), heads="grouped")
    ours, theirs = peak_bytes(_library_pass, pattern, size, False), peak_bytes(_pass, naive, size)
    scores = 4 * size.num_heads * size.num_tokens**2
    yield NAIVE_MEMORY.row(
        100 * (1 - ours / max(1, theirs)),
        peak_bytes=ours,
        naive_peak_bytes=theirs,
        percent_less_than_naive_scores_alone=100 * (1 - ours / scores),
    )
    yield TOKEN_BYTES.row(ours / size.num_tokens / 1024, peak_bytes=ours)


def _library_pass(pattern: masks.Pattern | masks.Mixture, size: Size, planned: bool) -> Callable[[], object]:
    ready = _pass(partial(fd.attend, pattern=pattern), size)
    if planned:
        planned_call(pattern, size.num_heads, size.num_tokens)
    return ready


@torch.no_grad()
def _pass(attention: Attention, size: Size) -> Callable[[], object]:
    """A forward pass from scratch, inputs included, after one at a tiny size."""
    attention(*_draw(replace(size, num_tokens=WARM_UP_TOKENS)))
    return torch.no_grad()(lambda: attention(*_draw(size)))


def _draw(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, size.num_heads, size.num_tokens, size.head_dim) for _ in range(3))
    return q, k, v


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def _tuned_blocks(size: Size) -> Row:
    pattern, problem = masks.recipes.bigbird(size.num_tokens), Problem.draw(size)
    attentions: dict[str, Attention] = {
        f"blocks of {side}": partial(fd.attend, pattern=pattern, block_size=side) for side in _SIDES
    }
    timings = _compared(attentions, problem, size.repeats)
    default, best = timings[_SIDES.index(_DEFAULT)], min(timings, key=lambda timing: timing.median_s)
    return TUNED_BLOCKS.row(ratio(default, best), timings, best=best.name)


def _rows_of_blocks(size: Size) -> list[Row]:
    rows = size.num_tokens // _DEFAULT
    first = (torch.arange(rows) - _WINDOW_BLOCKS // 2).clamp(0, rows - _WINDOW_BLOCKS)
    columns = first[:, None] + torch.arange(_WINDOW_BLOCKS)
    drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    attentions: dict[str, Attention] = {
        "ascending, flash": block_rows(columns, block=_DEFAULT),
        "drawn order, flash": block_rows(columns, block=_DEFAULT, order=drawn),
        "ascending, matmuls": block_rows(columns, block=_DEFAULT, fused=False),
    }
    ascending, shuffled, separate = _compared(attentions, Problem.draw(size), size.repeats)
    return [
        BLOCK_ORDER.row(ratio(shuffled, ascending), (ascending, shuffled)),
        FUSED_KERNEL.row(ratio(separate, ascending), (ascending, separate)),
    ]


def _compared(attentions: dict[str, Attention], problem: Problem, repeats: int) -> tuple[Timing, ...]:
    """Timings of attentions that have been seen to compute the same."""
    q, k, v = problem.q, problem.k, problem.v
    with torch.no_grad():
        first, *others = (attention(q, k, v) for attention in attentions.values())
    for other in others:
        assert_close(other, first, rtol=1e-4, atol=1e-5)
    return interleave([forward_job(name, each, problem) for name, each in attentions.items()], repeats=repeats)


def _projections(tokens: int, width: int, repeats: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, width, generator=generator), torch.randn(3 * width, width, generator=generator)
    parts = [part.clone() for part in weight.chunk(3)]
    three, one = [linear(x, part) for part in parts], linear(x, weight)
    assert_close(torch.cat(three, dim=1), one, rtol=1e-4, atol=1e-3)
    jobs = (
        Job("three projections", lambda _: [linear(x, part) for part in parts]),
        Job("one projection", lambda _: linear(x, weight)),
    )
    timings = interleave(jobs, repeats=repeats)
    return FUSED_QKV.row(ratio(*timings), timings)


def _long(config: Length) -> Row:
    """How much faster than dense attention, timed on a slice, at a length where that is slow."""
    size, problem = config.size, Problem.draw(config.size)
    attention = partial(fd.attend, pattern=config.pattern())
    check_forward(attention, problem, config)
    ours = forward_job("flexdilated", attention, problem)
    timings = interleave((_dense_job(problem, size.num_tokens, config.rows), ours), repeats=size.repeats)
    return LONG.row(
        ratio(*timings) * size.num_tokens / config.rows,
        timings,
        rows=config.rows,
        ratio_of_pairs=config.ratio_of_pairs,
        whole_over_multiplied_slice=_whole_over_slice(config, problem),
        whole_tokens=config.check_tokens,
    )


def _dense_job(problem: Problem, num_tokens: int, rows: int) -> Job:
    """Some query rows over all keys, of the first tokens of the problem."""
    dense = dense_attention(causal=False)
    q, k, v = (x[:, :, :num_tokens] for x in (problem.q, problem.k, problem.v))

    def run(_: None) -> Tensor:
        with torch.no_grad():
            return dense(q[:, :, :rows], k, v)

    return Job(f"dense SDPA, {rows} of {num_tokens} rows", run)


def _whole_over_slice(config: Length, problem: Problem) -> float:
    tokens = config.check_tokens
    jobs = [_dense_job(problem, tokens, rows) for rows in (tokens, config.rows)]
    whole, some = interleave(jobs, repeats=config.size.repeats)
    return ratio(whole, some) * config.rows / tokens
