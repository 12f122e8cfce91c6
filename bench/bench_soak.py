"""Do thousands of steps at ever new lengths leave anything behind: memory, tensors, compilations?"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import flexdilated as fd
from flexdilated import masks

from ._longnets import LONGNET_4, LongNet
from ._resident_memory import resident_bytes
from ._result import Result, Row, at_most
from ._timing import say
from .bench_compilations import Config as LayerConfig
from .bench_compilations import Layer

_MB = 1 << 20
_CACHE_BYTES = 4 * _MB  # soon full: from then on each new length evicts an older one


@dataclass(frozen=True)
class Config:
    """`steps` of lengths up to `longest`, of each kind in turn; `settled` of them come before anything is counted."""

    spec: LongNet
    steps: int
    settled: int
    marks: int
    longest: int
    backend: str = "inductor"
    num_heads: int = 4
    head_dim: int = 16
    seed: int = 0


FULL = Config(LONGNET_4.shrunk(32).as_causal(), steps=10_000, settled=4_000, marks=10, longest=1000)
SMALL = Config(LONGNET_4.shrunk(128).as_causal(), steps=60, settled=40, marks=3, longest=100, backend="aot_eager")

Step = Callable[[int], None]


@dataclass(frozen=True)
class Mark:
    """What the process holds after some steps."""

    steps: int
    resident_bytes: int
    tensors: int
    graphs: int
    not_compiled: int
    cache_bytes: int
    evictions: int


class Work:
    """The kinds of steps; each is given a length, and raises AssertionError where its result is wrong."""

    def __init__(self, config: Config) -> None:
        self._config, self._pattern = config, config.spec.pattern()
        size = LayerConfig(config.spec, 1, 1, 1, num_heads=config.num_heads, head_dim=config.head_dim)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self._layer = Layer(size)
        self._compiled = torch.compile(self._layer, backend=config.backend)
        self._optimizer = torch.optim.AdamW(self._layer.parameters(), lr=1e-3)
        self._noise = torch.Generator().manual_seed(config.seed)

    def kinds(self) -> tuple[Step, ...]:
        return self.train, self.train_compiled, self.pack, self.decode

    def train(self, length: int) -> None:
        """A training step of a layer, eagerly."""
        self._step(self._layer, length)

    def train_compiled(self, length: int) -> None:
        """The same, compiled for any length."""
        self._step(self._compiled, max(2, length))  # a length of 1 is a graph of its own

    def pack(self, length: int) -> None:
        """Forward and backward over documents that come with the call, of which the last must be as it is alone."""
        q, k, v = (x.requires_grad_() for x in self._drawn(length))
        ids = torch.randint(0, 4, (length,), generator=self._noise).sort().values
        rule = masks.causal() & masks.documents("documents")
        out = fd.attend(q, k, v, rule, bindings={"documents": ids})
        out.square().sum().backward()
        last = int((ids == ids[-1]).sum())
        alone = fd.attend(q[:, :, -last:], k[:, :, -last:], v[:, :, -last:], masks.causal())
        torch.testing.assert_close(out[:, :, -last:], alone, rtol=1e-4, atol=1e-5)

    def decode(self, length: int) -> None:
        """A prompt and three tokens, which must be as in one pass."""
        q, k, v = self._drawn(length + 3)
        cache = fd.KVCache(self._pattern, num_heads=self._config.num_heads)
        cuts = [length, 1, 1, 1]
        parts = [cache.attend(*part) for part in zip(*(x.split(cuts, 2) for x in (q, k, v)), strict=True)]
        whole = fd.attend(q, k, v, self._pattern)
        torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-4, atol=1e-5)

    def _step(self, layer: Callable[[Tensor, Tensor], Tensor], length: int) -> None:
        x = torch.randn(1, length, self._config.num_heads * self._config.head_dim, generator=self._noise)
        self._optimizer.zero_grad()
        loss = layer(x, torch.ones(length))
        loss.backward()
        assert bool(loss.isfinite()), f"the loss is {loss} at {length} tokens"
        self._optimizer.step()

    def _drawn(self, length: int) -> tuple[Tensor, ...]:
        shape = (3, 1, self._config.num_heads, length, self._config.head_dim)
        return tuple(torch.randn(shape, generator=self._noise).unbind())


def run(config: Config) -> Result:
    """Eager and compiled training, packed documents and decoding take turns, at lengths drawn evenly from 1 up.

    Counted from the step on by which the cache has long been full, and every size range has been compiled. The growth
    of memory is the highest mark of all over that of this step: a peak before it counts, too.
    """
    logging.getLogger("flexdilated").setLevel(logging.ERROR)  # the cache warns that it is too small: it is meant to be
    masks.cache().clear()
    masks.cache().budget_bytes = _CACHE_BYTES
    marks = _marks(config, Work(config).kinds())
    settled = next(mark for mark in marks if mark.steps >= config.settled)
    last, name = marks[-1], f"{config.steps:,} steps of changing length"
    detail = {"marks": [vars(mark) for mark in marks], "counted_from_step": settled.steps}
    grown = max(mark.resident_bytes for mark in marks) - settled.resident_bytes
    return Result(
        (
            Row(f"{name}: growth of resident memory", at_most(32, "MB"), max(0, grown) / _MB, (), detail),
            Row(f"{name}: growth of the number of tensors alive", at_most(0), max(0, last.tensors - settled.tensors)),
            Row(f"{name}: compilations after the first {settled.steps:,}", at_most(0), last.graphs - settled.graphs),
            Row(f"{name}: graph breaks and frames left to eager", at_most(0), last.not_compiled),
            Row(f"{name}: most bytes in the cache over its budget", at_most(1), _fullest(marks) / _CACHE_BYTES),
        )
    )


def _marks(config: Config, kinds: tuple[Step, ...]) -> list[Mark]:
    """Take all the steps, and look at the process at even distances."""
    lengths, marks = Random(config.seed), list[Mark]()
    for number in range(1, config.steps + 1):
        kinds[number % len(kinds)](lengths.randint(1, config.longest))
        if number % (config.steps // config.marks) == 0:
            marks.append(_mark(number))
            say(f"{number:,} steps: {marks[-1].resident_bytes / _MB:.0f} MB, {marks[-1].graphs} graphs")
    return marks


def _mark(steps: int) -> Mark:
    gc.collect()
    stats, frames = masks.cache().stats(), counters["frames"]
    return Mark(
        steps=steps,
        resident_bytes=resident_bytes(),
        tensors=sum(_is_tensor(each) for each in gc.get_objects()),
        graphs=counters["stats"]["unique_graphs"],
        not_compiled=counters["graph_break"].total() + frames["total"] - frames["ok"],
        cache_bytes=stats.bytes,
        evictions=stats.evictions,
    )


def _is_tensor(value: Any) -> bool:
    """Asked of the type: some objects answer isinstance with work of their own."""
    return issubclass(type(value), Tensor)


def _fullest(marks: list[Mark]) -> int:
    return max(mark.cache_bytes for mark in marks)
