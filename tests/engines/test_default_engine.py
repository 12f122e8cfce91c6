"""engine=None on devices that Triton does not serve, and the log at DEBUG: engines, plans, what was built."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import flexdilated as fd
from flexdilated import _engine_choice, masks
from flexdilated.engines import Features
from flexdilated.masks.core import _devices
from flexdilated.masks.plan_cache import _cache
from flexdilated.masks.plan_cache._cache import Cache
from flexdilated.masks.planning import _machine


@contextmanager
def cpu_taken_for(kind: str) -> Iterator[None]:
    """The CPU counts as a device of another kind; no plan is left of before, and none stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_devices._KINDS, "cpu", _devices.device_kind(kind))
        patch.setattr(_machine, "_in_use", {})
        masks.cache().clear()
        _engine_choice._log_once.cache_clear()
        yield
    masks.cache().clear()


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 1, 4, 90, 16).requires_grad_())


@pytest.mark.parametrize(
    ("kind", "why", "refused"),
    [
        (
            "mps",
            "the default on cpu",
            "flex runs Triton's kernels, on CUDA and XPU; got tensors on cpu. engine='portable' serves them",
        ),
        (
            "xpu",
            "as flex needs Triton, and torch finds none; engine='portable' serves cpu",
            "flex needs Triton, and torch finds none; engine='portable' serves cpu",
        ),
    ],
)
def test_portable_is_taken_and_says_why(kind, why, refused, inputs, monkeypatch, caplog) -> None:
    monkeypatch.setattr(_engine_choice, "_has_triton", lambda: False)
    caplog.set_level("DEBUG", "flexdilated")
    with cpu_taken_for(kind):
        fd.attend(*inputs, masks.causal())
        (line,) = [line for line in caplog.messages if line.startswith("engine ")]
        assert line.startswith(f"engine 'portable', {why}: causal(), 4 heads")
        with pytest.raises(ValueError, match=rf"^{re.escape(refused)}$"):
            fd.attend(*inputs, masks.causal(), engine="flex")
        with pytest.raises(ValueError, match=r"aten runs ATen's kernels on CPU and CUDA.*'portable' serves them"):
            fd.attend(*inputs, masks.causal(), engine="aten")


def test_flex_is_taken_where_triton_is(inputs, monkeypatch) -> None:
    monkeypatch.setattr(_engine_choice, "_has_triton", lambda: True)
    with cpu_taken_for("xpu"):
        assert _engine_choice.choose_engine(None, *inputs, masks.causal(), Features(1.0)) == "flex"
        narrow = [x[..., :8] for x in inputs]
        assert _engine_choice.choose_engine(None, *narrow, masks.causal(), Features(1.0)) == "portable"


pytestmark = pytest.mark.usefixtures("without_masks")

LONGNET = masks.longnet([16, 64], [1, 4]) & masks.causal()


@pytest.fixture
def told() -> Iterator[Callable[[], list[str]]]:
    """A function that gives the lines so far."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("flexdilated")
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    _engine_choice._log_once.cache_clear()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lambda: list(lines)
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.fixture
def own_cache(monkeypatch) -> Cache:
    cache = Cache(1 << 20)
    monkeypatch.setattr(_cache, "_cache", cache)
    return cache


def qkv(heads: int = 4, tokens: int = 130) -> torch.Tensor:
    return torch.randn(3, 1, heads, tokens, 16)


def test_a_call_tells_engine_plan_and_what_was_built(told, own_cache) -> None:
    fd.attend(*qkv(), LONGNET)
    lines = told()
    assert lines[0] == (
        "engine 'aten', the default on cpu: longnet((16, 64), (1, 4)) & causal(), 4 heads, 130 queries, 130 keys, "
        "head dim 16, torch.float32 on cpu"
    )
    assert lines[1].startswith("planned longnet((16, 64), (1, 4)) & causal(), 4 heads, 130 queries, 130 keys, on cpu: ")
    assert lines[1].endswith(" ms predicted")
    assert sum(line.startswith("chose ") for line in lines) == 2  # a line a branch
    built = [line for line in lines if line.startswith("built ")]
    assert len(built) == own_cache.stats().misses
    assert built[0].startswith("built plan of longnet((16, 64), (1, 4)) & causal(): ")
    assert built[-1].startswith("built aten of longnet((16, 64), (1, 4)) & causal(): ")
    assert all(line.endswith(" ms") for line in built)


def test_the_second_call_tells_nothing(told, own_cache) -> None:
    q, k, v = qkv()
    fd.attend(q, k, v, LONGNET)
    before = told()
    fd.attend(q, k, v, LONGNET)
    assert told() == before
    fd.attend(q, k, v, LONGNET, engine="aten")  # another choice of the engine, and nothing to build
    assert told()[len(before) :] == [before[0].replace("the default on cpu", "as the caller names it")]


def test_nothing_is_told_where_debug_is_off(caplog, own_cache) -> None:
    with caplog.at_level(logging.INFO, logger="flexdilated"):
        fd.attend(*qkv(), LONGNET)
        own_cache.budget_entries = 1
    assert caplog.records == []


def test_whoever_handles_a_line_may_use_the_cache(own_cache, monkeypatch) -> None:
    """No line is told under a lock: a handler that asks for statistics, or has something built, gets its answer."""
    lines: list[str] = []

    def handle(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        own_cache.stats()
        own_cache.get("asked by the handler", lambda: 1, lambda _: 1)

    def stir() -> None:
        fd.attend(*qkv(), LONGNET)
        own_cache.budget_entries = 2
        fd.attend(*qkv(tokens=60), masks.causal())
        own_cache.forget(masks.causal())
        own_cache.clear()

    logger = logging.getLogger("flexdilated")
    monkeypatch.setattr(logger, "handle", handle)  # without the lock of a handler, which a deadlock would hold
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.manager._clear_cache()
    worker = threading.Thread(target=stir, daemon=True)
    worker.start()
    worker.join(250)
    logger.manager._clear_cache()
    assert not worker.is_alive(), "deadlock"
    assert all(word in " ".join(lines) for word in ("planned", "built", "evicted", "dropped"))


def test_tracing_tells_nothing_and_breaks_no_graph(told, own_cache) -> None:
    """At DEBUG too, a compiled call is one graph; what runs inside its operators is told."""
    torch.compiler.reset()
    q, k, v = qkv(tokens=97)
    compiled = torch.compile(lambda q, k, v: fd.attend(q, k, v, LONGNET), fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    assert not [line for line in told() if line.startswith("engine ")]
    assert [line for line in told() if line.startswith("built aten ")]
    torch.testing.assert_close(out, fd.attend(q, k, v, LONGNET))
