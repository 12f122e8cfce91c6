"""`python -m flexdilated doctor`: what it says, and the status it ends with."""

import importlib.util
import re
import sys

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, counters

from flexdilated import masks
from flexdilated.cli import _doctor, _flash, main


def examine(capsys) -> tuple[int, str]:
    status = main(["doctor"])
    return status, capsys.readouterr().out


def findings(printed: str) -> dict[str, str]:
    """What stands behind each subject; columns are two spaces or more apart."""
    rows = (re.split(" {2,}", line, maxsplit=1) for line in printed.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_a_sound_machine(capsys) -> None:
    """Each finding against what Python, torch and the cache say themselves."""
    before = masks.cache().stats()
    status, printed = examine(capsys)
    found = findings(printed)
    assert status == 0
    assert found["python"] == sys.version.split()[0]
    assert found["torch"].split(",")[0] == torch.__version__
    assert f"{torch.get_num_threads()} CPU threads" in found["devices"]
    for package in ("tqdm", "matplotlib", "platformdirs"):
        is_there = importlib.util.find_spec(package) is not None
        assert (found[package] == "found") == is_there
    after = masks.cache().stats()
    assert [int(each) for each in re.findall(r"(\d+) (?:entries|hits|misses)", found["plan cache"])] == [
        after.entries,
        after.hits,
        after.misses,
    ]
    assert after.hits + after.misses > before.hits + before.misses


def test_the_error_of_the_trial_is_that_of_the_engine(capsys, monkeypatch) -> None:
    """Attention that is off by a known amount is reported with that amount, and by less than the limit as right."""
    right = _doctor._forward_backward
    for error, status in ((0.25, 1), (2e-4, 1), (1e-6, 0)):

        def shifted(inputs, *, engine, error=error):
            out, grad = right(inputs, engine=engine)
            return (out, grad) if engine else (out + error, grad)

        monkeypatch.setattr(_doctor, "_forward_backward", shifted)
        found, printed = examine(capsys)
        assert found == status
        told = re.findall(r"(\d\.\de[+-]\d+)", findings(printed)["attention on cpu"])
        assert [float(each) for each in told] == ([pytest.approx(error, rel=0.06)] if status else [])


def test_without_a_compiler(capsys, monkeypatch) -> None:
    """Attention still works: tiles needs none."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    status, printed = examine(capsys)
    assert status == 0
    found = findings(printed)
    assert "no-such-compiler" in found["C++ compiler"]
    assert "flex" not in found["engines on cpu"]
    assert found["attention on cpu"] == "works"


def test_flash_attention_is_named_and_left_alone(capsys, monkeypatch) -> None:
    """Which implementation is active holds for the process: the doctor reads it."""
    assert "FA2 is active" in examine(capsys)[1]
    assert "no flash_attn.cute" in examine(capsys)[1]
    monkeypatch.setattr(_flash.torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(_doctor, "is_flash_backend_importable", lambda: True)
    printed = examine(capsys)[1]
    assert "FA3 is active" in printed
    assert "flash_attn.cute is importable" in printed


def test_flash_attention_of_an_older_torch(monkeypatch) -> None:
    for name in ("current_flash_attention_impl", "list_flash_attention_impls"):
        monkeypatch.delattr(_flash.torch.nn.attention, name, raising=False)
    assert (_flash.active_implementation(), _flash.other_implementations()) == ("FA2", [])


@pytest.mark.parametrize(("missing", "extra"), [("tqdm", "demo"), ("matplotlib", "plot")])
def test_without_an_extra(capsys, monkeypatch, missing: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    status, printed = examine(capsys)
    assert status == 0
    assert f"{missing} is not installed" in printed
    assert f'pip install "flexdilated[{extra}]"' in printed


def test_environment(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "4096")
    monkeypatch.setenv("FLEXDILATED_CASH_BYTES", "4096")
    status, printed = examine(capsys)
    assert status == 0
    assert "is read as 4096" in printed
    assert "FLEXDILATED_CASH_BYTES" in printed
    assert "is unknown, and has no effect" in printed


def test_environment_that_does_not_parse(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "lots")
    status, printed = examine(capsys)
    assert status == 1
    assert "does not parse" in printed
    assert "got 'lots'" in printed
    assert "Attention does not work on this machine." in printed


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.10.1", "too old: 2.11 or newer is needed"),
        ("2.11.0+cpu", "supported"),
        ("2.16.0.dev1", "newer than 2.15"),
    ],
)
def test_versions_of_torch(capsys, monkeypatch, version: str, verdict: str) -> None:
    monkeypatch.setattr(_doctor.torch, "__version__", version)
    assert verdict in examine(capsys)[1]


def test_attention_that_fails_or_is_wrong(capsys, monkeypatch) -> None:
    """The trial has teeth."""
    right = _doctor._forward_backward

    def wrong(inputs, *, engine):
        out, grad = right(inputs, engine=engine)
        return (out, grad) if engine else (out + 1e-3, grad)

    def failing(inputs, *, engine):
        raise RuntimeError("no kernel\nfor this")

    for broken, verdict in ((wrong, "is wrong: 1.0e-03 away"), (failing, "fails: RuntimeError: no kernel")):
        monkeypatch.setattr(_doctor, "_forward_backward", broken)
        status, printed = examine(capsys)
        assert status == 1
        assert verdict in printed


def test_torch_compile_is_tried_and_counted(capsys) -> None:
    """The trial compiles: the counter that is printed after it has seen the graph."""
    clear_counts()
    status, printed = examine(capsys)
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines() if line.startswith(("torch.", "compil")))
    assert lines["torch.compile"] == "works, traced in one graph"
    assert lines["compilations"].startswith("1 in ")
    assert lines["compilations"].endswith(", 0 of them again; 0 graph breaks, 0 left to eager")


def test_torch_compile_that_is_off_fails_or_is_wrong(capsys, monkeypatch) -> None:
    """The trial has teeth; attention itself still works."""
    with torch.compiler.set_stance("force_eager"):
        assert "is switched off: everything runs eagerly" in examine(capsys)[1]
    gradients = iter((torch.zeros(3), torch.ones(3)))

    def wrong(attention, inputs):
        attention(*inputs.unbind())
        return next(gradients)

    def failing(attention, inputs):
        raise RuntimeError("no backend\nfor this")

    for broken, verdict in ((wrong, "is wrong: 1.0e+00 away"), (failing, "fails: RuntimeError: no backend")):
        monkeypatch.setattr(_doctor, "_gradient", broken)
        clear_counts()
        status, printed = examine(capsys)
        assert status == 0
        assert verdict in printed


def clear_counts() -> None:
    """As in a new process: nothing compiled, nothing counted."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()
