"""How often does a compiled training step compile when the lengths keep changing?"""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import flexdilated as fd

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


FULL = Config(LONGNET_4.shrunk(4).as_causal(), num_lengths=50, shortest=200, longest=8192)
SMALL = Config(LONGNET_4.shrunk(64).as_causal(), num_lengths=3, shortest=60, longest=300)


class Layer(nn.Module):
    """Projections around dilated attention, with a loss on top: the smallest thing that trains."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        width = config.num_heads * config.head_dim
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        spec = config.spec
        self.attention = fd.DilatedAttention(spec.segment_lengths, spec.dilation_rates, causal=spec.causal)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of (B, N, width) inputs."""
        q, k, v = self.project_in(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return (self.project_out(self.attention(q, k, v).transpose(1, 2).flatten(2)) - x).square().mean()


def run(config: Config) -> Result:
    """C11: graphs compiled over the lengths, against their buckets (powers of two), and eager calls."""
    random = Random(config.seed)
    lengths = [random.randint(config.shortest, config.longest) for _ in range(config.num_lengths)]
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        layer = Layer(config)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for length in lengths:
        before = counters["stats"]["unique_graphs"]
        optimizer.zero_grad()
        x = _inputs(layer, length)
        loss = compiled(x)
        loss.backward()
        _check(layer, x, loss)
        optimizer.step()
        if counters["stats"]["unique_graphs"] > before:
            say(f"compiled at {length} tokens")
    return Result(_rows(config, lengths))


def _rows(config: Config, lengths: list[int]) -> tuple[Row, ...]:
    name = f"{config.spec.label}, {len(lengths)} random lengths, compiled training step"
    frames = counters["frames"]
    not_compiled = counters["graph_break"].total() + frames["total"] - frames["ok"]
    buckets = len({(length - 1).bit_length() for length in lengths})
    detail = {"lengths": lengths, "graph_breaks": dict(counters["graph_break"]), "frames": dict(frames)}
    compilations = counters["stats"]["unique_graphs"]
    return (
        Row(f"{name}: compilations, at most one a power of two", at_most(buckets), compilations, detail=detail),
        Row(f"{name}: graph breaks and frames left to eager", at_most(0), not_compiled),
    )


def _check(layer: Layer, x: Tensor, loss: Tensor) -> None:
    """Raise AssertionError unless the compiled loss, and the gradients it left, are the eager ones."""
    eager = layer(x)
    wanted = (eager.detach(), *torch.autograd.grad(eager, list(layer.parameters())))
    got = (loss.detach(), *(weight.grad for weight in layer.parameters()))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def _inputs(layer: Layer, length: int) -> Tensor:
    width = layer.project_out.in_features
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(length))
