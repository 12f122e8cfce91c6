"""Compiling: graphs where lengths keep changing, first steps; and the time of README's two commands."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from types import FunctionType
from typing import Any, NamedTuple
from unittest.mock import patch
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch._dynamo.utils import compilation_time_metrics, counters
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.nn import _longnet_block

from ._checks import check_forward
from ._jobs import Attention, Problem, Size, say, train
from ._measures import Row, Timing, at_most, measure
from ._processes import run_apart
from ._rules import LONGNET_4, LongNet

_MULTIPLE = 512
_LATER_STEPS = 3
_SLOWEST_PARTS = 12
_SMALL = LongNet("LongNet-2", (8, 32), (1, 2), causal=True)


@dataclass(frozen=True)
class Lengths:
    """`num_lengths` lengths drawn evenly from `shortest` to `longest`, of a layer of this width."""

    num_lengths: int
    shortest: int
    longest: int
    num_heads: int = 4
    head_dim: int = 16
    seed: int = 0

    def drawn(self) -> list[int]:
        random = Random(self.seed)
        return [random.randint(self.shortest, self.longest) for _ in range(self.num_lengths)]


class Layer(nn.Module):
    """Projections around dilated attention, with a loss on top: the smallest thing that trains."""

    def __init__(self, spec: LongNet, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, width = num_heads, num_heads * head_dim
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = fd.DilatedAttention(spec.segment_lengths, spec.dilation_rates, causal=spec.causal)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """The loss of (B, N, width) inputs over the real tokens, 1 in the (N,) `real`, which is 0 for padding."""
        q, k, v = self.project_in(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        error = (self.project_out(self.attention(q, k, v).transpose(1, 2).flatten(2)) - x).square().mean(-1)
        return (error * real).sum() / real.sum()


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


# The padded length of each way.
WAYS: dict[str, Callable[[int], int]] = {
    "as they come": lambda length: length,
    "padded to powers of two": _power_of_two,  # a graph for each
    f"padded to multiples of {_MULTIPLE}": lambda length: -(-length // _MULTIPLE) * _MULTIPLE,
}


@measure("C11", spec=_SMALL, lengths=Lengths(3, 30, 100), backend="eager")
def changing_lengths(
    spec: LongNet = LONGNET_4.shrunk(8).as_causal(),
    lengths: Lengths = Lengths(50, 200, 4096),
    backend: str = "inductor",
) -> list[Row]:
    """When lengths keep changing: how many compilations, graph breaks, and how slow unpadded?

    The ways take turns in one process, which starts with nothing compiled and no plan. Padding is on the right,
    where a causal pattern needs no mask. A step is a forward and a backward; checks are not timed. Of the ways to
    pad, the last rows take the faster one. A bound of 1.5 says that a plan for a new length costs half a step at most;
    the last row is of a second pass over the lengths, which needs no plan.
    """
    name = f"{spec.label}, {lengths.num_lengths} random lengths, compiled training step"
    found: dict[str, Steps] = run_apart(_steps, spec, lengths, backend)
    drawn, number = lengths.drawn(), lengths.num_lengths
    ready = [not any(steps.graphs[index] for steps in found.values()) for index in range(number)]
    new, again = (
        {way: tuple(compress(steps.seconds[part], ready)) for way, steps in found.items()}
        for part in (slice(number), slice(number, None))
    )
    ways = {
        way: {
            "compilations": sum(steps.graphs),
            "seconds_of_all_steps": sum(steps.seconds[:number]),
            "seconds_of_steps_that_nowhere_compile": sum(new[way]),
            "seconds_of_these_again": sum(again[way]),
        }
        for way, steps in found.items()
    }
    dynamic = next(iter(found.values()))
    detail = {"lengths": drawn, "steps_that_nowhere_compile": sum(ready), "ways": ways}
    left = sum(steps.breaks.total() + steps.frames["total"] - steps.frames["ok"] for steps in found.values())
    kinds = {"graph_breaks": dict(dynamic.breaks), "frames": dict(dynamic.frames)}
    bound, what = at_most(len(set(map(_power_of_two, drawn)))), "compilations, at most one a power of two"
    return [
        Row(f"{name}: {what}", bound, sum(dynamic.graphs), detail=detail),
        Row(f"{name}: graph breaks and frames left to eager", at_most(0), left, detail=kinds),
        _beside_padded(f"{name}: once compiled, time of steps of ever new lengths over that of padded ones", new),
        _beside_padded(f"{name}: the same steps once more, over padded ones", again),
    ]


def _beside_padded(what: str, seconds: Mapping[str, tuple[float, ...]]) -> Row:
    """The first way over the fastest of all."""
    first, *others = (Timing(way, each) for way, each in seconds.items())
    if not first.seconds:
        return Row(what, at_most(1.5), torch.nan)
    best = min((first, *others), key=lambda timing: sum(timing.seconds))
    return Row(what, at_most(1.5), sum(first.seconds) / sum(best.seconds), (first, best))


@dataclass
class Steps:
    """Seconds and compiled graphs of each step of one way; all graph breaks, and frames by what became of them."""

    seconds: list[float] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    breaks: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)


def _steps(spec: LongNet, lengths: Lengths, backend: str) -> dict[str, Steps]:
    """A step of each way in turn at each length; then all of them again."""
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        found = {way: Steps() for way in WAYS}
        runs = [partial(_step, way, steps, *_layer(spec, lengths, backend, way)) for way, steps in found.items()]
        for length in 2 * lengths.drawn():
            for run in runs:
                run(length)
            runs.append(runs.pop(0))
    return found


def _layer(spec: LongNet, lengths: Lengths, backend: str, way: str) -> tuple[Layer, Callable[..., Tensor]]:
    """A layer, and the layer compiled, with graphs of its own, which torch keeps by their code."""
    own = Layer.forward.__code__.replace(co_name=f"forward_{list(WAYS).index(way)}")
    kind = type("Layer", (Layer,), {"forward": FunctionType(own, globals())})
    with torch.random.fork_rng():
        torch.manual_seed(lengths.seed)
        layer = kind(spec, lengths.num_heads, lengths.head_dim)
    dynamic = False if WAYS[way] is _power_of_two else None
    return layer, torch.compile(layer, dynamic=dynamic, backend=backend)


def _step(way: str, steps: Steps, layer: Layer, compiled: Callable[..., Tensor], length: int) -> None:
    """A forward and backward and an update; where it compiles, loss and gradients must be the eager ones."""
    x = torch.randn(1, length, layer.project_out.in_features, generator=torch.Generator().manual_seed(length))
    real, more, weights = x.new_ones(length), WAYS[way](length) - length, list(layer.parameters())
    padded = pad(x, (0, 0, 0, more)), pad(real, (0, more))
    counters.clear()
    layer.zero_grad()
    start = perf_counter()
    loss = compiled(*padded)
    loss.backward()
    steps.seconds.append(perf_counter() - start)
    steps.graphs.append(counters["stats"]["unique_graphs"])
    steps.breaks += counters["graph_break"]
    steps.frames += counters["frames"]
    if steps.graphs[-1]:
        say(f"{way}: compiled at {length} tokens in {steps.seconds[-1]:.1f} s")
        eager = layer(x, real)
        wanted = (eager.detach(), *torch.autograd.grad(eager, weights))
        assert_close((loss.detach(), *(weight.grad for weight in weights)), wanted, rtol=1e-4, atol=1e-6)
    torch.optim.SGD(weights, lr=0.01).step()


@dataclass(frozen=True)
class First:
    """A LongNet for the eager step; a model of two blocks, and a window, to compile; calls to trace in one graph."""

    spec: LongNet
    size: Size
    model_tokens: int = 512
    window: int = 64
    window_tokens: int = 1024
    traced_calls: int = 12
    repeats: int = 3
    backend: str = "inductor"
    starts: tuple[str, ...] = ("cold", "warm")

    def window_pattern(self) -> masks.Pattern:
        return masks.local_window(left=self.window, right=self.window)


class Case(NamedTuple):
    """A step, and a check of its results that raises AssertionError."""

    step: Callable[[], object]
    check: Callable[[], None]


FirstSteps = dict[str, Any]  # seconds of the first step and of a later one, and of the parts of torch's compilation


@measure(config=First(_SMALL, Size(64, 4), 60, 8, 100, 1, repeats=1, backend="eager", starts=("cold",)))
def first_step(config: First = First(LONGNET_4.as_causal(), Size(8192, num_heads=4))) -> Iterator[Row]:
    """How long does the first step take, with nothing compiled yet, with torch's cache on disk, and then?

    First steps over first steps with torch's own attention, which show the cost of torch.compile itself.
    A cold step finds an empty cache, a warm one the folder of the cold one; each in a process of its own, in
    which everything is imported: the import has its own row. Bounds leave half as much again for what is ours.
    Two are absolute, as nothing compares: the import is to add less than half of what torch's own takes, which is
    about a second, and the attention of 12 blocks is to trace within a third of a second.
    """
    code = "import torch, time; start = time.perf_counter(); import flexdilated; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(config.repeats)]
    timing = Timing("import", tuple(float(run.stdout) for run in runs))
    yield Row("import flexdilated, beyond import torch", at_most(0.5, "s"), timing.median_s, (timing,))
    steps = [run_apart(_first_steps, _eager, config, "") for _ in range(config.repeats)]
    first, later = (Timing(name, tuple(each[name] for each in steps)) for name in ("first_s", "later_s"))
    what = f"{config.spec.label}, {config.size}, eager training step: the first over a later one"
    yield Row(what, at_most(3), first.median_s / later.median_s, (first, later))
    names = {
        f"LongNet of 2 blocks, {config.model_tokens} tokens, compiled training step": (_model, _dense_model),
        f"window of {config.window}, {config.window_tokens} tokens, compiled inference": (_window, _bare_window),
    }
    for name, both in names.items():
        ours, theirs = (_starts(each, config) for each in both)
        for start, own, other in zip(config.starts, ours, theirs, strict=True):
            say(f"{name}, {start}: {own['first_s']:.2f} s, {other['first_s']:.2f} s with torch's own attention")
            detail = {"flexdilated": own, "torch's own attention": other}
            what = f"{name}: {start} first step, over that with torch's own attention"
            yield Row(what, at_most(1.5), own["first_s"] / other["first_s"], detail=detail)
    # Seconds of the CPU, which other work on the machine disturbs less than those of the clock.
    pattern, calls = config.spec.pattern(), ("attend", "scaled_dot_product_attention")
    own_ms, other_ms = (run_apart(_trace_ms, name, pattern, config) for name in calls)
    what = f"{config.spec.label}, to trace a call of attend, of {config.traced_calls} in one graph"
    yield Row(what, at_most(30, "ms"), own_ms, detail={"scaled_dot_product_attention_ms": other_ms})


def _starts(prepare: Callable[[First], Case], config: First) -> list[FirstSteps]:
    with TemporaryDirectory() as folder:
        return [run_apart(_first_steps, prepare, config, folder) for _ in config.starts]


def _first_steps(prepare: Callable[[First], Case], config: First, folder: str) -> FirstSteps:
    """In a process of its own, with torch's cache in a folder; the check comes last, as it would be a first step."""
    if folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    case = prepare(config)
    seconds = []
    for _ in range(1 + _LATER_STEPS):
        start = perf_counter()
        case.step()
        seconds.append(perf_counter() - start)
    parts = sorted(((sum(each), name) for name, each in compilation_time_metrics.items()), reverse=True)
    case.check()
    slowest = {name: spent for spent, name in parts[:_SLOWEST_PARTS]}
    return {"first_s": seconds[0], "later_s": median(seconds[1:]), "parts_s": slowest}


def _eager(config: First) -> Case:
    problem, attention = Problem.draw(config.size), config.spec.attention()
    return Case(lambda: train(attention, problem), lambda: check_forward(attention, problem, config.spec))


def _model(config: First) -> Case:
    """A training step of a model, whose loss is compared with the eager one's."""
    torch.manual_seed(0)
    branches = {"segment_lengths": (64, 256), "dilation_rates": (1, 4), "causal": True}
    model = fd.LongNet(fd.LongNetConfig(vocab_size=256, embed_dim=64, num_heads=4, depth=2, **branches))
    tokens = torch.arange(config.model_tokens)[None] % 256
    compiled = torch.compile(model, fullgraph=True, backend=config.backend)
    check = lambda: assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-4)  # noqa: E731
    return Case(lambda: compiled(tokens).square().mean().backward(), check)


def _dense_model(config: First) -> Case:
    """The same model with dense attention."""

    def dense(q: Tensor, k: Tensor, v: Tensor, pattern: object, **options: object) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    patch.object(_longnet_block, "attend", dense).start()  # for as long as this process lives
    return _model(config)


def _window(config: First) -> Case:
    window = config.window_pattern()
    return _inference(config, lambda q, k, v: fd.attend(q, k, v, window, engine="flex"))


def _bare_window(config: First) -> Case:
    """FlexAttention itself, with the window's block mask."""
    mask = masks.block_mask(config.window_pattern(), config.window_tokens, num_heads=config.size.num_heads)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    return _inference(config, attention)


def _inference(config: First, attention: Attention) -> Case:
    """A call in a graph of its own, compared with an eager call."""
    inputs = Problem.draw(Size(config.window_tokens, config.size.num_heads, head_dim=16)).qkv
    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend=config.backend)

    def check() -> None:
        assert_close(compiled(*inputs), fd.attend(*inputs, config.window_pattern()), rtol=1e-4, atol=1e-4)

    return Case(lambda: compiled(*inputs), check)


def _trace_ms(name: str, pattern: masks.Mixture, config: First) -> float:
    """Median over repeats of the milliseconds that each further call in a graph adds."""
    x = torch.randn(1, config.size.num_heads, config.size.num_tokens, 16, requires_grad=True)

    def attention(x: Tensor) -> Tensor:
        return fd.attend(x, x, x, pattern) if name == "attend" else scaled_dot_product_attention(x, x, x)

    def seconds(calls: int) -> float:
        def several(x: Tensor) -> Tensor:
            for _ in range(calls):
                x = x + attention(x)
            return x

        torch.compiler.reset()
        start = process_time()
        torch.compile(several, fullgraph=True, backend=_not_run)(x)
        return process_time() - start

    seconds(1)
    many = config.traced_calls
    return 1e3 * median((seconds(1 + many) - seconds(1)) / many for _ in range(config.repeats))


def _not_run(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """A backend that neither compiles nor runs the graph: it returns the first input."""
    return lambda *args: (args[0],)


_REPORT = "import sys; open(sys.argv[1], 'w').write('<testsuite><testcase name=\"nothing\" time=\"0\"/></testsuite>')"


@measure(demo=(sys.executable, "-c", "pass"), test=(sys.executable, "-c", _REPORT, "{report}"))
def commands(
    demo: tuple[str, ...] = ("make", "demo", "ARGS=--out {folder}"),
    test: tuple[str, ...] = ("make", "test", "ARGS=--junitxml={report}"),
) -> Iterator[Row]:
    """How long do `make demo` and `make test` take, their environments there, and the slowest test?"""
    with TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        for name, command, bound in (("make demo", demo, 240), ("make test", test, 360)):
            filled = [part.format(folder=folder, report=report) for part in command]
            start, root = perf_counter(), Path(__file__).parents[1]
            ended = subprocess.run(filled, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            seconds = perf_counter() - start
            if ended.returncode:
                raise RuntimeError(f"{name} ended with status {ended.returncode}:\n{ended.stdout[-4000:]}")
            yield Row(name, at_most(bound, "s"), seconds)
        tests = list(ElementTree.parse(report).iter("testcase"))
    slowest = max(tests, key=lambda test: float(test.get("time", 0)))
    detail = {"name": f"{slowest.get('classname', '')}.{slowest.get('name', '')}", "tests": len(tests)}
    yield Row("the slowest test", at_most(30, "s"), float(slowest.get("time", 0)), detail=detail)
