"""The rows of the device suite: their rules, their clock, and the way that they go on a device, pretended on CPU."""

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench._jobs import Job, Problem, Size
from bench._measures import Gap, Row
from bench._rules import GIGAPATH_5, LONGNET_5, LongNet, check_forward, check_training, dense
from bench.device import _device, _rows
from bench.device._device import Where
from bench.device._ranks import as_attention, on_ranks, ring_ranks, shards
from bench.device._rows import ALIGNED, CUT
from bench.device._suite import SUITE
from bench.peers import branch_loop, cpu_flash, cuda_flash
from tests.compilers import nothing_is_built  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[1]
TINY = LONGNET_5.shrunk(64)
SIZE = Size(1024, num_heads=4, head_dim=16, repeats=1)


def test_targets_are_those_of_the_page() -> None:
    """Each row's target, as docs/device.md states it."""
    page = (ROOT / "docs" / "device.md").read_text(encoding="utf-8")
    for name, row in SUITE.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        stated = [float(number) for number in re.findall(r"[≥≤] (\d[\d.]*)", line)]
        assert [target.bound for target in row.targets] == stated, line


@pytest.mark.parametrize("window", [ALIGNED, CUT, replace(ALIGNED, left=1, right=0), replace(CUT, left=3, right=9)])
def test_window_rule_and_count(window) -> None:
    num_tokens = 512
    (allowed,) = window.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=2)
    assert window.pairs(num_tokens=num_tokens, num_heads=2) == int(allowed.sum())
    tokens = torch.arange(num_tokens)
    mask_mod = window.pattern().bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens).mask_mod()
    assert torch.equal(mask_mod(0, 0, tokens[:, None], tokens[None]).expand_as(allowed[0]), allowed[0])


@pytest.mark.parametrize(
    "spec",
    [
        LONGNET_5.shrunk(256),
        LONGNET_5.shrunk(256).as_causal(),
        GIGAPATH_5.shrunk(256),
        LongNet("odd", (100, 7), (3, 2)),
    ],
    ids=lambda spec: spec.label,
)
def test_ranks_have_every_key_that_their_queries_reach(spec) -> None:
    """And the first and last of these are reached, but where a segment has an odd end or its first tokens are idle."""
    num_tokens, num_heads = 1000, 2
    parts = shards(spec, num_tokens, 8)
    assert [token for shard in parts for token in shard.queries] == list(range(num_tokens))
    for shard in parts:
        rows = torch.tensor(shard.queries)
        reached = torch.zeros(num_tokens, dtype=torch.bool)
        for allowed in spec.masks(rows, num_tokens=num_tokens, num_heads=num_heads):
            reached |= allowed.any(0).any(0)
        outside = torch.ones(num_tokens, dtype=torch.bool)
        outside[shard.keys.start : shard.keys.stop] = False
        assert not (reached & outside).any()
        assert shard.keys.stop - int(reached.nonzero().max()) <= max(spec.dilation_rates)


@pytest.mark.parametrize("spec", [TINY, TINY.as_causal()], ids=lambda spec: spec.label)
def test_ranks_compute_what_one_call_does(spec) -> None:
    check_training(on_ranks(spec, shards(spec, 1024, 8)), Problem.draw(SIZE), spec)


@pytest.mark.parametrize("spec", [TINY, TINY.as_causal(), LONGNET_5.shrunk(16)], ids=lambda spec: spec.label)
def test_ring_on_one_device_has_the_gradients_of_one_call(spec) -> None:
    """Also where a rank needs a third shard, and where it needs none but its own."""
    ranks = ring_ranks(spec, shards(spec, 1024, 8))
    assert max(len(rank.shards) for rank in ranks) >= 3
    check_training(as_attention(spec, ranks), Problem.draw(SIZE), spec)


@pytest.mark.slow
def test_other_kernels_behind_the_same_program() -> None:
    """On CPU the backend's name has no effect: the program is `attend`'s."""
    window = replace(CUT, left=40, right=9)
    problem = Problem.draw(SIZE)
    flash = _device.Way("FLASH", "flex", "FLASH").attention(window.pattern())
    check_forward(flash, problem, window)
    check_forward(_device.natural(window.pattern()), problem, window)


def test_loop_over_branches_takes_the_kernel_of_the_device() -> None:
    """Shapes and signature only: there is no such kernel on CPU."""
    q = torch.empty(1, 4, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = branch_loop(TINY.as_causal(), cuda_flash)(q, q, q)
    assert out.shape == q.shape
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.shape == q.shape


def test_dense_kernel_by_name() -> None:
    problem = Problem.draw(SIZE)
    check_forward(_device.sdpa("FLASH_ATTENTION", causal=True), problem, dense(1024, causal=True))
    with pytest.raises(RuntimeError, match="No viable backend"):
        _device.sdpa("CUDNN_ATTENTION", causal=True)(problem.q, problem.k, problem.v)


def test_device_clock(monkeypatch) -> None:
    """Prepared and flushed before the first event, waited for after the second; milliseconds become seconds."""
    order = []

    class Event:
        def __init__(self, *, enable_timing) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def elapsed_time(self, end) -> float:
            return 250.0

    monkeypatch.setattr(_device.torch.cuda, "Event", Event)
    monkeypatch.setattr(_device.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_device.torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(_device, "_flush_buffer", lambda device: SimpleNamespace(zero_=lambda: order.append("flush")))
    job = Job("job", lambda given: order.append(f"run {given}"), prepare=lambda: order.append("prepare") or 7)
    (timing,) = Where("cuda").time([job], repeats=1)
    assert timing.seconds == (0.25,)
    assert order == ["prepare", *["flush"] * _device._FLUSHED, "record", "run 7", "record", "wait"]


class Pretended(Where):
    """A device that takes the way of CUDA through every row; its tensors lie on the CPU."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.fixture
def pretended(monkeypatch) -> Pretended:
    """With all of CUDA that the suite calls, and the CPU's kernel for the loop over branches."""

    class Event:
        def __init__(self, *, enable_timing) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, end) -> float:
            return 1e3 * (end.at - self.at)

    stand_ins = {"Event": Event, "current_device": lambda: 0, "max_memory_allocated": lambda: 1 << 20}
    stand_ins |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(_device, "_flush_buffer", lambda device: torch.empty(8))
    monkeypatch.setattr(_rows, "cuda_flash", cpu_flash)
    return Pretended("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SUITE if name not in ("gpu_gathers", "gpu_merge", "gpu_ranks")])
def test_rows_go_the_way_of_a_device(pretended, name) -> None:
    """In `tiles` there are numbers; what FlexAttention cannot do on CPU, and FLASH, is reported in words."""
    small = SUITE[name].small
    rows = list(SUITE[name].run(pretended, **({**small, "size": SIZE} if name == "gpu_memory" else small)))
    numbers = [row.measure for row in rows if isinstance(row, Row)]
    gaps = {row.measure: row.reason for row in rows if isinstance(row, Gap)}
    assert numbers
    assert not any(row.not_verified for row in rows if isinstance(row, Row))
    for measure, reason in gaps.items():
        way = next(way for way in ("Triton", "FLASH") if f", {way}:" in measure)
        assert {"Triton": "flex ", "FLASH": "flash_attn.cute"}[way] in reason
    if name in ("gpu_forward", "gpu_backward", "gpu_vs_branch_loop", "gpu_memory", "gpu_million_tokens"):
        assert all(", tiles:" in measure for measure in numbers)
        assert len(gaps) == 2 * len(numbers)


def test_rehearsals_are_parts_that_run_once() -> None:
    parts = SUITE["gpu_backward"].rehearsals(small=False)
    assert [part["specs"][0].label for part in parts] == ["LongNet-5, full", "LongNet-5, causal"]
    assert all(part["size"].repeats == 1 for part in parts)
    assert len(SUITE["gpu_window"].rehearsals(small=True)) == 2
    assert len(SUITE["gpu_vs_natural_order"].rehearsals(small=False)) == 2
    assert len(SUITE["gpu_ranks"].rehearsals(small=True)) == 1
    assert SUITE["gpu_million_tokens"].rehearsals(small=True) == []
