"""Threads that share the cache get what one thread gets, whatever others evict, forget or clear meanwhile."""

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Event

import pytest
import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from tests.support.threads import side_by_side

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
def small_cache(frequent_switches):
    """The cache of the process, with room for a few plans only."""
    cache = masks.cache()
    before = cache.budget_bytes, cache.budget_entries
    cache.budget_bytes, cache.budget_entries = 20_000, 12
    yield cache
    cache.budget_bytes, cache.budget_entries = before


def test_threads_get_what_one_thread_gets(small_cache):
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
                    small_cache.forget(draw.choice(list(PATTERNS.values())))
                elif what < 0.6:
                    small_cache.clear()
                else:
                    small_cache.budget_bytes = draw.randrange(40_000)
        finally:
            calm.set()
        return []

    jobs = [disturb, *(partial(compute, seed) for seed in range(THREADS))]
    assert side_by_side(jobs, seconds=200) == [[]] * len(jobs)
