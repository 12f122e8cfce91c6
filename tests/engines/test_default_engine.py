"""engine=None on devices that Triton does not serve: a CPU that is taken for one runs calls on engine portable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import flexdilated as fd
from flexdilated import _engine_choice, masks
from flexdilated.cli import _device, main
from flexdilated.engines import Features
from flexdilated.masks.core import _devices
from flexdilated.masks.planning import _machine


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


def test_what_the_commands_say(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(_device, "available_devices", lambda: ("cpu",))
    with cpu_taken_for("mps"):
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["tune", str(tmp_path / "machine.json")]) == 2
    (line,) = [line for line in lines if ", the default" in line]
    assert line.startswith("portable on cpu, the default")
    assert "serves training" in line
    said = "tune measures engines aten and flex, and the default on cpu is portable"
    assert said in capsys.readouterr().err
