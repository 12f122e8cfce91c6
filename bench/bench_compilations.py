"""When lengths keep changing: how many compilations, graph breaks, and how slow unpadded?"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import pad

import flexdilated as fd

from ._apart import run_apart
from ._longnets import LONGNET_4, LongNet
from ._result import Result, Row, Timing, at_most
from ._timing import say


@dataclass(frozen=True)
class Config:
    """A causal LongNet at `num_lengths` lengths drawn evenly from `shortest` to `longest`."""

    spec: LongNet
    num_lengths: int
    shortest: int
    longest: int
    num_heads: int = 4
    head_dim: int = 16
    seed: int = 0
    backend: str = "inductor"

    @property
    def lengths(self) -> list[int]:
        """The lengths of the steps."""
        random = Random(self.seed)
        return [random.randint(self.shortest, self.longest) for _ in range(self.num_lengths)]


@dataclass(frozen=True)
class Steps:
    """What came of a way to deal with lengths: seconds of each step, and whether it compiled something."""

    seconds: tuple[float, ...]
    compiled: tuple[bool, ...]
    compilations: int
    not_compiled: int
    detail: dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to deal with lengths: `padded` says to what a length is raised; graphs are for one length or for all."""

    name: str
    padded: Callable[[int], int]
    one_graph_a_length: bool = False


def as_it_comes(length: int) -> int:
    return length


def power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def multiple(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE


_MULTIPLE = 512
AS_IT_COMES = Way("as they come", as_it_comes)
WAYS = (
    AS_IT_COMES,
    Way("padded to powers of two", power_of_two, one_graph_a_length=True),
    Way(f"padded to multiples of {_MULTIPLE}", multiple),
)

FULL = Config(LONGNET_4.shrunk(8).as_causal(), num_lengths=50, shortest=200, longest=4096)
SMALL = Config(LONGNET_4.shrunk(64).as_causal(), num_lengths=4, shortest=60, longest=300, backend="aot_eager")


class Layer(nn.Module):
    """Projections around dilated attention, with a loss on top: the smallest thing that trains."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        width = config.num_heads * config.head_dim
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        spec = config.spec
        self.attention = fd.DilatedAttention(spec.segment_lengths, spec.dilation_rates, causal=spec.causal)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """The loss of (B, N, width) inputs, over the tokens that are real: a (N,) of ones, and zeros after them."""
        q, k, v = self.project_in(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        error = (self.project_out(self.attention(q, k, v).transpose(1, 2).flatten(2)) - x).square().mean(-1)
        return (error * real).sum() / real.sum()


def run(config: Config) -> Result:
    """C11: graphs compiled over the lengths, and the time of that against padding to a few lengths.

    Each way starts with nothing compiled, in a process and with a folder of its own. Padding is on the right,
    where a causal pattern needs no mask. A step is a forward and a backward; checks are not timed. Of the ways to
    pad, the last row takes the faster one. Its bound says that a plan for a new length costs half a step at most.
    """
    name = f"{config.spec.label}, {config.num_lengths} random lengths, compiled training step"
    found = {way.name: run_apart(_steps, config, way) for way in WAYS}
    ready = [not any(new) for new in zip(*(steps.compiled for steps in found.values()), strict=True)]
    detail = {
        way: {
            "compilations": steps.compilations,
            "seconds_of_all_steps": sum(steps.seconds),
            "seconds_of_steps_that_nowhere_compile": sum(compress(steps.seconds, ready)),
        }
        for way, steps in found.items()
    }
    dynamic, buckets = found[AS_IT_COMES.name], {power_of_two(length) for length in config.lengths}
    later = [Timing(way, tuple(compress(steps.seconds, ready))) for way, steps in found.items()]
    best = min(later, key=lambda timing: sum(timing.seconds))
    return Result(
        (
            Row(
                f"{name}: compilations, at most one a power of two",
                at_most(len(buckets)),
                dynamic.compilations,
                detail={"lengths": config.lengths, "steps_that_nowhere_compile": sum(ready), "ways": detail},
            ),
            Row(
                f"{name}: graph breaks and frames left to eager",
                at_most(0),
                sum(steps.not_compiled for steps in found.values()),
                detail=dynamic.detail,
            ),
            Row(
                f"{name}: once compiled, steps of lengths as they come over those padded",
                at_most(1.5),
                sum(later[0].seconds) / sum(best.seconds),
                (later[0], best),
            ),
        )
    )


def _steps(config: Config, way: Way) -> Steps:
    """In a process of its own: a step at each length, raised as this way has it."""
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        layer = Layer(config)
    compiled = torch.compile(layer, dynamic=False if way.one_graph_a_length else None, backend=config.backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    seconds, new = [], []
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for x in (_inputs(layer, length) for length in config.lengths):
            graphs = counters["stats"]["unique_graphs"]
            optimizer.zero_grad()
            start = perf_counter()
            loss = compiled(*_padded(x, way.padded(x.shape[1])))
            loss.backward()
            seconds.append(perf_counter() - start)
            new.append(counters["stats"]["unique_graphs"] > graphs)
            if new[-1]:
                say(f"{way.name}: compiled at {x.shape[1]} tokens in {seconds[-1]:.1f} s")
                _check(layer, x, loss)
            optimizer.step()
    frames = counters["frames"]
    left = counters["graph_break"].total() + frames["total"] - frames["ok"]
    detail = {"graph_breaks": dict(counters["graph_break"]), "frames": dict(frames)}
    return Steps(tuple(seconds), tuple(new), counters["stats"]["unique_graphs"], left, detail)


def _padded(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The inputs with zeros up to a length, and which tokens are real."""
    more = length - x.shape[1]
    return pad(x, (0, 0, 0, more)), pad(x.new_ones(x.shape[1]), (0, more))


def _check(layer: Layer, x: Tensor, loss: Tensor) -> None:
    """Raise AssertionError unless the compiled loss, and the gradients it left, are the eager ones."""
    eager = layer(x, x.new_ones(x.shape[1]))
    wanted = (eager.detach(), *torch.autograd.grad(eager, list(layer.parameters())))
    got = (loss.detach(), *(weight.grad for weight in layer.parameters()))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def _inputs(layer: Layer, length: int) -> Tensor:
    width = layer.project_out.in_features
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(length))
