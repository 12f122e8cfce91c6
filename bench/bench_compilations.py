"""How often does a compiled training step compile when the lengths keep changing?"""

import os
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
from ._result import Result, Row, at_most
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


FULL = Config(LONGNET_4.shrunk(4).as_causal(), num_lengths=50, shortest=200, longest=8192)
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
    """C11: graphs compiled over the lengths, and the time of that against padding to powers of two.

    Both ways start with nothing compiled, in a process and with a folder of their own. Padding is on the right,
    where a causal pattern needs no mask. A step is a forward and a backward; checks are not timed.
    """
    name = f"{config.spec.label}, {config.num_lengths} random lengths, compiled training step"
    dynamic, padded = (run_apart(_steps, config, pads) for pads in (False, True))
    buckets = len({(length - 1).bit_length() for length in config.lengths})
    totals = [sum(steps.seconds) for steps in (dynamic, padded)]
    ready = [not any(new) for new in zip(dynamic.compiled, padded.compiled, strict=True)]
    later = [sum(compress(steps.seconds, ready)) for steps in (dynamic, padded)]
    detail = {
        "lengths": config.lengths,
        "seconds_of_all_steps": totals,
        "seconds_of_later_steps": later,
        "later_steps": sum(ready),
        "compilations_of_buckets": padded.compilations,
        **dynamic.detail,
    }
    return Result(
        (
            Row(
                f"{name}: compilations, at most one a power of two", at_most(buckets), dynamic.compilations, (), detail
            ),
            Row(f"{name}: graph breaks and frames left to eager", at_most(0), dynamic.not_compiled),
            Row(f"{name}: all steps and compilations over those of padding", at_most(1), totals[0] / totals[1]),
            Row(f"{name}: steps that compile nothing over those of padding", at_most(1), later[0] / later[1]),
        )
    )


def _steps(config: Config, pads: bool) -> Steps:
    """In a process of its own: a step at each length, as it is or padded to the next power of two."""
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        layer = Layer(config)
    compiled = torch.compile(layer, dynamic=False if pads else None, backend=config.backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    seconds, new, unpadded = [], [], [_inputs(layer, length) for length in config.lengths]
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for x in unpadded:
            graphs = counters["stats"]["unique_graphs"]
            optimizer.zero_grad()
            start = perf_counter()
            loss = compiled(*_padded(x) if pads else (x, x.new_ones(x.shape[1])))
            loss.backward()
            seconds.append(perf_counter() - start)
            new.append(counters["stats"]["unique_graphs"] > graphs)
            if new[-1]:
                say(f"{'padded' if pads else 'as they come'}: compiled at {x.shape[1]} tokens in {seconds[-1]:.1f} s")
            _check(layer, x, loss)
            optimizer.step()
    frames = counters["frames"]
    left = counters["graph_break"].total() + frames["total"] - frames["ok"]
    detail = {"graph_breaks": dict(counters["graph_break"]), "frames": dict(frames)}
    return Steps(tuple(seconds), tuple(new), counters["stats"]["unique_graphs"], left, detail)


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs with zeros up to the next power of two, and which tokens are real."""
    more = (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]
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
