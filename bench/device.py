"""The device suite: odd cases against float64 first, then how fast, row by row, beside the device's own ceilings.

Each case and each row has a process of its own, as an error on the device poisons the one that met it, and a limit of
time. While the cases run, rows are rehearsed beside them, so that what they compile lies on disk when they are timed.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import flash_cannot

from ._catalogue import ENTRIES, PICTURED
from ._checks import HALF_TOLERANCE, Comparison, Contestant, check_call, compare
from ._jobs import Attention, Job, Part, Problem, Size, peak_here, say, train
from ._machine import conditions, driver_and_clocks
from ._measures import Gap, Row, Target, at_least, at_most
from ._processes import DiedApart, TookTooLong, each_apart, run_apart
from ._rank_steps import InTurn
from ._rules import FORWARD_FLOPS, LONGNET_5, LongNet, Window, dense
from .peers import branch_loop, cpu_flash, cuda_flash, dense_attention, flex_in_order, on_kernel
from .roofline import beside_attention

Document = dict[str, Any]
Found = Iterator[Row | Gap]

K = 1024
HEAD_DIM = 128
OURS = "flexdilated"


@dataclass(frozen=True)
class Device:
    """Where the suite runs. `rehearsing`: to compile what will be measured; nothing is checked or timed in earnest."""

    name: str
    small: bool = False
    rehearsing: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that train here, the default first; "flash" only if device and packages serve it."""
        if not self.is_cuda:
            return ("aten",)
        cannot = flash_cannot(torch.device(self.name), torch.bfloat16, HEAD_DIM)
        return ("flex", "aten") if cannot else ("flex", "flash", "aten")

    def size(self, num_tokens: int, num_heads: int = 16, repeats: int = 5) -> Size:
        if self.small:
            return Size(max(512, num_tokens // 512), num_heads=4, head_dim=16, repeats=1)
        return Size(num_tokens, num_heads, head_dim=HEAD_DIM, repeats=1 if self.rehearsing else repeats)

    def longnet(self, causal: bool) -> LongNet:
        spec = LONGNET_5.shrunk(64) if self.small else LONGNET_5
        return spec.as_causal() if causal else spec

    def draw(self, size: Size) -> Problem:
        return Problem.draw(size, device=self.name, dtype=torch.bfloat16)

    def race(self, part: Part, size: Size, contestants: Sequence[Contestant], jobs: Sequence[Job] = ()) -> Comparison:
        tolerance = None if self.rehearsing else HALF_TOLERANCE
        return compare(contestants, part, repeats=size.repeats, jobs=jobs, tolerance=tolerance, on_cuda=self.is_cuda)


# Correctness: each case is one or more calls in one process, held against the dense definition in float64.

_NONE_WRONG = at_most(0)


def _call(pattern: masks.Pattern | masks.Mixture, tokens: int, dtype: torch.dtype = torch.bfloat16, **more: Any):
    return partial(check_call, pattern=pattern, tokens=tokens, dtype=dtype, **more)


def _alibi(at: str) -> dict[str, Any]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=at)
    return {"score_mod": lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()}


def _bound(name: str, values: Tensor) -> Callable[[str], dict[str, Any]]:
    return lambda device: {"bindings": {name: values.to(device)}}


@cache
def cases() -> Mapping[str, tuple[partial[None], ...]]:
    """The odd ones, those first that are most likely to go wrong on a device, and every pattern of the catalogue."""
    exact, causal_rule = torch.float32, masks.causal()
    window, narrow = masks.local_window(left=100, right=37), masks.local_window(left=9, right=0)
    longnet = masks.longnet(segment_lengths=(64, 256), dilation_rates=(1, 4))
    uneven = masks.longnet(segment_lengths=(100, 333), dilation_rates=(3, 7))
    causal = longnet & causal_rule
    both_kinds = (masks.local_window(left=300, right=300) | masks.global_tokens(130)) & causal_rule
    padded, anew = longnet & masks.lengths("lengths"), causal.per_document("ids")
    chosen, blocks = masks.selected_blocks("chosen", block=(128, 256), most=2), torch.tensor([[0, -1], [0, 1], [1, -1]])
    chosen, blocks = chosen & causal_rule, blocks.repeat_interleave(2, 0)[None, :5]
    packed = [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in ((1, 150, 249), (300, 100))]
    odd = {
        "blocks larger than tiles, whole tiles": _call(causal_rule, 640, given=lambda _: {"block_size": 256}),
        "selected blocks": _call(chosen, 640, given=_bound("chosen", blocks)),
        "window, odd length": _call(window, 400, exact),
        "causal, head dim 128": _call(causal_rule, 300, head_dim=128),
        "blocks of tokens": _call(masks.blockwise(masks.local_window(left=2, right=1), 128), 640),
        "union, partial and full lists of unlike width": _call(both_kinds, 800, exact),
        "no pair at all": _call(masks.dilated(4, 8, 5), 130, heads=2),
        "empty rows, rate not dividing segment": _call(masks.dilated(100, 7, 3), 615, exact, head_dim=48),
        "mixture, causal, head dim 128": _call(causal, 300, head_dim=128),
        "mixture, rates not dividing segments": _call(uneven, 500, exact, heads=5),
        "mixture, head dim 48": _call(longnet, 300, head_dim=48),
        "gradient through lse": _call(longnet, 300, exact, how="through lse"),
        "mixture, grouped keys": _call(causal, 390, heads=8, kv_heads=2),
        "later queries, more keys": _call(
            causal, 300, exact, keys=944, given=lambda _: {"q_offset": 900, "k_offset": 256}
        ),
        "already in the layout": _call(causal, 384, how="layout"),
        "tokens outermost in memory": _call(causal, 300, how="transposed"),
        "in one compiled graph": _call(causal, 300, how="compiled"),
        "sinks": _call(causal, 300, given=lambda at: {"sinks": torch.tensor([0.0, 1.5, -2.0, 4.0], device=at)}),
        "score_mod": _call(window, 300, exact, given=_alibi),
        "lengths of a batch": _call(padded, 400, batch=2, given=_bound("lengths", torch.tensor([233, 400]))),
    }
    for entry in ENTRIES:
        tokens = PICTURED if "neighborhood" in entry.name else 500
        odd[f"catalogue: {entry.name}"] = _call(entry.pictured(tokens), tokens, heads=entry.num_heads)
    return {name: (call,) for name, call in odd.items()} | {
        "one token": (_call(window, 1), _call(causal, 1)),
        "other parameters, same code": (_call(window, 400, exact), _call(narrow, 400, exact)),
        "other lengths, same pattern": tuple(_call(causal, tokens, exact) for tokens in (640, 300, 515)),
        "documents, and others": tuple(_call(anew, 400, given=_bound("ids", ids)) for ids in packed),
    }


def judged(name: str, at: Device) -> tuple[str, ...]:
    """Engines that run a case, the default first. "aten" runs only plain calls if it is not the default."""
    default, *others = at.engines
    if not any(call.keywords.keys() & {"how", "given"} for call in cases()[name]):
        return at.engines
    # On CPU what trains takes no score_mod.
    default = "reference" if name == "score_mod" and not at.is_cuda else default
    return (default, *(engine for engine in others if engine != "aten"))


def judge(name: str, at: Device, engine: str) -> Iterator[Document]:
    """Yield the failure of a case in an engine, if any; engines other than the default may refuse by ValueError."""
    try:
        for call in cases()[name]:
            call(engine, at.name)
    except Exception as error:
        if engine == judged(name, at)[0] or not isinstance(error, ValueError):
            yield _gap(f"{name}, {engine}", f"{type(error).__name__}: {error}")


# The rows: each function measures one line of the table below, engine by engine where several can.


def _ours(engine: str, spec: LongNet | Window, problem: Problem, name: str = OURS) -> Contestant:
    return Contestant(name, partial(fd.attend, pattern=spec.pattern(), engine=engine), problem, spec)


def _flops(spec: LongNet | Window, size: Size, part: Part) -> float:
    """Useful ones: a backward has five products a pair instead of two."""
    pairs = spec.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads)
    return pairs * FORWARD_FLOPS * size.head_dim * (1.0 if part == "forward" else 2.5)


def rates(at: Device, target: Target, part: Part, causal: bool) -> Found:
    spec, size = at.longnet(causal), at.size(128 * K)
    everything = dense(size.num_tokens, causal=causal)
    for engine in at.engines:
        problem, flash = at.draw(size), engine == "flash"
        if engine == "aten":
            peer, theirs = "dense SDPA", dense_attention(causal=causal)
        else:
            peer = f"dense FlexAttention{', FLASH' if flash else ''}"
            theirs = flex_in_order(masks.causal() if causal else None, flash=flash)
        found = at.race(part, size, [Contestant(peer, theirs, problem, everything), _ours(engine, spec, problem)])
        work = {peer: _flops(everything, size, part), OURS: _flops(spec, size, part)}
        what = f"{spec.label}, {size}, {part}, {engine}: useful-FLOP rate over {peer}'s"
        yield found.row(what, target, OURS, peer, work)


def vs_matmul(at: Device, target: Target, part: Part) -> Found:
    spec, size, side = at.longnet(False), at.size(128 * K), 256 if at.small else 8192
    problem, (a, b) = at.draw(size), torch.randn(2, side, side, device=at.name).bfloat16()
    engines = [_ours(engine, spec, problem, engine) for engine in at.engines]
    found = at.race(part, size, engines, [Job("matrix product", lambda _: a @ b)])
    best = min(at.engines, key=found.median_s)
    work = {"matrix product": 2.0 * side**3, best: _flops(spec, size, part)}
    what = f"{spec.label}, {size}, {part}, fastest engine: useful-FLOP rate over a matrix product's"
    # The clocks are read while the device is still warm from the runs.
    yield found.row(what, target, best, "matrix product", work, clocks=driver_and_clocks() if at.is_cuda else {})


def window(at: Device, target: Target, name: str, left: int, right: int, block: int) -> Found:
    shrink, size = 8 if at.small else 1, at.size(32 * K, repeats=9)
    own, everything = Window(name, left // shrink, right // shrink, block), dense(size.num_tokens, causal=False)
    kernels = {"flash SDPA": SDPBackend.FLASH_ATTENTION}
    if at.is_cuda:
        kernels["cuDNN SDPA"] = SDPBackend.CUDNN_ATTENTION
    problem, engines = at.draw(size), [each for each in at.engines if each == at.engines[0] or each != "aten"]
    peers = [Contestant(peer, on_kernel(kernel, causal=False), problem, everything) for peer, kernel in kernels.items()]
    found = at.race("forward", size, [*peers, *(_ours(engine, own, problem, engine) for engine in engines)])
    fastest = min(kernels, key=found.median_s)
    for engine in engines:
        work = {engine: _flops(own, size, "forward"), fastest: _flops(everything, size, "forward")}
        what = f"{name}, {size}, forward, {engine}: useful-FLOP rate over the fastest dense SDPA's"
        yield found.row(what, target, engine, fastest, work)


def gathers_and_merge(at: Device, *targets: Target) -> Found:
    """The flex engine's steps without its attention, each by itself, beside the whole and beside a copy."""
    spec, size = at.longnet(False), at.size(128 * K)
    problem = at.draw(size)
    jobs, gathered = beside_attention(spec, problem)
    source, copied = torch.zeros(2, 1 << (24 if at.small else 30), dtype=torch.uint8, device=at.name)
    copy = Job("copy", lambda _: copied.copy_(source))
    found = at.race("forward", size, [_ours(at.engines[0], spec, problem)], [*jobs, copy])
    moved = {"gathers": 2.0 * gathered, "copy": 2.0 * source.nbytes}
    what, share = f"{spec.label}, {size}, forward", "share of the time"
    yield found.row(f"{what}: gathers' {share}", targets[0], OURS, "gathers", scale=100)
    yield found.row(f"{what}: gathers' share of copy bandwidth", targets[1], "gathers", "copy", moved, scale=100)
    yield found.row(f"{what}: merge's {share}", targets[2], OURS, "merges", scale=100)


def vs_natural_order(at: Device, target: Target, length: int, rate: int) -> Found:
    spec = LongNet(f"segments of {length}, rate {rate}", (length // (16 if at.small else 1),), (rate,))
    size, peer, engine = at.size(128 * K), "FlexAttention in natural order", at.engines[0]
    problem, (pattern,) = at.draw(size), spec.pattern().branches()
    contestants = [Contestant(peer, flex_in_order(pattern), problem, spec), _ours(engine, spec, problem)]
    what = f"{spec.label}, {size}, forward, {engine}: times as fast as {peer}"
    yield at.race("forward", size, contestants).row(what, target, OURS, peer)


def vs_branch_loop(at: Device, target: Target, causal: bool) -> Found:
    spec, size, peer = at.longnet(causal), at.size(128 * K), "loop over branches"
    for engine in at.engines:
        problem, loop = at.draw(size), branch_loop(spec, cuda_flash if at.is_cuda else cpu_flash)
        theirs = Contestant(peer, loop, problem, spec, constant_weights=True)
        found = at.race("forward + backward", size, [theirs, _ours(engine, spec, problem)])
        what = f"{spec.label}, {size}, forward + backward, {engine}: times as fast as a {peer}"
        yield found.row(what, target, OURS, peer)


def memory(at: Device, target: Target, causal: bool) -> Found:
    spec, size = at.longnet(causal), at.size(128 * K)

    def peak(attention: Attention) -> int:
        """Bytes of a step, inputs and gradients included, after one that has compiled what it needs."""
        train(attention, at.draw(size))
        if not at.is_cuda:
            return max(1, peak_here(lambda: train(attention, at.draw(size))))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(attention, at.draw(size))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    theirs = peak(on_kernel(SDPBackend.FLASH_ATTENTION, causal=causal))
    for engine in at.engines:
        ours = peak(partial(fd.attend, pattern=spec.pattern(), engine=engine))
        what = f"{spec.label}, {size}, forward + backward, {engine}: peak memory over dense flash SDPA's"
        yield Row(what, target, ours / theirs, detail={"peak_bytes": ours, "dense_peak_bytes": theirs})


def million_tokens(at: Device, target: Target) -> Found:
    """The longer is not checked: the definition's own tensors in float64 would not fit beside it."""
    # Any second length compiles what a million tokens run; a rehearsal leaves the memory to others.
    lengths = (128 * K, 256 * K if at.rehearsing else K * K)
    spec, sizes = at.longnet(False), [at.size(tokens, num_heads=8, repeats=3) for tokens in lengths]
    short, long = map(str, sizes)
    for engine in at.engines:
        own = [_ours(engine, spec, at.draw(size), str(size)) for size in sizes]
        found = at.race("forward + backward", sizes[0], [own[0], replace(own[1], rule=None)])
        what = f"{spec.label}, {short} → {long}, forward + backward, {engine}: growth of the time a token"
        yield found.row(what, target, short, long, {str(size): float(size.num_tokens) for size in sizes})


def ranks(at: Device, target: Target, what: str) -> Found:
    spec, size = at.longnet(False), at.size(128 * K, repeats=3)
    problem, part = at.draw(size), "forward" if what == "forward" else "backward"
    many, one = InTurn(spec, problem, 2 if at.small else 8), Contestant("one call", spec.attention(), problem, spec)
    found = at.race(part, size, [one], [many.job(what)])
    row = found.row(f"{spec.label}, {size}, {what}: time of ranks in turn over one call's", target, "one call", "ranks")
    if isinstance(row, Row) and not at.rehearsing and (off := many.error(what)) > HALF_TOLERANCE:
        row = replace(row, not_verified=(*row.not_verified, f"ranks are off by {off:.2e}"))
    yield row


@dataclass(frozen=True)
class DeviceRow:
    """A name of the suite. `lines` are targets, each with the rest of what `measure` takes.

    `code` is the name that it had before, `limit_s` what it may take. `rehearsed`: it compiles what no other does.
    """

    name: str
    code: str
    limit_s: float
    measure: Callable[..., Found]
    lines: tuple[tuple[Any, ...], ...]
    question: str
    rehearsed: bool = True


_WINDOWS = ("window of 2048, block-aligned", 8, 7, 128), ("window of 2048, masked edges", 1024, 1023, 1)
_LEAST_S = 5.0  # with less left, a process is not begun
ROWS = (
    DeviceRow("gpu_forward", "G1", 90, rates, ((at_least(0.90), "forward", False), (at_least(0.80), "forward", True)),
        "Does a LongNet forward do useful work at the rate of dense attention, on the same kernels?"),
    DeviceRow("gpu_backward", "G2", 120, rates,
        ((at_least(0.85), "backward", False), (at_least(0.75), "backward", True)),
        "Does a LongNet backward do useful work at the rate of dense attention's?"),
    DeviceRow("gpu_vs_matmul", "G3", 60, vs_matmul, ((at_least(0.70), "forward"), (at_least(0.55), "backward")),
        "How near to the device's own matrix product does a LongNet come, in useful work a second?", False),
    DeviceRow("gpu_vs_branch_loop", "G7", 90, vs_branch_loop,
        ((at_least(1.5, "×"), False), (at_least(1.5, "×"), True)),
        "How much faster is the library than a loop over branches on flash SDPA, as torchscale runs it?", False),
    DeviceRow("gpu_window", "G4", 45, window, ((at_least(0.85), *_WINDOWS[0]), (at_least(0.65), *_WINDOWS[1])),
        "Does a local window do useful work at the rate of dense attention's best kernel?"),
    DeviceRow("gpu_gathers_and_merge", "G5", 45, gathers_and_merge,
        ((at_most(8, "%"), at_least(80, "%"), at_most(5, "%")),),
        "What share of a LongNet forward are gathers and merge, and do gathers run at the rate of a copy?", False),
    DeviceRow("gpu_vs_natural_order", "G6", 60, vs_natural_order,
        ((at_least(3, "×"), 8192, 4), (at_least(10, "×"), 32768, 16)),
        "What does a dilated branch gain over the same mask in the order of the tokens?"),
    DeviceRow("gpu_memory", "G9", 60, memory, ((at_most(1.3, "×"), False), (at_most(1.3, "×"), True)),
        "Does a LongNet training step on the device fit where dense flash attention's does?", False),
    DeviceRow("gpu_million_tokens", "G10", 150, million_tokens, ((at_most(1.15, "×"),),),
        "Does a LongNet training step complete at a million tokens, at the same time a token?"),
    DeviceRow("gpu_ranks", "G11", 150, ranks,
        ((at_most(1.10, "×"), "forward"), (at_most(1.10, "×"), "exchange backward"),
         (at_most(1.45, "×"), "ring backward")),
        "What do eight ranks compute, one after the other on one device, over what one call computes?"),
)  # fmt: skip
CORRECTNESS, QUESTION = "gpu_correctness", "Are output, lse and gradients right on this device, on the odd cases?"
NAMES = (CORRECTNESS, *(row.name for row in ROWS))
CODES = {"G0": CORRECTNESS, "G8": "gpu_gathers_and_merge", **{row.code: row.name for row in ROWS}}


# The run. Whatever ends a case or a row is a line of the report, and the rest goes on.


def answer(row: DeviceRow, at: Device) -> Iterator[Document]:
    """Every line as plain data, as soon as it is measured."""
    for line in row.lines:
        try:
            yield from (found.to_data() for found in row.measure(at, *line))
        except Exception as error:
            traceback.print_exc()
            yield _gap(f"{row.question} {line[1:] or ''}", f"{type(error).__name__}: {error}")


def rehearse(row: DeviceRow, line: tuple[Any, ...], at: Device) -> Iterator[Document]:
    """What fails here fails again when it counts."""
    list(row.measure(replace(at, rehearsing=True), *line))
    yield from ()


def asked_on(at: Device) -> list[tuple[str, str]]:
    """(case, engine) of each check on the device. Not for the process that forks the others: it initializes CUDA."""
    return [(name, engine) for name in cases() for engine in judged(name, at)]


def measure_all(at: Device, names: Sequence[str], keep: Callable[[Document], None], *, limit_s: float) -> None:
    """Hand over a document for each name; that of a row again after every line of it."""
    start, factor = perf_counter(), 1 if at.is_cuda else 30  # a CPU that others share builds C++ slowly
    shared = {"config": {}, "points": [], "small": at.small, **run_apart(conditions, at.name)}
    rows = [row for row in ROWS if row.name in names]

    def apart(what: str, most_s: float, share: float, function: Callable[..., Any], *args: Any) -> Iterator[Document]:
        """What it yields in a process, which ends after `most_s`, and before this share of all time is over."""
        left = min(factor * most_s, start + share * limit_s - perf_counter())
        try:
            if left < _LEAST_S:
                raise TookTooLong("there was no time left")
            yield from each_apart(function, *args, limit_s=left)
        except DiedApart as error:
            say(f"{what}: {error}")
            yield _gap(what, str(error))

    asked = run_apart(asked_on, at) if CORRECTNESS in names else []
    jobs: list[tuple[Any, ...]] = [(f"{name}, {engine}", 120, judge, name, at, engine) for name, engine in asked]
    if at.is_cuda:
        jobs += [(row.name, 150, rehearse, row, line, at) for row in rows for line in row.lines if row.rehearsed]
    # Odd cases first, then rehearsals, which take longest; the catalogue has what is left of the time; last is "flash".
    jobs.sort(key=lambda job: ("catalogue" in job[0], job[2] is rehearse, "flash" in job))
    with ThreadPoolExecutor(16 if at.is_cuda else 2) as pool:  # compilation keeps them busy, not the device
        ended = list(pool.map(lambda job: (job[2], list(apart(job[0], job[1], 0.55, *job[2:]))), jobs))
    if CORRECTNESS in names:
        wrong = [line for function, found in ended if function is judge for line in found]
        first = Row(f"odd cases that are wrong or gave nothing, of {len(asked)}", _NONE_WRONG, len(wrong)).to_data()
        seconds = perf_counter() - start
        keep({"name": CORRECTNESS, "question": QUESTION, "rows": [first, *wrong], "seconds": seconds, **shared})
    for row in rows:
        begin, found = perf_counter(), []
        for line in apart(row.question, row.limit_s, 1.0, answer, row, at):
            found.append(line)
            say(f"{line['measure']}: {line['measured_text']}")
            seconds = perf_counter() - begin
            keep({"name": row.name, "question": row.question, "rows": list(found), "seconds": seconds, **shared})


def is_failed(document: Document) -> bool:
    """Whether it gave no number at all, or one that a failed check stands against."""
    rows = document["rows"]
    wrong = document["name"] == CORRECTNESS and rows[0]["met"] is False
    return wrong or all(row["measured"] is None for row in rows) or any("not_verified" in row for row in rows)


def _gap(what: str, reason: str) -> Document:
    return Gap(what, _NONE_WRONG, reason).to_data()
