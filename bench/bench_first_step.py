"""How long does the first step take, with nothing compiled yet, with torch's cache on disk, and then?"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import compilation_time_metrics
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flexdilated as fd
from flexdilated import masks
from flexdilated.nn import _longnet_block

from ._apart import run_apart
from ._longnets import LONGNET_4, LongNet
from ._oracle import check_forward
from ._problem import Attention, Problem, Size, train
from ._result import Result, Row, Timing, at_most
from ._timing import say

_LATER_STEPS = 3
_SLOWEST_PARTS = 12


@dataclass(frozen=True)
class Config:
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


FULL = Config(LONGNET_4.as_causal(), Size(8192, num_heads=4))
SMALL = Config(
    LONGNET_4.shrunk(64).as_causal(), Size(256, 4), 60, 8, 100, 2, repeats=1, backend="aot_eager", starts=("cold",)
)


class Case(NamedTuple):
    """A step, and a check of what it computes that raises AssertionError."""

    step: Callable[[], object]
    check: Callable[[], None]


class Steps(NamedTuple):
    """Seconds of the first step and of a later one, and of the parts of torch's compilation."""

    first_s: float
    later_s: float
    parts_s: dict[str, float]

    @property
    def detail(self) -> dict[str, Any]:
        return {"first_s": self.first_s, "later_s": self.later_s, "parts_s": self.parts_s}


def run(config: Config) -> Result:
    """First steps beside those of the same with torch's own attention, which costs what torch.compile costs anyhow.

    A cold step finds nothing, a warm one the folder that the cold one has left; each in a process of its own, in
    which everything is imported: the import has its own row. Bounds leave half as much again for what is ours.
    Two are absolute, as nothing compares: the import is to add less than half of what torch's own takes, which is
    about a second, and the attention of 12 blocks is to trace within a third of a second.
    """
    return Result((_import_row(config), _eager_row(config), *_compiled_rows(config), _trace_row(config)))


def _import_row(config: Config) -> Row:
    code = "import torch, time; start = time.perf_counter(); import flexdilated; print(time.perf_counter() - start)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(config.repeats)
    ]
    timing = Timing("import", tuple(runs))
    return Row("import flexdilated, beyond import torch", at_most(0.5, "s"), timing.median_s, (timing,))


def _eager_row(config: Config) -> Row:
    steps = [run_apart(_first_steps, _eager, config, "") for _ in range(config.repeats)]
    first, later = (Timing(name, tuple(getattr(each, name) for each in steps)) for name in ("first_s", "later_s"))
    return Row(
        f"{config.spec.label}, {config.size}, eager training step: the first over a later one",
        at_most(3),
        first.median_s / later.median_s,
        (first, later),
    )


def _compiled_rows(config: Config) -> list[Row]:
    """Each start of both: the model of two blocks in training, the window in inference."""
    names = {
        f"LongNet of 2 blocks, {config.model_tokens} tokens, compiled training step": (_model, _dense_model),
        f"window of {config.window}, {config.window_tokens} tokens, compiled inference": (_window, _bare_window),
    }
    rows = []
    for name, (ours, theirs) in names.items():
        found = {each: _starts(each, config) for each in (ours, theirs)}
        for index, start in enumerate(config.starts):
            own, other = found[ours][index], found[theirs][index]
            detail = {"flexdilated": own.detail, "torch's own attention": other.detail}
            measure = f"{name}: {start} first step, over that with torch's own attention"
            rows.append(Row(measure, at_most(1.5), own.first_s / other.first_s, detail=detail))
            say(f"{name}, {start}: {own.first_s:.2f} s, {other.first_s:.2f} s with torch's own attention")
    return rows


def _starts(prepare: Callable[[Config], Case], config: Config) -> list[Steps]:
    with TemporaryDirectory() as folder:
        return [run_apart(_first_steps, prepare, config, folder) for _ in config.starts]


def _first_steps(prepare: Callable[[Config], Case], config: Config, folder: str) -> Steps:
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
    return Steps(seconds[0], median(seconds[1:]), {name: spent for spent, name in parts[:_SLOWEST_PARTS]})


def _eager(config: Config) -> Case:
    problem, attention = Problem.draw(config.size), config.spec.attention()
    return Case(lambda: train(attention, problem), lambda: check_forward(attention, problem, config.spec))


def _model(config: Config) -> Case:
    """A training step of a model, whose loss is compared with the eager one's."""
    torch.manual_seed(0)
    branches = {"segment_lengths": (64, 256), "dilation_rates": (1, 4), "causal": True}
    model = fd.LongNet(fd.LongNetConfig(vocab_size=256, embed_dim=64, num_heads=4, depth=2, **branches))
    tokens = torch.arange(config.model_tokens)[None] % 256
    compiled = torch.compile(model, fullgraph=True, backend=config.backend)

    def check() -> None:
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-4)

    return Case(lambda: compiled(tokens).square().mean().backward(), check)


def _dense_model(config: Config) -> Case:
    """The same model, but for its attention."""

    def dense(q: Tensor, k: Tensor, v: Tensor, pattern: object, **options: object) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    patch.object(_longnet_block, "attend", dense).start()  # for as long as this process lives
    return _model(config)


def _window(config: Config) -> Case:
    window = _window_pattern(config)
    return _inference(config, lambda q, k, v: fd.attend(q, k, v, window, engine="flex"))


def _bare_window(config: Config) -> Case:
    """FlexAttention as it comes, with the same block mask."""
    mask = masks.block_mask(_window_pattern(config), config.window_tokens, num_heads=config.size.num_heads)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    return _inference(config, attention)


def _window_pattern(config: Config) -> masks.Pattern:
    return masks.local_window(left=config.window, right=config.window)


def _inference(config: Config, attention: Attention) -> Case:
    """A call in a graph of its own, compared with an eager call."""
    problem = Problem.draw(Size(config.window_tokens, config.size.num_heads, head_dim=16))
    inputs = problem.q, problem.k, problem.v
    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend=config.backend)

    def check() -> None:
        torch.testing.assert_close(compiled(*inputs), fd.attend(*inputs, _window_pattern(config)), rtol=1e-4, atol=1e-4)

    return Case(lambda: compiled(*inputs), check)


def _trace_row(config: Config) -> Row:
    """Seconds of the CPU, which other work on the machine disturbs less than those of the clock."""
    pattern = config.spec.pattern()
    ours, theirs = (run_apart(_trace_ms, name, pattern, config) for name in ("attend", "scaled_dot_product_attention"))
    say(f"to trace a call: {ours:.1f} ms, {theirs:.1f} ms of scaled_dot_product_attention")
    measure = f"{config.spec.label}, to trace a call of attend, of {config.traced_calls} in one graph"
    return Row(measure, at_most(30, "ms"), ours, detail={"scaled_dot_product_attention_ms": theirs})


def _trace_ms(name: str, pattern: masks.Mixture, config: Config) -> float:
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
    """A backend that neither compiles nor runs the graph: its first input stands for its output."""
    return lambda *args: (args[0],)
