"""The rows of whole calls on the device: rates, memory, peers, a million tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from .._jobs import Attention, Job, Size, say, step_bytes, train
from .._machine import driver_and_clocks
from .._measures import Gap, Row, Target, at_least, at_most
from .._rules import FORWARD_FLOPS, LONGNET_5, Contestant, LongNet, Part, Window, dense
from ..peers import branch_loop, cpu_flash, cuda_flash, dense_attention
from ._device import (
    BOTH,
    FORWARD,
    LARGE,
    TINY,
    TINY_SIZE,
    TRAINING,
    Comparison,
    Way,
    Where,
    compare,
    dense_flex,
    device_row,
    inference,
    natural,
    sdpa,
    ways,
)

_BACKWARD_OVER_FORWARD = 2.5  # five products a pair instead of two
_TINY_BOTH = (TINY, TINY.as_causal())


def _in_each_way(
    name: str,
    target: Target,
    specs: tuple[LongNet, ...],
    where: Where,
    measured: Callable[[str, LongNet, Way], Row | Gap],
) -> Iterator[Row | Gap]:
    """What is measured of each LongNet in each way, or a gap where the way is not there."""
    for spec in specs:
        for way in ways(where):
            what = name.format(spec=spec.label, way=way.name)
            yield Gap(what, target, way.missing) if way.missing else measured(what, spec, way)


def _flops(spec: LongNet, size: Size, part: Part) -> float:
    """Useful floating point operations."""
    factor = {"forward": 1.0, "backward": _BACKWARD_OVER_FORWARD, "forward + backward": 1 + _BACKWARD_OVER_FORWARD}
    return (
        spec.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads) * FORWARD_FLOPS * size.head_dim * factor[part]
    )


# Each dense peer is compiled: one is enough to see that it runs.
@device_row(
    "G1", at_least(0.90), at_least(0.80), full={"specs": BOTH, "size": LARGE},
    small={"specs": (TINY,), "size": TINY_SIZE}, needs=FORWARD, limit_s=90, rehearsed=True,
)  # fmt: skip
def gpu_forward(where: Where, specs: tuple[LongNet, ...], size: Size) -> Iterator[Row | Gap]:
    """Does a LongNet forward do useful work at the rate of dense FlexAttention on the same kernels?

    Useful-FLOP rate over dense FlexAttention's; causal against causal.
    """
    return _rates(where, specs, size, "forward", {False: at_least(0.90), True: at_least(0.80)})


@device_row(
    "G2", at_least(0.85), at_least(0.75), full={"specs": BOTH, "size": LARGE},
    small={"specs": _TINY_BOTH, "size": TINY_SIZE}, needs=TRAINING, limit_s=120, rehearsed=True,
)  # fmt: skip
def gpu_backward(where: Where, specs: tuple[LongNet, ...], size: Size) -> Iterator[Row | Gap]:
    """Does a LongNet backward do useful work at the rate of dense FlexAttention's on the same kernels?"""
    return _rates(where, specs, size, "backward", {False: at_least(0.85), True: at_least(0.75)})


def _rates(
    where: Where, specs: tuple[LongNet, ...], size: Size, part: Part, targets: dict[bool, Target]
) -> Iterator[Row | Gap]:
    for spec in specs:
        everything, target = dense(size.num_tokens, causal=spec.causal), targets[spec.causal]
        for way in ways(where):
            peer, theirs = dense_flex(everything, way, where, training=part != "forward")
            what = f"{spec.label}, {size}, {part}, {way.name}: useful-FLOP rate over {peer}'s"
            if way.missing:
                yield Gap(what, target, way.missing)
                continue
            problem = where.draw(size)
            ours = Contestant("flexdilated", way.attention(spec.pattern()), problem, spec)
            contestants = [Contestant(peer, theirs, problem, everything), ours]
            found = compare(contestants, where, part=part, repeats=size.repeats)
            if reason := found.missing("flexdilated", peer):
                yield Gap(what, target, reason)
                continue
            work = {peer: _flops(everything, size, part), "flexdilated": _flops(spec, size, part)}
            rates = {name: work[name] / found.median_s(name) / 1e12 for name in work}
            detail = {
                "dense_tflop_per_s": rates[peer],
                "useful_tflop_per_s": rates["flexdilated"],
                "flop_ratio": work[peer] / work["flexdilated"],
            }
            yield found.row(what, target, rates["flexdilated"] / rates[peer], detail)


@device_row(
    "G3", at_least(0.70), at_least(0.55), full={"spec": LONGNET_5, "size": LARGE, "side": 8192},
    small={"spec": TINY, "size": TINY_SIZE, "side": 256}, needs=TRAINING, limit_s=60,
)  # fmt: skip
def gpu_vs_matmul(where: Where, spec: LongNet, size: Size, side: int) -> Iterator[Row | Gap]:
    """How near to the device's own matrix product does a LongNet come, in useful work a second?

    Useful-FLOP rate over that of a bfloat16 product of square matrices of this side, in the fastest way there is.
    """
    parts: dict[Part, Target] = {"forward": at_least(0.70), "backward": at_least(0.55)}
    for part, target in parts.items():
        what = f"{spec.label}, {size}, {part}, best way: useful-FLOP rate over a matrix product's"
        able = [way.name for way in ways(where) if way.missing is None]
        problem, pattern = where.draw(size), spec.pattern()
        contestants = [
            Contestant(way.name, way.attention(pattern), problem, spec) for way in ways(where) if way.name in able
        ]
        a, b = (torch.randn(side, side, dtype=where.dtype, device=where.device) for _ in range(2))
        product = Job("matrix product", lambda _, a=a, b=b: a @ b)
        found = compare(contestants, where, part=part, repeats=size.repeats, extra=[product])
        work = _flops(spec, size, part)
        rates = {name: work / found.median_s(name) / 1e12 for name in able if name in found.timings}
        reason = found.missing("matrix product") or (None if rates else found.missing(*able))
        if reason:
            yield Gap(what, target, reason)
            continue
        best = max(rates, key=lambda name: rates[name])
        matmul_rate = 2 * side**3 / found.median_s("matrix product") / 1e12
        detail = {
            # Read while the device is still warm from the runs.
            "clocks": driver_and_clocks() if where.is_cuda else {},
            "matmul_tflop_per_s": matmul_rate,
            "useful_tflop_per_s": rates,
            "best": best,
            "failed": found.failed,
        }
        row = found.row(what, target, rates[best] / matmul_rate, detail)
        # A check that another way failed says nothing about the best one.
        yield replace(row, not_verified=tuple(text for text in found.objections if text.startswith(f"{best}: ")))


# 2048 keys either way: block-aligned, the lists hold whole blocks only; by token, two a row are cut.
ALIGNED = Window("window of 2048, block-aligned", 8, 7, 128, 0.85)
CUT = Window("window of 2048, masked edges", 1024, 1023, 1, 0.65)
_KERNELS = {"cuDNN SDPA": "CUDNN_ATTENTION", "flash SDPA": "FLASH_ATTENTION"}


@device_row(
    "G4", at_least(ALIGNED.bound), at_least(CUT.bound),
    full={"windows": (ALIGNED, CUT), "size": Size(32 * 1024, num_heads=16, head_dim=128, repeats=9)},
    small={
        "windows": (replace(ALIGNED, left=1, right=0), replace(CUT, left=128, right=127)),
        "size": Size(1024, num_heads=2, head_dim=16, repeats=1),
    },
    needs=("set forward",), limit_s=45, rehearsed=True,
)  # fmt: skip
def gpu_window(where: Where, windows: tuple[Window, ...], size: Size) -> Iterator[Row | Gap]:
    """Does a local window gain over dense attention's best kernel what its smaller work promises?

    Forward; speed-up over the faster of the dense kernels, divided by the ratio of the FLOP.
    """
    for window in windows:
        way, target = inference(where), at_least(window.bound)
        what = f"{window.name}, {size}, forward, {way.name}: speed-up over dense SDPA over FLOP ratio"
        problem, everything = where.draw(size), dense(size.num_tokens, causal=False)
        peers = [name for name in _KERNELS if where.is_cuda or "cuDNN" not in name]
        contestants = [Contestant(each, sdpa(_KERNELS[each], causal=False), problem, everything) for each in peers]
        contestants.append(Contestant("flexdilated", way.attention(window.pattern()), problem, window))
        found = compare(contestants, where, part="forward", repeats=size.repeats)
        timed = [name for name in peers if name in found.timings]
        if (reason := found.missing("flexdilated")) or not timed:
            yield Gap(what, target, reason or found.missing(*peers) or "no dense kernel runs here")
            continue
        fastest = min(timed, key=found.median_s)
        pairs = [each.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads) for each in (everything, window)]
        speed_up, flop_ratio = found.median_s(fastest) / found.median_s("flexdilated"), pairs[0] / pairs[1]
        detail = {"fastest_dense": fastest, "speed_up": speed_up, "flop_ratio": flop_ratio, "failed": found.failed}
        yield found.row(what, target, speed_up / flop_ratio, detail)


@dataclass(frozen=True)
class Branch:
    """One dilated branch, and how many times as fast it must be."""

    length: int
    rate: int
    bound: float

    @property
    def spec(self) -> LongNet:
        return LongNet(f"segments of {self.length}, rate {self.rate}", (self.length,), (self.rate,))


_NATURAL = "FlexAttention in natural order"


# Both sides are compiled: one branch is enough to see that they run.
@device_row(
    "G6", at_least(3, "×"), at_least(10, "×"),
    full={"branches": (Branch(8192, 4, 3), Branch(32768, 16, 10)), "size": LARGE},
    small={"branches": (Branch(512, 4, 3),), "size": TINY_SIZE}, needs=FORWARD, limit_s=60, rehearsed=True,
)  # fmt: skip
def gpu_vs_natural_order(where: Where, branches: tuple[Branch, ...], size: Size) -> Iterator[Row | Gap]:
    """What does a dilated branch gain over the same mask in the order of the tokens?

    Forward; the same BlockMask lists as create_block_mask's, in both.
    """
    for branch in branches:
        way, spec, target = inference(where), branch.spec, at_least(branch.bound, "×")
        problem, (pattern,) = where.draw(size), spec.pattern().branches()
        ours = Contestant("flexdilated", way.attention(pattern), problem, spec)
        theirs = Contestant(_NATURAL, natural(pattern), problem, spec)
        found = compare([theirs, ours], where, part="forward", repeats=size.repeats)
        what = f"{spec.label}, {size}, forward, {way.name}: times as fast as {_NATURAL}"
        yield _times_as_fast(what, target, found, _NATURAL)


def _times_as_fast(what: str, target: Target, found: Comparison, peer: str) -> Row | Gap:
    if reason := found.missing(peer, "flexdilated"):
        return Gap(what, target, reason)
    return found.row(what, target, found.median_s(peer) / found.median_s("flexdilated"), {})


@device_row(
    "G7", at_least(1.5, "×"), full={"specs": BOTH, "size": LARGE},
    small={"specs": _TINY_BOTH, "size": TINY_SIZE}, needs=TRAINING, limit_s=90,
)  # fmt: skip
def gpu_vs_branch_loop(where: Where, specs: tuple[LongNet, ...], size: Size) -> Iterator[Row | Gap]:
    """How much faster is the library than a loop over branches on flash SDPA, as torchscale runs it?

    Forward and backward. The loop leaves the branch weights out of its gradient.
    """
    peer, target = "loop over branches", at_least(1.5, "×")
    name = f"{{spec}}, {size}, forward + backward, {{way}}: times as fast as a {peer}"

    def race(what: str, spec: LongNet, way: Way) -> Row | Gap:
        problem, loop = where.draw(size), branch_loop(spec, cuda_flash if where.is_cuda else cpu_flash)
        theirs = Contestant(peer, loop, problem, spec, constant_weights=True)
        ours = Contestant("flexdilated", way.attention(spec.pattern()), problem, spec)
        found = compare([theirs, ours], where, part="forward + backward", repeats=size.repeats)
        return _times_as_fast(what, target, found, peer)

    return _in_each_way(name, target, specs, where, race)


# In the dry run large enough to show in the resident memory of a process.
@device_row(
    "G9", at_most(1.3, "×"), full={"specs": BOTH, "size": LARGE},
    small={"specs": (TINY,), "size": Size(8192, num_heads=2, head_dim=32, repeats=1)}, needs=TRAINING, limit_s=60,
)  # fmt: skip
def gpu_memory(where: Where, specs: tuple[LongNet, ...], size: Size) -> Iterator[Row | Gap]:
    """Does a LongNet training step on the device fit where dense flash attention's does?

    Peak memory of forward and backward, inputs and gradients included, over dense flash SDPA's.
    """
    target = at_most(1.3, "×")
    name = f"{{spec}}, {size}, forward + backward, {{way}}: peak memory over dense flash SDPA's"

    def peaks(what: str, spec: LongNet, way: Way) -> Row | Gap:
        try:
            if where.is_cuda:
                ours = _peak_bytes(way.attention(spec.pattern()), size, where)
                theirs = _peak_bytes(sdpa("FLASH_ATTENTION", causal=spec.causal), size, where)
            else:
                # The resident memory of processes of their own, in float32.
                ours = step_bytes("flexdilated", spec.attention, size)
                theirs = step_bytes("dense SDPA", partial(dense_attention, causal=spec.causal), size)
        except (RuntimeError, ValueError) as error:
            return Gap(what, target, f"{type(error).__name__}: {error}")
        if ours <= 0 or theirs <= 0:
            return Gap(what, target, "too small: the step shows no memory of its own")
        return Row(what, target, ours / theirs, detail={"peak_bytes": ours, "dense_peak_bytes": theirs})

    return _in_each_way(name, target, specs, where, peaks)


def _peak_bytes(attention: Attention, size: Size, where: Where) -> int:
    """Most bytes allocated at once in a step, after one that compiled what it needs."""
    problem = where.draw(size)
    for name in ("first call", "peak"):
        where.tidy()
        torch.cuda.reset_peak_memory_stats()
        train(attention, problem)
        where.wait()
        say(f"{name}: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")
    return torch.cuda.max_memory_allocated()


@device_row(
    "G10", at_most(1.15, "×"),
    full={
        "spec": LONGNET_5,
        "short": Size(128 * 1024, num_heads=8, head_dim=128, repeats=3),
        "long": Size(1024 * 1024, num_heads=8, head_dim=128, repeats=3),
    },
    small={"spec": TINY, "short": TINY_SIZE, "long": replace(TINY_SIZE, num_tokens=4096)},
    needs=TRAINING, limit_s=150,
)  # fmt: skip
def gpu_million_tokens(where: Where, spec: LongNet, short: Size, long: Size) -> Iterator[Row | Gap]:
    """Does a LongNet training step complete at a million tokens, at the same time a token?

    Forward and backward; time a token at the greater size over the smaller, in the first way that can.
    """
    target = at_most(1.15, "×")
    name = f"{{spec}}, {short} → {long}, forward + backward, {{way}}: time a token"

    def growth(what: str, spec: LongNet, way: Way) -> Row | Gap:
        attention = way.attention(spec.pattern())
        # The definition's own float64 tensors would not fit beside the step at a million tokens.
        contestants = [
            Contestant(str(short), attention, where.draw(short), spec),
            Contestant(str(long), attention, where.draw(long), None),
        ]
        found = compare(contestants, where, part="forward + backward", repeats=long.repeats)
        if reason := found.missing(str(short), str(long)):
            return Gap(what, target, reason)
        micros = {str(size): 1e6 * found.median_s(str(size)) / size.num_tokens for size in (short, long)}
        detail = {"us_a_token": micros, "checked_at": str(short)}
        return found.row(what, target, micros[str(long)] / micros[str(short)], detail)

    for row in _in_each_way(name, target, (spec,), where, growth):
        yield row
        if isinstance(row, Row):
            return
