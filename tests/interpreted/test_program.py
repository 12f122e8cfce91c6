"""The flex engine's program as it is made for an H200: its kernels, its compilations, its time on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import flexdilated as fd
from flexdilated.distributed import Sharding
from flexdilated.distributed._ring import turns_of
from flexdilated.engines import PlacedCall, WholeRows
from flexdilated.masks.orders import Placement
from flexdilated.memory import AttentionSize, LiveBytes, attention_memory
from tests.interpreted.emulated_cuda import CALLED, H200, WATCHERS, describe, host_reads, is_template, require
from tests.support.compilers import without_inductor
from tests.support.ladders import LONGNET_4, LONGNET_5

require(interpreted=False)

NAME = "flex_program"
K = 1024


def drawn(
    batch: int, heads: int, tokens: int, dim: int, *, trains: bool = False, value_dim: int | None = None
) -> list[Tensor]:
    shapes = ((batch, heads, tokens, each) for each in (dim, dim, value_dim or dim))
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda").requires_grad_(trains) for shape in shapes]


@pytest.fixture(autouse=True)
def on_an_h200() -> None:
    describe(H200)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["full", "causal"])
def test_launches(name: str, record_property) -> None:
    """LongNet-5 at 128K tokens: five attention kernels a pass, and few others beside them."""
    pattern = fd.masks.longnet(*LONGNET_5)
    pattern = pattern & fd.masks.causal() if name == "causal" else pattern
    x = drawn(1, 16, 128 * K, 128, trains=True)
    CALLED.clear()
    out = fd.attend(*x, pattern)
    forward = [is_template(kernel) for kernel in CALLED]
    CALLED.clear()
    torch.autograd.grad(out, x, torch.empty_like(out))
    backward = [is_template(kernel) for kernel in CALLED]
    assert (sum(forward), sum(backward)) == (5, 5)
    beside = forward.count(False), forward.count(False) + backward.count(False)
    for way, found, target in zip(("forward", "forward and backward"), beside, (12, 25), strict=True):
        figure = {"figure": found, "target": target}
        record_property(f"{NAME}: kernels beside attention, LongNet-5, {name}, 128K, {way}", figure)
        assert found <= target


FULL_3, FULL_4 = fd.masks.longnet((256, 512, K), (1, 2, 4)), fd.masks.longnet((512, K, 2 * K, 4 * K), (1, 2, 4, 8))
HELD = {
    "causal": pytest.param(fd.masks.causal(), marks=pytest.mark.thorough),
    "dilated": pytest.param(fd.masks.dilated(K, 4), marks=pytest.mark.thorough),
    "LongNet-2": fd.masks.longnet((256, K), (1, 4)),
    "LongNet-3": pytest.param(FULL_3, marks=pytest.mark.thorough),
    "LongNet-4, causal": pytest.param(FULL_4 & fd.masks.causal(), marks=pytest.mark.thorough),
}


@pytest.mark.parametrize("value_dim", [64, pytest.param(32, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("pattern", HELD.values(), ids=HELD)
def test_memory_and_launches(pattern: Any, value_dim: int) -> None:
    """What the program's buffers come to, against what `plan` says; that of a backward of many branches is a bound.

    Kernels that are launched are few beside those of attention, one a branch in the forward and two in the backward.
    """
    x = drawn(1, 4, 4 * K, 64, trains=True, value_dim=value_dim)
    with torch.no_grad():
        fd.attend(*x, pattern, return_lse=True)  # compiles
        with held(*x) as inference:
            fd.attend(*x, pattern, return_lse=True)
    out, _ = fd.attend(*x, pattern, return_lse=True)
    torch.autograd.grad(out, x, torch.empty_like(out))
    with held(*x) as training:
        CALLED.clear()
        out, _ = fd.attend(*x, pattern, return_lse=True)
        forward, kept, launches = training.peak, training.live, [len(CALLED)]
        training.restart()
        training._track(grad := torch.empty_like(out))
        torch.autograd.grad(out, x, grad)
        launches.append(len(CALLED))
    size = AttentionSize(4 * K, 4, 64, torch.bfloat16, value_dim=value_dim)
    found = attention_memory(pattern, size, device="cuda")
    assert found.inference_peak == pytest.approx(inference.peak, rel=0.1)
    assert (found.forward_peak, found.kept) == pytest.approx((forward, kept), rel=0.1)
    assert 0.9 < found.backward_peak / training.peak < 1.5
    parts = len(pattern.branches())
    assert launches[0] <= 2 * parts + 2, "kernels of the forward"
    assert launches[1] <= 4 * parts + 4, "kernels of both; torch 2.15 does not join those of dk and dv"


@contextmanager
def held(*x: Tensor) -> Iterator[LiveBytes]:
    """The live bytes of these and of all buffers that compiled programs make: no mode, in which nothing compiles."""
    live = LiveBytes(*x)
    WATCHERS.append(live._track)
    yield live
    WATCHERS.clear()


@pytest.mark.thorough
def test_host_time(record_property) -> None:
    """Of an eager forward whose plan is cached, without its kernels: what a device would have to wait for."""
    x = drawn(1, 16, 16 * K, 64)
    pattern, seconds = fd.masks.longnet(*LONGNET_5), []
    with torch.no_grad():
        for _ in range(300):
            start = perf_counter()
            fd.attend(*x, pattern)
            seconds.append(perf_counter() - start)
    CALLED.clear()
    found = median(seconds[100:])
    record_property(f"{NAME}: ms of the host, LongNet-5, forward", {"figure": round(1e3 * found, 3), "target": 0.5})
    assert found < 5e-3, "ten times what it should be"


IDS = torch.arange(300) // 70


def table(num_tokens: int) -> Tensor:
    """Two blocks of 64 keys before each query's own."""
    return torch.arange(num_tokens)[None, :, None] // 64 - torch.tensor([1, 2])


def step_of_a_model(padding: Tensor | None) -> Callable[[], Tensor]:
    ladder: dict[str, Any] = {"segment_lengths": (64, 128), "dilation_rates": (1, 2)}
    model = fd.LongNet(fd.LongNetConfig(embed_dim=32, num_heads=2, depth=3, vocab_size=None, **ladder)).to("cuda")
    return partial(model, torch.zeros(2, 300, 32, device="cuda"), key_padding_mask=padding)


def three_layers(x: Tensor, ids: Tensor) -> Tensor:
    pattern = fd.masks.longnet((64, 128), (1, 2)) & fd.masks.documents(ids.cpu())
    for _ in range(3):
        x = fd.attend(x, x, x, pattern)
    return x


def three_selected(x: Tensor, chosen: Tensor) -> Tensor:
    """Each layer with a choice of its own."""
    pattern = (fd.masks.selected_blocks("chosen", block=(1, 64), most=2) | fd.masks.chunked(64)) & fd.masks.causal()
    for _ in range(3):
        x = fd.attend(x, x, x, pattern, bindings={"chosen": chosen})
        chosen = chosen // 2
    return x


def step_of_calls(function: Callable[..., Tensor], ids: Tensor) -> Callable[[], Tensor]:
    return partial(function, drawn(1, 2, 300, 16)[0], ids)


STEPS = {
    "a model": (0, lambda: step_of_a_model(None)),
    "a model, padding": (1, lambda: step_of_a_model((IDS > 3).expand(2, -1).to("cuda"))),
    "calls, documents": (1, lambda: step_of_calls(three_layers, IDS.to("cuda"))),
    "calls, documents on the CPU": (0, lambda: step_of_calls(three_layers, IDS)),
    "a graph, documents": (
        1, lambda: step_of_calls(torch.compile(three_layers, fullgraph=True), IDS.to("cuda"))
    ),
    "calls, selected blocks": (0, lambda: step_of_calls(three_selected, table(300).to("cuda"))),
    "a graph, selected blocks": (
        0, lambda: step_of_calls(torch.compile(three_selected, fullgraph=True), table(300).to("cuda"))
    ),
}  # fmt: skip


QUICK = ("calls, documents", "a graph, selected blocks")
BUILT = "a model, padding"  # the graphs of others run as they are traced: their reads are operations of them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in STEPS]
)
def test_reads_of_the_host(name: str, record_property) -> None:
    """What a step of three layers waits for on the device, once its plan is cached."""
    most, make = STEPS[name]
    found = []
    with torch.no_grad(), nullcontext() if name == BUILT else without_inductor():
        step = make()
        for _ in range(3):
            before = host_reads()
            step()
            found.append(host_reads() - before)
    record_property(f"{NAME}: reads of the host a step of 3 layers, {name}", {"figure": found[-1], "target": 1})
    assert found[-1] == most


MODES: dict[str, Callable] = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


def attend_anyhow(pattern: Callable[[int], Any], lengths: list[int]) -> None:
    """Any length, batch and mode, with and without the lse."""
    for tokens, batch, (mode, context), lse in product(lengths, (4, 1, 2), MODES.items(), (False, True)):
        with context():
            fd.attend(*drawn(batch, 2, tokens, 16, trains=mode == "grad"), pattern(tokens), return_lse=lse)


def longnet(num_tokens: int) -> Any:
    return fd.masks.longnet(*LONGNET_4) & fd.masks.causal()


def moba(num_tokens: int) -> Any:
    chosen = fd.masks.selected_blocks(table(num_tokens).clamp(min=-1).to("cuda"), block=(1, 64), most=2)
    return (chosen | fd.masks.chunked(64)) & fd.masks.causal()


PATTERNS = {"LongNet-4, causal": longnet, "BigBird": fd.masks.recipes.bigbird, "MoBA": moba}


@pytest.fixture
def traced_only() -> Iterator[None]:
    """How many functions there are is decided by tracing."""
    with without_inductor():
        yield


LENGTHS = [("BigBird", 3), *(pytest.param(name, 50, marks=pytest.mark.thorough) for name in PATTERNS)]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("name", "number"), LENGTHS)
def test_functions(name: str, number: int, record_property) -> None:
    """A compiled function belongs to a structure: lengths, batches and modes make few."""
    before = counters["stats"]["unique_graphs"]
    attend_anyhow(PATTERNS[name], [Random(index).randint(150, 700) for index in range(number)])
    found = counters["stats"]["unique_graphs"] - before
    target = 16 if name == "MoBA" else 8  # whose own blocks are a program beside that of the table
    record_property(f"{NAME}: functions compiled, {name}, {number} lengths", {"figure": found, "target": target})
    assert 0 < found <= target


@pytest.mark.thorough
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_functions_of_a_ring(order: Any, record_property) -> None:
    """Of eight ranks, each with what comes to it turn by turn, forward and backward: all in one process here."""
    text, before = longnet(0).text, counters["stats"]["unique_graphs"]
    split, heads = Sharding(1025, 8, order=order), {"heads": range(2), "num_heads_global": 2}
    for rank in range(8):
        turns = turns_of(longnet(0), split, rank, **heads)
        for runs in (split.ranges(rank), *(turn.received.positions for turn in turns if turn.received)):
            place = Placement(split.ranges(rank), (runs,), complete=False, num_tokens=1025)
            call = PlacedCall(text, place, 0.25, 0, 2, "flex")
            q, k, v = drawn(1, 2, place.num_queries, 16)[0], *drawn(1, 2, place.num_keys, 16)[1:]
            with torch.no_grad():
                out, lse = call.forward(q, k, v, [])
            assert lse is not None
            call.backward(q, k, v, [], WholeRows(out, lse, torch.zeros_like(out), None))
    found = counters["stats"]["unique_graphs"] - before
    record_property(f"{NAME}: functions compiled, ring of 8, {order}", {"figure": found, "target": 8})
    assert 0 < found <= 8
