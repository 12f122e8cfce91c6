"""Tuning: what is measured agrees, wins and is remembered; nothing is measured unasked."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flexdilated as fd
from flexdilated import masks
from flexdilated.cli import main
from flexdilated.engines import _tuned
from flexdilated.engines._call import Call
from flexdilated.engines._tuned import TuningKey, measured_choice
from flexdilated.engines.aten import Program
from flexdilated.masks.planning._candidates import ANYTHING, Candidates, Choice, way_of
from flexdilated.masks.planning._cost import OperandSizes
from flexdilated.masks.planning._planner import plan
from flexdilated.tuning import _tune, _tune_machine
from flexdilated.tuning._tune import BRANCH_BY_BRANCH, Inputs, measure, measure_options
from flexdilated.tuning._tune_machine import Sizes
from tests.support.compilers import as_it_is

CPU = torch.device("cpu")
N, H, D = 256, 2, 8
SMALL = Sizes(256, 2, 128)
MIXTURE = masks.longnet([64, 128], [1, 2])
WINDOW = masks.local_window(left=70, right=0)


@pytest.fixture(autouse=True)
def as_before():
    _tuned.results.clear()
    yield
    _tuned.results.clear()
    masks.set_machine(None)


def qkv(*, wants_grad: bool = False, tokens: int = N) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, H, tokens, D, generator=torch.Generator().manual_seed(0)).unbind()
    q, k, v = (x.clone().requires_grad_(wants_grad) for x in (q, k, v))
    return q, k, v


def inputs() -> Inputs:
    q, k, v = qkv()
    return Inputs(q, k, v, q)


def bound(pattern=WINDOW):
    return pattern.bind(num_heads=H, num_queries=N, num_keys=N)


def winning(monkeypatch, name: str) -> list[bool]:
    """Let the option of this name win, if it is measured; returns which calls measured, and whether a backward."""
    calls: list[bool] = []
    real = _tune.measure

    def noted(*given, backward, **how):
        calls.append(backward)
        return real(*given, backward=backward, **how)

    monkeypatch.setattr(_tune, "measure", noted)
    monkeypatch.setattr(
        _tune, "_fastest_option", lambda measured: next((each for each in measured if each.name == name), measured[0])
    )
    return calls


def test_every_way_is_measured_and_predicted():
    for pattern, backward, names in (
        (WINDOW, False, {"masked", "natural", "natural, blocks of 64", "natural, blocks of 256"}),
        (MIXTURE, True, {"branch 1: compact", "branch 1: natural", "branch 2: compact", "nested"}),
    ):
        found = measure_options(bound(pattern), "cpu", torch.float32, D, H, backward)
        assert all(predicted > 0 and measured > 0 for _, predicted, measured in found)
        assert len({name for name, _, _ in found}) == len(found)
        assert names <= {name for name, _, _ in found} | {name.partition(",")[0] for name, _, _ in found}
    assert any(name.startswith(BRANCH_BY_BRANCH) for name, _, _ in found)


def test_ways_that_disagree_are_an_error(monkeypatch):
    real = Program.forward

    def wrong(program, q, k, v, scale):
        out, lse = real(program, q, k, v, scale)
        sides = {step.calls.shape[2] for step in program.steps if step.calls is not None}
        return (out * 1.01 if 256 in sides else out), lse

    monkeypatch.setattr(Program, "forward", wrong)
    with pytest.raises(RuntimeError, match="ways to compute one attention must agree"):
        measure(bound(), inputs(), backward=False)
    monkeypatch.setattr(Program, "forward", lambda *given: (x * torch.nan for x in real(*given)))
    with pytest.raises(RuntimeError, match="must agree"):
        measure(bound(), inputs(), backward=False)


def test_autotune_measures_once_and_calls_without_it_follow(monkeypatch):
    q, k, v = qkv()
    exact = fd.attend(q, k, v, WINDOW, engine="reference")
    calls = winning(monkeypatch, "natural, blocks of 256")
    fd.attend(q, k, v, WINDOW)
    assert calls == []
    for _ in range(2):
        torch.testing.assert_close(fd.attend(q, k, v, WINDOW, autotune=True), exact, rtol=1e-4, atol=1e-5)
        assert calls == [False]
    call = Call(WINDOW.text, H, H, N, N, 0, 0, 0, H, 1, ())
    assert measured_choice(call, q) == Choice(False, (("natural", (256,)),))
    misses = masks.cache().stats().misses
    torch.testing.assert_close(fd.attend(q, k, v, WINDOW), exact, rtol=1e-4, atol=1e-5)
    assert masks.cache().stats().misses == misses, "the plan that won is there"
    assert measured_choice(call, q.double()) is None, "another dtype is another call"
    assert measured_choice(call._replace(num_keys=9), q) is None


def test_a_gradient_asks_for_the_backward_too(monkeypatch):
    calls = winning(monkeypatch, "natural")
    fd.attend(*qkv(), WINDOW, autotune=True)
    with torch.no_grad():
        fd.attend(*qkv(wants_grad=True), WINDOW, autotune=True)
    assert calls == [False]
    leaves = qkv(wants_grad=True)
    out = fd.attend(*leaves, WINDOW, autotune=True)
    assert calls == [False, True]
    found = torch.autograd.grad(out.square().sum(), leaves)
    exact = torch.autograd.grad(fd.attend(*leaves, WINDOW, engine="reference").square().sum(), leaves)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pattern", [MIXTURE, MIXTURE & masks.causal(), WINDOW | masks.strided(16)], ids=str)
def test_every_choice_gives_the_same_result(pattern):
    """Whatever wins, forward and backward are those of the definition."""
    leaves = qkv(wants_grad=True)
    out = fd.attend(*leaves, pattern, engine="reference")
    exact = (out, *torch.autograd.grad(out.square().sum(), leaves))
    candidates = Candidates.of(bound(pattern), masks.machine(), ANYTHING, OperandSizes(head_dim=D))
    call = Call(pattern.text, H, H, N, N, 0, 0, 0, H, 1, ())
    choices = [
        Choice(False, tuple(way_of(options[index % len(options)]) for options in candidates.branches))
        for index in range(4)
    ]
    choices += [Choice(True, (way_of(option),)) for option in candidates.together]
    for choice in choices:
        planned = plan(bound(pattern), choice=choice, operands=OperandSizes(head_dim=D))
        assert tuple(way_of(options[0]) for options in planned.options) == choice.ways
        _tuned.results[TuningKey.of(call, leaves[0])] = choice, True
        out = fd.attend(*leaves, pattern)
        found = (out, *torch.autograd.grad(out.square().sum(), leaves))
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


def test_nothing_is_measured_in_a_graph_or_on_fake_tensors(monkeypatch):
    monkeypatch.setattr(_tune, "measure", lambda *_, **how: pytest.fail("measured"))
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: fd.attend(q, k, v, WINDOW, autotune=True), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), fd.attend(q, k, v, WINDOW))
    with FakeTensorMode() as mode:
        assert fd.attend(*(mode.from_tensor(x) for x in (q, k, v)), WINDOW, autotune=True).shape == q.shape


@pytest.mark.parametrize(("engine", "dynamic"), [("aten", False), ("flex", True)])
def test_a_graph_uses_what_was_found(engine, dynamic, monkeypatch):
    """The program that won is there already, also where the graph's sizes are open."""
    winning(monkeypatch, "natural, blocks of 256")
    fd.attend(*qkv(), WINDOW, autotune=True)
    torch.compiler.reset()
    attend = partial(fd.attend, pattern=WINDOW, engine=engine)
    compiled = torch.compile(attend, fullgraph=True, backend=as_it_is, dynamic=dynamic)
    misses = masks.cache().stats().misses
    torch.testing.assert_close(compiled(*qkv()), fd.attend(*qkv(), WINDOW))
    assert dynamic or masks.cache().stats().misses == misses


def test_modules_pass_it_on(monkeypatch):
    calls = winning(monkeypatch, "compact")
    assert not fd.DilatedAttention([64], [2]).autotune
    module = fd.DilatedAttention([64], [2], autotune=True)
    module(*qkv())
    fd.BlockSparseAttention(WINDOW, autotune=True)(*qkv())
    assert calls == [False, False]


def test_an_accelerator_is_named_and_not_the_cpu_beside_it(monkeypatch):
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"Arc {device.index}")
    names = [_tune_machine.device_text(torch.device(each)) for each in ("xpu:1", "mps")]
    assert names == [f"Arc 1, torch {torch.__version__}", f"mps, torch {torch.__version__}"]


def test_tune_writes_constants_that_plans_use(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_tune_machine, "ON_CPU", SMALL)
    path = tmp_path / "machine.json"
    assert main(["tune", str(path), "--seconds", "0.01"]) == 0
    printed = capsys.readouterr().out
    assert "neighbouring blocks of 64" in printed
    assert printed.endswith(f"Stored in {path}. Plans use it after masks.set_machine({str(path)!r}).\n")
    builtin = masks.machine()
    masks.set_machine(path)
    assert masks.machine() != builtin
    assert masks.machine().source == str(path)
    assert masks.machine().sides == (64, 128, 256)
