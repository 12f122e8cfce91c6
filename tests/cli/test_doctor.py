"""`python -m flexdilated doctor`: what it finds, what it says, and the status it ends with."""

import importlib.util
import re
import sys

import pytest
import torch

import flexdilated as fd
from flexdilated import _engine_choice
from flexdilated.cli import _device, main


def examine(capsys) -> tuple[int, str]:
    status = main(["doctor"])
    return status, capsys.readouterr().out


def findings(printed: str) -> dict[str, str]:
    """What stands behind each subject; columns are two spaces or more apart."""
    rows = (re.split(" {2,}", line, maxsplit=1) for line in printed.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


@pytest.fixture(autouse=True)
def one_device(monkeypatch) -> None:
    """The CPU, without a compiler: that takes its time, and tests of flex have it."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(_device, "available_devices", lambda: ("cpu",))


def test_a_machine_without_a_compiler(capsys) -> None:
    """Each finding against what Python and torch say themselves; attention works, as "aten" needs no compiler."""
    status, printed = examine(capsys)
    found = findings(printed)
    assert status == 0
    assert found["flexdilated"] == fd.__version__
    assert found["python"] == sys.version.split()[0]
    assert found["torch"].split(",")[0] == torch.__version__
    assert f"{torch.get_num_threads()} CPU threads" in found["devices"]
    for package in ("tqdm", "matplotlib"):
        assert (found[package] == "found") == (importlib.util.find_spec(package) is not None)
    assert "no-such-compiler" in found["C++ compiler"]
    for engine in ("aten on cpu, the default", "reference on cpu"):
        use, error = re.fullmatch(r"serves (\w+), error (\S+)", found[engine]).groups()
        assert use == "training"
        assert float(error) < 1e-5
    assert found["flex on cpu"].startswith("does not serve: flex on CPU compiles C++, and no C++ compiler found")
    assert found["flash on cpu"].startswith("does not serve: flash runs on NVIDIA devices")
    assert printed.endswith("\nAttention works on this machine.\n")


def with_aten(change):
    """attend, with what "aten" gives changed."""

    def wrong(q, k, v, pattern, *, engine):
        out = fd.attend(q, k, v, pattern, engine=engine)
        return change(out) if engine == "aten" else out

    return wrong


def fail(out):
    raise RuntimeError("no kernel\nfor this")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda out: out * 1.001, "is wrong in training, error 1e-03, and must be at most 1e-04"),
        (lambda out: 1.01 * out - 0.01 * out.detach(), "is wrong in training, error 1e-02, and must be at most 1e-04"),
        (lambda out: out * torch.nan, "is wrong in training, error nan, and must be at most 1e-04"),
        (lambda out: out * (1 + 1e-7), "serves training, error"),
        (fail, "fails in training: RuntimeError: no kernel"),
    ],
)
def test_a_wrong_result_is_found(change, verdict: str, capsys, monkeypatch) -> None:
    """Where it is off by more than rounding accounts for."""
    monkeypatch.setattr(_device, "attend", with_aten(change))
    status, printed = examine(capsys)
    assert status == (not verdict.startswith("serves"))
    assert findings(printed)["aten on cpu, the default"].startswith(verdict)
    assert printed.endswith(f"\nAttention {'does not work' if status else 'works'} on this machine.\n")
    assert findings(printed)["reference on cpu"].startswith("serves training")


def test_every_device_has_to_work(capsys, monkeypatch) -> None:
    """One that fails is no less broken because the CPU works."""
    monkeypatch.setattr(_device, "available_devices", lambda: ("cpu", "cuda"))
    monkeypatch.setattr(_engine_choice, "_has_triton", lambda: True)
    monkeypatch.setattr(_device, "_trial", lambda engine, device: (device == "cpu" or engine != "flex", "tried"))
    status, printed = examine(capsys)
    assert status == 1
    assert "flex on cuda, the default" in printed


def test_what_is_said_of_extras_the_environment_and_torch(capsys, monkeypatch) -> None:
    monkeypatch.setattr(_device, "_trial", lambda engine, device: (True, "serves"))
    for missing in ("tqdm", "matplotlib"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "4096")
    monkeypatch.setenv("FLEXDILATED_CASH_BYTES", "4096")
    status, printed = examine(capsys)
    assert status == 0
    for missing, extra in {"tqdm": "testing", "matplotlib": "plot"}.items():
        assert f"{missing} is not installed" in printed
        assert f'pip install "flexdilated[{extra}]"' in printed
    for said in ("is read as 4096", "FLEXDILATED_CASH_BYTES", "is unknown, and has no effect"):
        assert said in printed
    for version, verdict in {
        "2.10.1": "too old: 2.11 or newer is needed",
        "2.11.0+cpu": "supported",
        "2.16.0.dev1": "newer than 2.15",
    }.items():
        monkeypatch.setattr(_device.torch, "__version__", version)
        assert verdict in examine(capsys)[1]
    monkeypatch.setattr(_device.torch, "__version__", "2.13.0")
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "lots")
    status, printed = examine(capsys)
    assert status == 1
    for said in ("does not parse", "got 'lots'", "Attention does not work on this machine."):
        assert said in printed
