"""Attention of one pattern: its speed beside peers', its exactness, its growth with the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from ._checks import TOLERANCE, Contestant, by_definition, relative_error
from ._jobs import Job, Part, Problem, Size, interleave, peak_bytes, race, ratio, say, step_bytes, tokens_text
from ._measures import Row, at_least, at_most, measure
from ._rules import FORWARD_FLOPS, LONGNET_4, LONGNET_5, LibraryRule, LongNet, Union, dense
from .peers import branch_loop, dense_attention, natural_attention, natural_block_mask

_BOTH = (LONGNET_4, LONGNET_4.as_causal())
_SMALL = LongNet("LongNet-2", (64, 128), (1, 2))
_BOTH_SMALL = (_SMALL, _SMALL.as_causal())
_TINY = (Size(512, num_heads=4, repeats=1),)
_TRAIN: Part = "forward + backward"


def _ours(rule: Any, problem: Problem) -> Contestant:
    return Contestant("flexdilated", rule.attention(), problem, rule)


def _beside_dense(spec: LongNet, problem: Problem) -> tuple[Contestant, Contestant]:
    """Dense attention, and the library's on the same problem."""
    everything = dense(problem.q.shape[2], causal=spec.causal)
    return Contestant("dense SDPA", dense_attention(causal=spec.causal), problem, everything), _ours(spec, problem)


def _verified(contestants: Sequence[Contestant], part: Part) -> list[Job]:
    for each in contestants:
        each.check(part)
    return [each.job(part) for each in contestants]


def _flop_ratio(spec: LongNet, size: Size) -> float:
    """Pairs of dense attention over pairs of the spec."""
    sizes = {"num_tokens": size.num_tokens, "num_heads": size.num_heads}
    return dense(size.num_tokens, causal=spec.causal).pairs(**sizes) / spec.pairs(**sizes)


@measure("C1", spec=_SMALL, size=Size(512, num_heads=8, repeats=1))
def forward_vs_dense(spec: LongNet = LONGNET_4, size: Size = Size(16384, num_heads=8)) -> Iterator[Row]:
    """Does a LongNet forward do useful work at the rate of dense attention?"""
    jobs, over = _verified(_beside_dense(spec, Problem.draw(size)), "forward"), _flop_ratio(spec, size)
    what = f"{spec.label}, {size}, forward: useful-FLOP rate over dense SDPA's"
    row = race(what, at_least(0.95), jobs, repeats=size.repeats, over=over, flop_ratio=over)
    useful = spec.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads) * FORWARD_FLOPS * size.head_dim
    work = {"dense_gflop_per_s": over * useful, "useful_gflop_per_s": useful}
    rates = {name: flop / each.median_s / 1e9 for (name, flop), each in zip(work.items(), row.timings, strict=True)}
    yield replace(row, detail={**rates, **row.detail})


@measure("C3", specs=_BOTH_SMALL, sizes=_TINY)
def training_vs_dense(
    specs: tuple[LongNet, ...] = _BOTH,
    sizes: tuple[Size, ...] = (Size(16384, num_heads=4, repeats=3), Size(65536, num_heads=1, repeats=2)),
) -> Iterator[Row]:
    """Does a LongNet training step gain over dense attention what its smaller work promises?

    The speed-up over dense SDPA divided by the ratio of their useful FLOP; causal against causal.
    """
    for size, spec in product(sizes, specs):
        jobs, over = _verified(_beside_dense(spec, Problem.draw(size)), _TRAIN), _flop_ratio(spec, size)
        what = f"{spec.label}, {size}, forward + backward: speed-up over dense SDPA over FLOP ratio"
        target = at_least(0.80 if spec.causal else 0.92)
        yield race(what, target, jobs, repeats=size.repeats, over=over, flop_ratio=over)


_QUICK_S = 0.5e-3  # a call as short as this is no bottleneck, however fast dense attention is


@measure("C19", lengths=(64,), size=Size(64, num_heads=8, repeats=1), calls=1)
@torch.no_grad()
def short_sequences(
    lengths: tuple[int, ...] = (64, 256), size: Size = Size(256, num_heads=8, repeats=21), calls: int = 20
) -> Iterator[Row]:
    """Is an eager call over few tokens, whose plan is cached, about as quick as dense attention?

    Forward, against causal SDPA, or against a third of 0.5 ms where SDPA takes less. A run makes `calls` calls.
    """
    for num_tokens in lengths:
        short = replace(size, num_tokens=num_tokens)
        qkv = Problem.draw(short).qkv
        patterns = {
            "causal": masks.causal(),
            "window": masks.local_window(left=31, right=0),
            "LongNet-2": masks.longnet((32, 64), (1, 2)) & masks.causal(),
            "documents": masks.causal() & masks.documents(torch.arange(num_tokens) // 13),
        }
        ways: dict[str, Callable[..., Tensor]] = {"dense SDPA": dense_attention(causal=True)}
        for name, pattern in patterns.items():
            ways[name] = partial(fd.attend, pattern=pattern)
            assert relative_error(ways[name](*qkv), ways[name](*qkv, engine="reference")) <= TOLERANCE, name
        jobs = [Job(name, lambda _, way=way, qkv=qkv: [way(*qkv) for _ in range(calls)]) for name, way in ways.items()]
        theirs, *ours = interleave(jobs, repeats=size.repeats)
        for timing in ours:
            what = f"{timing.name}, {short}, forward: time over dense SDPA's, or over 0.17 ms if that is more"
            over = timing.median_s / max(theirs.median_s, _QUICK_S / 3 * calls)
            yield Row(what, at_most(3, "×"), over, (theirs, timing), {"calls_a_run": calls})


@measure("C4", specs=_BOTH_SMALL, sizes=_TINY)
def vs_branch_loop(
    specs: tuple[LongNet, ...] = _BOTH, sizes: tuple[Size, ...] = (Size(16384, num_heads=4), Size(65536, num_heads=1))
) -> Iterator[Row]:
    """How much faster is it than torchscale's way, a loop over branches, on the same kernels?

    Forward and backward. The loop leaves the branch weights out of its gradient.
    """
    for size, spec in product(sizes, specs):
        problem = Problem.draw(size)
        loop = Contestant("loop over branches", branch_loop(spec), problem, spec, constant_weights=True)
        what = f"{spec.label}, {size}, forward + backward: times as fast as a loop over branches"
        yield race(what, at_least(1.5, "×"), _verified((loop, _ours(spec, problem)), _TRAIN), repeats=size.repeats)


@measure(
    "C2",
    spec=_SMALL,
    size=Size(128, num_heads=2, head_dim=16, repeats=1),
    backend="eager",
)
def vs_flex_attention(
    spec: LongNet = LONGNET_4.shrunk(2), size: Size = Size(8192, num_heads=4, repeats=3), backend: str = "inductor"
) -> Iterator[Row]:
    """How much faster is it than compiled FlexAttention in natural token order?

    The same mixture (a score_mod there), and the union of its branches as a mask.
    """
    problem = Problem.draw(size)
    say("create_block_mask, and compiling FlexAttention")
    block_mask = natural_block_mask(spec, num_heads=size.num_heads, num_tokens=size.num_tokens)
    for name, rule, bound in (("mixture", spec, 30), ("union", Union(spec), 15)):
        natural = natural_attention(spec, block_mask, mixture=name == "mixture", backend=backend)
        jobs = _verified((Contestant("FlexAttention", natural, problem, rule), _ours(rule, problem)), "forward")
        what = f"{spec.label}, {size}, {name}, forward: times as fast as compiled FlexAttention in natural order"
        yield race(what, at_least(bound, "×"), jobs, repeats=size.repeats)


@measure("C9", specs=_BOTH_SMALL[:1], sizes=tuple(Size(tokens, num_heads=1, repeats=1) for tokens in (512, 1024)))
def linear_time(
    specs: tuple[LongNet, ...] = _BOTH,
    sizes: tuple[Size, ...] = tuple(Size(tokens, num_heads=1, repeats=3) for tokens in (16384, 65536, 262144)),
) -> Iterator[Row]:
    """Does the time of a token stay the same as the sequence grows?

    Forward and backward, of the longest sequence over the shortest's.
    """
    for spec in specs:
        contestants = [replace(_ours(spec, Problem.draw(size)), name=str(size)) for size in sizes]
        timings = interleave(_verified(contestants, _TRAIN), repeats=sizes[0].repeats)
        token_us = [timing.median_s / size.num_tokens * 1e6 for timing, size in zip(timings, sizes, strict=True)]
        what = f"{spec.label}, {sizes[0]} to {sizes[-1]}, forward + backward: growth of the time per token"
        detail = {"us_per_token": dict(zip(map(str, sizes), token_us, strict=True))}
        yield Row(what, at_most(1.15, "×"), token_us[-1] / token_us[0], timings, detail)


@measure(
    spec=LONGNET_4.shrunk(8),
    sizes=tuple(Size(tokens, num_heads=1, repeats=1) for tokens in (1024, 2048)),
    dense_tokens=1024,
)
def sweep(
    spec: LongNet = LONGNET_4,
    sizes: tuple[Size, ...] = tuple(
        Size(1024 * kilo, num_heads=1, repeats=2 if kilo > 16 else 5) for kilo in (4, 8, 16, 32, 64, 128, 256)
    ),
    dense_tokens: int = 65536,
) -> Iterator[Mapping[str, Any]]:
    """How do forward, backward and peak memory grow with the sequence?

    Measured points only; dense attention only up to `dense_tokens`, beyond it takes too long.
    """
    parts: tuple[Part, ...] = ("forward", "backward")
    makes = {"flexdilated": spec.attention, "dense SDPA": partial(dense_attention, causal=spec.causal)}
    for size in sizes:
        theirs, ours = _beside_dense(spec, Problem.draw(size))
        contestants = [ours, theirs] if size.num_tokens <= dense_tokens else [ours]
        peaks = {each.name: step_bytes(each.name, makes[each.name], size) for each in contestants}
        for each in contestants:
            each.check("backward")
        jobs = [replace(each, name=f"{each.name} {part}").job(part) for each in contestants for part in parts]
        timings = {timing.name: timing.to_data() for timing in interleave(jobs, repeats=size.repeats)}
        for name in peaks:
            point = {part: timings[f"{name} {part}"] for part in parts}
            yield {"attention": name, "num_tokens": size.num_tokens, **point, "peak_bytes": peaks[name]}


_NAMES = ("out", "lse", "dq", "dk", "dv")


@measure("C8", specs=_BOTH_SMALL, size=Size(256, num_heads=4, head_dim=16))
def accuracy(
    specs: tuple[LongNet, ...] = (LONGNET_4.shrunk(8), LONGNET_4.shrunk(8).as_causal()),
    size: Size = Size(2048, num_heads=2),
) -> Iterator[Row]:
    """Are output and gradients as exact as dense attention's own?

    Relative error against float64 over dense SDPA's own at the same size, the worst of all. The size must allow an
    N x N matrix in float64.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        detail = {}
        for spec in specs:
            # No dense kernel of PyTorch takes a gradient of lse; its plain gradient is the yardstick for both.
            theirs = _errors(_dense, dense(size.num_tokens, causal=spec.causal), size, dtype, through_lse=False)
            for through_lse in (False, True):
                ours = _errors(_library, spec, size, dtype, through_lse=through_lse)
                which = f"{spec.label}, gradient of {'out and lse' if through_lse else 'out'}"
                ratios = {name: ours[name] / theirs[name] for name in _NAMES}
                detail[which] = {**ratios, "errors": ours, "dense": theirs}
        worst = max(entry[name] for entry in detail.values() for name in _NAMES)
        what = f"{str(dtype).removeprefix('torch.')}, {size}: error of out, lse, dq, dk, dv over dense SDPA's"
        yield Row(what, at_most(2.0, "×"), worst, detail=detail)


def _errors(
    attention: Callable[..., tuple[Tensor, Tensor]], rule: LongNet, size: Size, dtype: torch.dtype, *, through_lse: bool
) -> dict[str, float]:
    """Relative errors by name, of inputs that are rounded to the dtype before either side sees them."""
    problem = Problem.draw(size)
    *rounded, grad = (x.to(dtype) for x in (*problem.qkv, problem.grad))
    lse_grad = problem.grad[..., 0]

    def with_gradients(
        found: tuple[Tensor, Tensor], leaves: list[Tensor], grads: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        count = 1 + through_lse
        return *found, *torch.autograd.grad(found[:count], leaves, grads[:count])

    leaves = [x.detach().requires_grad_() for x in rounded]
    got = with_gradients(attention(*leaves, rule), leaves, (grad, lse_grad))
    exact = [x[0].detach().double().requires_grad_() for x in rounded]
    found = by_definition(exact[0], exact[1], exact[2], rule, torch.arange(size.num_tokens))
    wanted = with_gradients(found, exact, (grad[0].double(), lse_grad[0].double()))
    return {name: relative_error(a[0], b) for name, a, b in zip(_NAMES, got, wanted, strict=True)}


def _library(q: Tensor, k: Tensor, v: Tensor, rule: LongNet) -> tuple[Tensor, Tensor]:
    return fd.attend(q, k, v, rule.pattern(), return_lse=True)


def _dense(q: Tensor, k: Tensor, v: Tensor, rule: LongNet) -> tuple[Tensor, Tensor]:
    """Dense attention with its lse, which the public function does not return."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, rule.causal)
    return out, lse


@measure(spec=LONGNET_5.shrunk(64), sizes=(Size(512, num_heads=2, repeats=1),), verified=Size(256, num_heads=2))
@torch.no_grad()
def received(
    spec: LongNet = LONGNET_5,
    sizes: tuple[Size, ...] = (Size(16384, num_heads=4), Size(65536, num_heads=4, repeats=3)),
    verified: Size = Size(2048, num_heads=2),
) -> Iterator[Row]:
    """What does it cost to ask how much attention each key got, beside the forward pass it follows?

    Time over that of a forward pass with lse, and peak memory over that pass's.
    """
    pattern = spec.pattern()
    error = _error_of_received(pattern, verified)
    assert error <= TOLERANCE, f"sums must be within {TOLERANCE} of dense float64 attention; they are off by {error}"
    names = {"forward": "forward", "received": "attention_received"}
    for size in sizes:
        works = {name: _received_or_forward(name, pattern, Problem.draw(size)) for name in names}
        works["received"]()
        jobs = [Job(names[name], lambda _, work=work: work()) for name, work in works.items()]
        timings = interleave(jobs, repeats=size.repeats)
        peaks = {name: peak_bytes(_prepared, name, pattern.text, size) for name in works}
        say(", ".join(f"{name}: peak {peak / 2**20:.0f} MiB" for name, peak in peaks.items()))
        what = f"{spec.label}, {size.num_heads} heads, {tokens_text(size.num_tokens)}: attention_received"
        detail = {"error": error, "peak_bytes": peaks, "matrix_bytes": 4 * size.num_heads * size.num_tokens**2}
        times, memory = ratio(timings[1], timings[0]), peaks["received"] / max(1, peaks["forward"])
        yield Row(f"{what}, time over a forward pass", at_most(3.5, "×"), times, timings, detail)
        yield Row(f"{what}, peak memory over a forward pass", at_most(6, "×"), memory, (), detail)


def _received_or_forward(name: str, pattern: masks.Pattern | masks.Mixture, problem: Problem) -> Callable[[], object]:
    """A forward pass with lse, or the sums from an lse that is there."""
    q, k, v = problem.qkv
    if name == "forward":
        return lambda: fd.attend(q, k, v, pattern, return_lse=True)
    lse = torch.full(q.shape[:3], 8.0)
    return lambda: fd.attention_received(q, k, lse, pattern)


def _prepared(name: str, text: str, size: Size) -> Callable[[], object]:
    """The work whose memory is measured, after one run of it at a small size."""
    pattern = masks.from_json(text)
    _received_or_forward(name, pattern, Problem.draw(replace(size, num_tokens=256)))()
    return _received_or_forward(name, pattern, Problem.draw(size))


def _error_of_received(pattern: masks.Mixture | masks.Pattern, size: Size) -> float:
    """The largest difference of the sums from those of dense attention in float64, over the largest sum."""
    problem = Problem.draw(size)
    _, lse = fd.attend(*problem.qkv, pattern, return_lse=True)
    found = fd.attention_received(problem.q, problem.k, lse, pattern)[0].double()
    rows, sizes = torch.arange(size.num_tokens), {"num_tokens": size.num_tokens, "num_heads": size.num_heads}
    times = torch.stack(LibraryRule(pattern).masks(rows, **sizes)).sum(0).double()
    scores = problem.q[0].double() @ problem.k[0].double().mT / size.head_dim**0.5
    wanted = (scores + times.log()).softmax(-1).nan_to_num(0.0).sum(-2)
    return float((found - wanted).abs().max() / wanted.max())
