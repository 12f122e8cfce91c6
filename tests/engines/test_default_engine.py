"""engine=None on devices that Triton does not serve: a CPU that is taken for one runs every call on engine portable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import _engine_choice, masks
from flexdilated.cli import _device, main
from flexdilated.engines import Features
from flexdilated.masks.core import _devices
from flexdilated.masks.planning import _machine
from flexdilated.testing import check_attention_module
from tests.support.agreement import assert_agrees
from tests.support.strategies import cases, tensors


@contextmanager
def cpu_taken_for(kind: str) -> Iterator[None]:
    """The CPU counts as a device of another kind; no plan is left of before, and none stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_devices._KINDS, "cpu", _devices.device_kind(kind))
        patch.setattr(_machine, "_in_use", {})
        masks.cache().clear()
        _engine_choice._tell.cache_clear()
        yield
    masks.cache().clear()


@pytest.fixture(scope="module")
def as_mps() -> Iterator[None]:
    with cpu_taken_for("mps"):
        yield


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 1, 4, 90, 16).requires_grad_())


@pytest.mark.usefixtures("as_mps")
@given(st.data())
def test_any_pattern(data) -> None:
    """Output, lse and gradients in float64, which no fast kernel of an accelerator has."""
    case = data.draw(cases())
    drawn = data.draw(tensors(case))

    def attend(q, k, v):
        return fd.attend(q, k, v, case.twin.pattern, enable_gqa=True, return_lse=True, **case.sizes)

    assert_agrees(attend, drawn, case.counts())


@pytest.mark.slow
@pytest.mark.usefixtures("as_mps")
def test_a_module_is_checked() -> None:
    pattern = masks.longnet((16, 64), (1, 4)) & masks.causal()
    check_attention_module(lambda: fd.BlockSparseAttention(pattern), pattern, num_heads=4, head_dim=8, examples=5)


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


@pytest.mark.usefixtures("as_mps")
def test_what_the_commands_say(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(_device, "available_devices", lambda: ("cpu",))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if ", the default" in line]
    assert line.startswith("portable on cpu, the default")
    assert "serves training" in line
    assert main(["tune", str(tmp_path / "machine.json")]) == 2
    said = "tune measures engines aten and flex, and the default on cpu is portable"
    assert said in capsys.readouterr().err
