"""Long runs: steps at ever new lengths leave nothing behind; threads that share the cache get what one thread gets."""

import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from threading import Event

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import flexdilated as fd
from flexdilated import masks
from tests.support.threads import side_by_side

HEADS, DIM, LONGEST = 4, 16, 80
STEPS, SETTLED = 24, 12
CACHE_BYTES = 1 << 18  # soon full: from then on each new length evicts an older one
PATTERN = masks.longnet((16, 32, 64, 128), (1, 2, 4, 8)) & masks.causal()


class Layer(nn.Module):
    """Projections around attention, with a loss on top."""

    def __init__(self) -> None:
        super().__init__()
        self.project_in, self.project_out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project_in(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return (self.project_out(fd.attend(q, k, v, PATTERN).transpose(1, 2).flatten(2)) - x).square().mean()


class Work:
    """The kinds of steps; each is given a length, and raises AssertionError where its result is wrong."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = Layer()
        self.compiled = torch.compile(self.layer, backend="aot_eager")
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-3)

    def kinds(self) -> tuple[Callable[[int], None], ...]:
        # A length of 1 is a graph of its own.
        return (
            lambda length: self.train(self.layer, length),
            lambda length: self.train(self.compiled, max(2, length)),
            self.pack,
            self.decode,
        )

    def train(self, layer: Callable[[Tensor], Tensor], length: int) -> None:
        self.optimizer.zero_grad()
        loss = layer(torch.randn(1, length, HEADS * DIM))
        loss.backward()
        assert bool(loss.isfinite()), f"the loss is {loss} at {length} tokens"
        self.optimizer.step()

    def pack(self, length: int) -> None:
        """Forward and backward over documents that come with the call; the last must be as it is alone."""
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, HEADS, length, DIM).unbind())
        ids = torch.randint(0, 4, (length,)).sort().values
        out = fd.attend(q, k, v, masks.causal() & masks.documents("documents"), bindings={"documents": ids})
        out.square().sum().backward()
        last = int((ids == ids[-1]).sum())
        alone = fd.attend(q[:, :, -last:], k[:, :, -last:], v[:, :, -last:], masks.causal())
        torch.testing.assert_close(out[:, :, -last:], alone, rtol=1e-4, atol=1e-5)

    def decode(self, length: int) -> None:
        """A prompt and three tokens, which must be as in one pass."""
        q, k, v = torch.randn(3, 1, HEADS, length + 3, DIM).unbind()
        cache = fd.KVCache(PATTERN, num_heads=HEADS)
        parts = [cache.attend(*part) for part in zip(*(x.split([length, 1, 1, 1], 2) for x in (q, k, v)), strict=True)]
        torch.testing.assert_close(torch.cat(parts, 2), fd.attend(q, k, v, PATTERN), rtol=1e-4, atol=1e-5)


@pytest.fixture
def small_cache():
    cache = masks.cache()
    before = cache.budget_bytes
    cache.clear()
    cache.budget_bytes = CACHE_BYTES
    yield cache
    cache.budget_bytes = before
    cache.clear()


@pytest.mark.slow
def test_changing_lengths_leave_nothing_behind(small_cache) -> None:
    torch.compiler.reset()
    counters.clear()
    kinds, lengths = Work().kinds(), Random(0)
    held: dict[int, tuple[int, int]] = {}
    for number in range(1, STEPS + 1):
        kinds[number % len(kinds)](lengths.randint(1, LONGEST))
        assert small_cache.stats().bytes <= CACHE_BYTES
        if number in (SETTLED, STEPS):
            gc.collect()
            # Asked of the type: some objects answer isinstance with work of their own.
            tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
            held[number] = tensors, counters["stats"]["unique_graphs"]
    assert small_cache.stats().evictions > 0
    # Plans of different lengths differ in how many tensors they hold; each step leaves more than one if any.
    assert held[STEPS][0] - held[SETTLED][0] < (STEPS - SETTLED) // 4 * 8
    assert held[STEPS][1] == held[SETTLED][1]
    assert counters["graph_break"].total() == 0
    assert counters["frames"]["total"] == counters["frames"]["ok"]


# Counted, not timed: a busy machine takes longer, but checks as much.
THREADS, ROUNDS, DISTURBANCES = 8, 6, 100
H, D = 4, 8

PATTERNS = {
    "longnet": masks.longnet([16, 64], [1, 4]) & masks.causal(),
    "window": masks.local_window(left=9, right=2) & masks.causal() | masks.first_tokens(2),
    "bigbird": masks.recipes.bigbird(128, block=8, num_global=1, num_random=1),
    "documents": masks.causal() & masks.documents("documents"),
    "decoded": masks.local_window(left=20, right=0),
}


@dataclass(frozen=True)
class Case:
    """A call, and what one thread alone made of it."""

    run: Callable[[], tuple[Tensor, ...]]
    expected: tuple[Tensor, ...]

    def holds(self) -> bool:
        return all(torch.allclose(x, y, atol=1e-6) for x, y in zip(self.run(), self.expected, strict=True))


def trained(name: str, tokens: int) -> tuple[Tensor, ...]:
    """The output and all gradients."""
    q, k, v = (x.requires_grad_() for x in drawn(tokens))
    ids = {"documents": torch.arange(tokens) * 3 // tokens} if name == "documents" else None
    out = fd.attend(q, k, v, PATTERNS[name], bindings=ids)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))


def decoded(tokens: int) -> tuple[Tensor, ...]:
    q, k, v = drawn(tokens)
    cache = fd.KVCache(PATTERNS["decoded"], num_heads=H)
    return tuple(cache.attend(*part) for part in zip(*(x.split(30, 2) for x in (q, k, v)), strict=True))


def drawn(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, H, tokens, D, generator=generator) for _ in range(3)]


def calls() -> list[Callable[[], tuple[Tensor, ...]]]:
    trainings = [partial(trained, name, tokens) for name in PATTERNS for tokens in (1, 50, 97, 128)]
    return [*trainings, partial(decoded, 70), partial(decoded, 100)]


@pytest.fixture
def frequent_switches():
    """Threads take turns every 50 µs instead of every 5 ms: more comes in between, and none waits long."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def tiny_cache(frequent_switches):
    """The cache of the process, with room for a few plans only."""
    cache = masks.cache()
    before = cache.budget_bytes, cache.budget_entries
    cache.budget_bytes, cache.budget_entries = 20_000, 12
    yield cache
    cache.budget_bytes, cache.budget_entries = before


def test_threads_get_what_one_thread_gets(tiny_cache):
    cases = [Case(run, run()) for run in calls()]
    calm = Event()

    def compute(seed: int) -> list[int]:
        """The cases that came out otherwise; as long as there are disturbances, and a few at least."""
        draw, tried, wrong = random.Random(seed), 0, []
        while tried < ROUNDS or not calm.is_set():
            number = draw.randrange(len(cases))
            if not cases[number].holds():
                wrong.append(number)
            tried += 1
        return wrong

    def disturb() -> list[int]:
        draw = random.Random(0)
        try:
            for _ in range(DISTURBANCES):
                time.sleep(0.001)
                what = draw.random()
                if what < 0.4:
                    tiny_cache.forget(draw.choice(list(PATTERNS.values())))
                elif what < 0.6:
                    tiny_cache.clear()
                else:
                    tiny_cache.budget_bytes = draw.randrange(40_000)
        finally:
            calm.set()
        return []

    jobs = [disturb, *(partial(compute, seed) for seed in range(THREADS))]
    assert side_by_side(jobs, seconds=200) == [[]] * len(jobs)
