"""`python -m flexdilated doctor`, and `--verify`: what they find, what they say, and the status they end with."""

import importlib.util
import json
import multiprocessing
import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, counters

import flexdilated as fd
from flexdilated import masks
from flexdilated.cli import _doctor, main
from flexdilated.cli._doctor import Case
from flexdilated.cli._machine import find
from tests.support import ranks


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


class Shifted(fd.DilatedAttention):
    """Off by a known amount."""

    error = 0.25

    def forward(self, q, k, v):
        return super().forward(q, k, v) * (1 + self.error)


def test_attention_that_fails_or_is_wrong(capsys, monkeypatch) -> None:
    """Found where it is off by more than rounding accounts for."""
    monkeypatch.setattr(_doctor, "DilatedAttention", Shifted)
    monkeypatch.setattr(_doctor, "_compiled_trial", lambda: None)
    for error, verdict in ((0.25, "is wrong: agreement: 64 tokens, ordinary values: out is wrong"), (1e-7, "works")):
        monkeypatch.setattr(Shifted, "error", error)
        status, printed = examine(capsys)
        assert status == (verdict != "works")
        assert findings(printed)["attention on cpu"].startswith(verdict)

    def failing(*given, **named):
        raise RuntimeError("no kernel\nfor this")

    for made, verdict in ((lambda *given, **named: failing, "raises"), (failing, "fails")):
        monkeypatch.setattr(_doctor, "DilatedAttention", made)
        status, printed = examine(capsys)
        assert status == 1
        assert f"{verdict}: RuntimeError: no kernel" in printed or "raises RuntimeError: no kernel" in printed


def test_without_a_compiler(capsys, monkeypatch) -> None:
    """Attention still works: tiles needs none."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    status, printed = examine(capsys)
    assert status == 0
    found = findings(printed)
    assert "no-such-compiler" in found["C++ compiler"]
    assert "flex" not in found["engines on cpu"]
    assert found["attention on cpu"] == "works"


def test_flash_attention_is_named_and_left_alone(monkeypatch) -> None:
    """Which implementation is active holds for the process: the doctor reads it; an older torch has one alone."""

    def told() -> str:
        return str(_doctor._flash_attention())

    assert "FA2 is active" in told()
    assert "no flash_attn.cute" in told()
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "FA3 is active" in told()
    assert "flash_attn.cute is importable" in told()
    for name in ("current_flash_attention_impl", "list_flash_attention_impls"):
        monkeypatch.delattr(attention, name, raising=False)
    assert _doctor._flash_attention()[0][1] == "FA2 is active"


@pytest.fixture
def nothing_tried(monkeypatch) -> None:
    """For what is said of the machine: attention and the compiler have tests of their own."""
    monkeypatch.setattr(_doctor, "_failures", lambda *given, **named: [])


@pytest.mark.usefixtures("nothing_tried")
def test_without_extras(capsys, monkeypatch) -> None:
    extras = {"tqdm": "demo", "matplotlib": "plot"}
    for missing in extras:
        monkeypatch.setitem(sys.modules, missing, None)
    status, printed = examine(capsys)
    assert status == 0
    for missing, extra in extras.items():
        assert f"{missing} is not installed" in printed
        assert f'pip install "flexdilated[{extra}]"' in printed


@pytest.mark.usefixtures("nothing_tried")
def test_environment(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "4096")
    monkeypatch.setenv("FLEXDILATED_CASH_BYTES", "4096")
    status, printed = examine(capsys)
    assert status == 0
    assert "is read as 4096" in printed
    assert "FLEXDILATED_CASH_BYTES" in printed
    assert "is unknown, and has no effect" in printed
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "lots")
    status, printed = examine(capsys)
    assert status == 1
    assert "does not parse" in printed
    assert "got 'lots'" in printed
    assert "Attention does not work on this machine." in printed


@pytest.mark.usefixtures("nothing_tried")
def test_versions_of_torch(capsys, monkeypatch) -> None:
    for version, verdict in {
        "2.10.1": "too old: 2.11 or newer is needed",
        "2.11.0+cpu": "supported",
        "2.16.0.dev1": "newer than 2.15",
    }.items():
        monkeypatch.setattr(_doctor.torch, "__version__", version)
        assert verdict in examine(capsys)[1]


def test_torch_compile_is_tried_and_counted(capsys) -> None:
    """The trial compiles: the counter that is printed after it has seen the graph."""
    clear_counts()
    status, printed = examine(capsys)
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines() if line.startswith(("torch.", "compil")))
    assert lines["torch.compile"] == "works, traced in one graph"
    assert lines["compilations"].startswith("1 in ")
    assert lines["compilations"].endswith(", 0 of them again; 0 graph breaks, 0 left to eager")


def test_torch_compile_that_is_off_or_fails(capsys, monkeypatch) -> None:
    """Attention itself still works."""
    with torch.compiler.set_stance("force_eager"):
        assert "is switched off: everything runs eagerly" in examine(capsys)[1]

    def failing(*given, **named):
        raise RuntimeError("no backend\nfor this")

    clear_counts()
    monkeypatch.setattr(torch, "compile", lambda *given, **named: failing)
    status, printed = examine(capsys)
    assert status == 0
    said = findings(printed)["torch.compile"]
    assert said == "fails: compile: 64 tokens: torch.compile(fullgraph=True) raises RuntimeError: no backend"


def clear_counts() -> None:
    """As in a new process: nothing compiled, nothing counted."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()


@pytest.fixture
def only(monkeypatch) -> Callable[..., None]:
    """Verify these cases instead of all."""

    def replace(*cases: Case) -> None:
        monkeypatch.setattr(_doctor, "available_devices", lambda: ("cpu",))
        monkeypatch.setattr(_doctor, "cases", lambda device: cases)

    return replace


def case(name: str, *failures: str, device: str = "cpu", skipped: str | None = None) -> Case:
    return Case(name, device, ("agreement", "gradients"), lambda: list(failures), skipped)


def broken() -> list[str]:
    raise RuntimeError("no kernel\nfor this")


def test_all_right(only, capsys) -> None:
    only(case("one"), case("two", device="2 ranks"))
    assert main(["doctor", "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["one", "cpu", "agreement,", "gradients", "passed"] in [line.split() for line in lines]
    assert lines[-1].startswith("All 2 that were tried are right, in ")


def test_each_failure_is_told_with_its_cause(only, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    late = "ranks: rank 1 of 2 did not end within 120 s, and was ended"
    only(
        case("good"),
        case("off", "agreement: out is wrong", "gradients: dq is wrong"),
        Case("broken", "cpu", ("agreement",), broken),
        case("lacking", "never asked", skipped="no compiler"),
        case("far", late, device="2 ranks"),
    )
    assert main(["doctor", "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "* off on cpu failed: agreement: out is wrong; gradients: dq is wrong" in lines
    assert "* broken on cpu failed: raises RuntimeError: no kernel" in lines
    assert f"* far on 2 ranks failed: {late}" in lines
    assert "* lacking on cpu skipped: no compiler" in lines
    assert lines[-1].startswith("3 of 4 are not right, in ")
    words = {line.split()[0]: line.split()[-1] for line in lines if line}
    assert (words["good"], words["off"], words["broken"], words["lacking"]) == ("passed", "FAILED", "FAILED", "skipped")


def test_json(only, capsys) -> None:
    only(case("one"), case("far", "ranks: rank 0 of 2 ended with exit code 7", device="2 ranks"))
    assert main(["doctor", "--verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    one, far = found["jobs"]
    assert not found["works"]
    checks = ["agreement", "gradients"]
    assert one == {"name": "one", "device": "cpu", "checks": checks, "verdict": "passed", "cause": None}
    assert (far["verdict"], far["cause"]) == ("failed", "ranks: rank 0 of 2 ended with exit code 7")


def test_json_without_verify_is_bad_usage(capsys) -> None:
    assert main(["doctor", "--json"]) == 2
    assert "--json needs --verify; got it without" in capsys.readouterr().err


def a_little_more(right):
    def wrong(*given, **named):
        return right(*given, **named) + 1e-3

    return wrong


def of_another(right):
    """The same class, made for other segments."""
    return lambda *given, **named: right(*given[:-2], (32, 256), (1, 4), **named)


# What stands in the place of a name in the doctor, the cases that must fail by it, and at how many tokens it shows.
WRONG = {
    "attend": (a_little_more, {"engine tiles", "engine reference", "attend, documents at run time"}, 9),
    "DilatedAttention": (of_another, {"DilatedAttention"}, 40),
    "BlockSparseAttention": (
        lambda right: lambda pattern: right(masks.local_window(left=98, right=0)),
        {"BlockSparseAttention"},
        101,
    ),
    "MultiheadDilatedAttention": (of_another, {"MultiheadDilatedAttention"}, 40),
    "replace": (lambda right: lambda config, **named: right(config, dilation_rates=(1, 2), **named), {"LongNet"}, 1),
    "KVCache": (
        lambda right: lambda pattern, **named: right(masks.causal(), **named),
        {"KVCache, decode as prefill"},
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_found(monkeypatch, name: str) -> None:
    wrong, failing, length = WRONG[name]
    monkeypatch.setitem(_doctor._SIZES, "lengths", (1, length))
    monkeypatch.setattr(_doctor, name, wrong(getattr(_doctor, name)))
    tried = [each for each in _doctor.cases("cpu") if each.name in failing]
    assert len(tried) == len(failing)
    for each in tried:
        assert _doctor._verdict(each)["verdict"] == "failed", each.name


def test_a_gradient_that_is_a_little_off_is_found(monkeypatch) -> None:
    right = _doctor.attend

    def wrong(q, k, v, pattern, **options):
        out = right(q, k, v, pattern, **options)
        return out.detach() + 1.001 * (out - out.detach())

    monkeypatch.setattr(_doctor, "attend", wrong)
    (grouped,) = (each for each in _doctor.cases("cpu") if each.name == "attend, grouped heads")
    (failure,) = grouped.failures()
    assert failure.startswith("gradients: ")


@pytest.mark.slow
def test_everything_is_right_here(capsys, monkeypatch) -> None:
    """All cases but that of flex, whose compiler takes its time: it has tests of its own."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setitem(_doctor._SIZES, "lengths", (1, 70))
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: ranks.context)
    status = main(["doctor", "--verify", "--json"])
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["jobs"]}
    assert {name: each["cause"] for name, each in found.items() if each["verdict"] == "failed"} == {}
    assert status == 0
    assert len(found) == 15
    assert {name for name, each in found.items() if each["verdict"] == "skipped"} == {"engine flex, inference"}
    assert found["engine flex, inference"]["cause"].startswith("no C++ compiler found")


def test_the_case_of_flex(monkeypatch) -> None:
    """Which engine it asks for, and of what; the engine has tests of its own, and its compiler takes its time."""
    attend, asked = _doctor.attend, []

    def noted(q, k, v, pattern, *, engine):
        asked.append(engine)
        return attend(q, k, v, pattern, engine="reference")

    monkeypatch.setattr(_doctor, "attend", noted)
    monkeypatch.setitem(_doctor._SIZES, "num_heads", 1)
    (flex,) = (each for each in _doctor.cases("cpu") if each.name.startswith("engine flex"))
    assert flex.skipped is None
    assert flex.failures() == []
    assert set(asked) == {"flex"}


def test_a_copy_that_setuptools_brings_is_not_installed(tmp_path, monkeypatch) -> None:
    """torch puts such copies on the path when it looks for a compiler; later processes do not have them."""
    copies = tmp_path / "setuptools" / "_vendor"
    copies.mkdir(parents=True)
    (copies / "brought_along.py").touch()
    (tmp_path / "installed_here.py").touch()
    for folder in (copies, tmp_path):
        monkeypatch.syspath_prepend(folder)
    assert find("brought_along") is None
    assert find("installed_here") is not None
    assert find("nowhere_at_all") is None
