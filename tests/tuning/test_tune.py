"""Tuning: what is measured agrees, wins and is remembered; nothing is measured unasked."""

from dataclasses import replace
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
from flexdilated.engines._tuned import TuningKey, chosen
from flexdilated.engines.aten import Program, _aten_op
from flexdilated.masks.core import device_kind
from flexdilated.masks.planning._candidates import ANYTHING, Candidates, Choice, way_of
from flexdilated.masks.planning._cost import OperandSizes
from flexdilated.masks.planning._planner import plan
from flexdilated.tuning import _tune, _tune_machine
from flexdilated.tuning._tune import BRANCH_BY_BRANCH, Inputs, measure, measure_options
from flexdilated.tuning._tune_machine import Sizes, device_text, measure_machine
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
        _tune, "_fastest", lambda measured: next((each for each in measured if each.name == name), measured[0])
    )
    return calls


def sides_run(monkeypatch) -> list[int]:
    """Fills with the block side of each call's program."""
    sides: list[int] = []
    real = _aten_op.program_of

    def program_of(*given, **options):
        program = real(*given, **options)
        sides.extend(step.calls.shape[2] for step in program.steps if step.calls is not None)
        return program

    monkeypatch.setattr(_aten_op, "program_of", program_of)
    return sides


@pytest.mark.parametrize(
    ("pattern", "backward"),
    [(WINDOW, False), (MIXTURE, True), (WINDOW | masks.strided(16), True)],
    ids=str,
)
def test_every_way_is_measured_and_predicted(pattern, backward):
    found = measure_options(bound(pattern), "cpu", torch.float32, D, H, backward)
    assert len(found) >= 2
    assert all(predicted > 0 and measured > 0 for _, predicted, measured in found)
    names = [name for name, _, _ in found]
    assert len(set(names)) == len(names)
    if pattern is MIXTURE:
        assert {"branch 1: compact", "branch 1: natural", "branch 2: compact", "nested"} <= {
            name.partition(",")[0] for name in names
        }
        assert any(name.startswith(BRANCH_BY_BRANCH) for name in names)
    if pattern is WINDOW:
        assert set(names) == {"masked", "natural", "natural, blocks of 64", "natural, blocks of 256"}


def test_a_backward_takes_longer_and_half_the_dtype_moves_less():
    def predicted(dtype: torch.dtype, batch: int = 1, *, backward: bool = False) -> float:
        x = Inputs.of(bound(), num_kv_heads=H, head_dim=D, dtype=dtype, device=CPU, batch=batch)
        (option, *_) = plan(bound(), operands=x.operands).options[0]
        return _tune.predicted_seconds(option, x, backward=backward)

    forward = predicted(torch.float32)
    assert predicted(torch.float32, backward=True) == pytest.approx(forward * 3.6)
    assert predicted(torch.float32, 2) == 2 * forward
    assert predicted(torch.bfloat16) < forward


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
    calls, sides = winning(monkeypatch, "natural, blocks of 256"), sides_run(monkeypatch)
    before = fd.attend(q, k, v, WINDOW)
    assert calls == []
    for _ in range(2):
        torch.testing.assert_close(fd.attend(q, k, v, WINDOW, autotune=True), exact, rtol=1e-4, atol=1e-5)
        assert calls == [False]
    call = Call(WINDOW.text, H, H, N, N, 0, 0, 0, H, 1, ())
    assert chosen(call, q) == Choice(False, (("natural", (256,)),))
    misses = masks.cache().stats().misses
    after = fd.attend(q, k, v, WINDOW)
    assert masks.cache().stats().misses == misses
    assert sides == [256, 256, 256]  # the call before needed no lists
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert chosen(call, q.double()) is None, "another dtype is another call"
    assert chosen(call, q[..., :4]) is None
    assert chosen(call._replace(num_keys=9), q) is None


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
    for leaves in (qkv(), qkv(wants_grad=True)):
        fd.attend(*leaves, WINDOW, autotune=True)
        assert calls == [False, True]


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


def test_a_choice_that_does_not_fit_is_left_to_the_planner():
    usual = plan(bound())
    choices = [Choice(False, ((layout, sides),)) for layout, sides in (("hexagonal", (128,)), ("natural", (127,)))]
    for choice in (*choices, Choice(False, ()), Choice(True, (("nested", ()),))):
        assert plan(bound(), choice=choice).terms == usual.terms


def test_a_named_block_size_is_kept(monkeypatch):
    winning(monkeypatch, "natural, blocks of 256")
    q, k, v = qkv()
    fd.attend(q, k, v, WINDOW, autotune=True, block_size=32)
    call = Call(WINDOW.text, H, H, N, N, 0, 0, 0, H, 1, (32, 32))
    assert chosen(call, q) is not None
    assert chosen(call._replace(block_size=()), q) is None


def test_nothing_is_measured_in_a_graph_or_on_fake_tensors(monkeypatch):
    monkeypatch.setattr(_tune, "measure", lambda *_, **how: pytest.fail("measured"))
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: fd.attend(q, k, v, WINDOW, autotune=True), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), fd.attend(q, k, v, WINDOW))
    with FakeTensorMode() as mode:
        assert fd.attend(*(mode.from_tensor(x) for x in (q, k, v)), WINDOW, autotune=True).shape == q.shape


@pytest.mark.parametrize(("engine", "dynamic"), [(None, False), ("aten", True), ("flex", True)])
def test_a_graph_uses_what_was_found(engine, dynamic, monkeypatch):
    """The program that won is there already, also where the graph's sizes are open."""
    winning(monkeypatch, "natural, blocks of 256")
    fd.attend(*qkv(), WINDOW, autotune=True)
    torch.compiler.reset()
    attend = partial(fd.attend, pattern=WINDOW, **({"engine": engine} if engine else {}))
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
    with pytest.raises(TypeError, match="autotune must be True or False"):
        fd.BlockSparseAttention(WINDOW, autotune=1)


def test_constants_are_measured_through_the_engine():
    found = measure_machine(CPU, seconds=0.0, sizes=SMALL)
    assert (found.kind, found.machine.source) == ("cpu", device_text(CPU))
    assert found.machine.sides == (64, 128, 256)
    assert set(found.spread) >= {"dense", "causal", "copies", "launch", "plain blocks of 64", "masked blocks of 256"}
    assert all(ratio >= 1 for ratio in found.spread.values())
    assert found.date[:2] == "20"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_constants_are_measured_in_the_dtype_that_plans_take_them_for(kind, monkeypatch):
    """On the CPU here, in the dtype of each kind: attention, and copies, whose amount is in its bytes."""
    dtype, measured = device_kind(kind).dtype, set()
    assert dtype == {"cpu": torch.float32, "cuda": torch.bfloat16}[kind]
    assert dtype.itemsize == OperandSizes.usual_on(kind).element_bytes
    monkeypatch.setattr(_tune_machine, "device_kind", lambda _: replace(device_kind("cpu"), dtype=dtype))
    real = _tune_machine.trial
    monkeypatch.setattr(
        _tune_machine, "trial", lambda plan, x, **how: (measured.add(x.q.dtype), real(plan, x, **how))[1]
    )
    works = _tune_machine._works(CPU, SMALL)
    assert measured == {dtype}
    assert works["copies"].amount == 11 * 64 * SMALL.num_heads * 64 * dtype.itemsize


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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["x.json", "--device", "abacus"], "--device must be one of cpu"),
        (["x.json", "--seconds", "0"], "--seconds must be above 0"),
        (["x.json", "--seconds", "nan"], "--seconds must be above 0"),
        (["x.txt"], "FILE writes .json files; got x.txt"),
        (["nowhere/x.json"], "FILE must be in a folder that exists"),
    ],
)
def test_tune_refuses(given, says, capsys):
    assert main(["tune", *given]) == 2
    assert says in capsys.readouterr().err
