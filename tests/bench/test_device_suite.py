"""The device suite: its dry run on CPU, the way that it goes on a device, pretended on CPU, and what fails in it."""

import json
import os
import re
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import flexdilated as fd
from bench import _checks, _jobs, device
from bench.__main__ import main
from bench._checks import check_training
from bench._jobs import Problem, Size
from bench._measures import Row, Target, at_least, at_most
from bench._processes import DiedApart
from bench._rank_steps import InTurn, stretches
from bench._rules import GIGAPATH_5, LONGNET_5, LongNet
from bench.device import CODES, NAMES, ROWS, Device, DeviceRow, asked_on, cases, judge, judged
from bench.peers import cpu_flash
from tests.support.compilers import nothing_is_built  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[2]
HERE = Device("cpu", small=True)
SHORT = LONGNET_5.shrunk(128)
SIZE = Size(1024, num_heads=4, head_dim=16, repeats=1)
DRY = ["--device", "cpu", "--small", "--limit", "1e6"]
# Of the catalogue those that differ most in how they are called; the patterns themselves are for other tests.
FEW = {"per_head", "custom", "documents", "neighborhood, 2-D", "bigbird"}
TRIED = [name for name in cases() if "catalogue" not in name or name.partition(": ")[2] in FEW]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_every_odd_case_is_right_on_cpu(name) -> None:
    assert [wrong for engine in judged(name, HERE) for wrong in judge(name, HERE, engine)] == []


@pytest.fixture
def tiny(monkeypatch):
    """Half and a quarter of the tokens that --small has, and segments to match."""
    size = lambda self, tokens, *_, **__: replace(SIZE, num_tokens=max(256, tokens // 2048))  # noqa: E731
    monkeypatch.setattr(Device, "size", size)
    monkeypatch.setattr(Device, "longnet", lambda self, causal: SHORT.as_causal() if causal else SHORT)


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(device, "run_apart", lambda function, *args: function(*args))
    monkeypatch.setattr(device, "each_apart", lambda function, *args, limit_s: function(*args))
    monkeypatch.setattr(device, "cases", lambda: dict.fromkeys(("one token", "no pair at all")))
    monkeypatch.setattr(device, "judged", lambda name, at: at.engines)
    monkeypatch.setattr(device, "judge", lambda name, at, engine: iter(()))


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "tiny")
def test_dry_run(tmp_path, capsys) -> None:
    """A number in every row, none marked; a file for each name.

    Of the rows those that go another way on CPU; what all do in `aten` is in the way of a device, below.
    """
    names = ["gpu_correctness", "gpu_vs_matmul", "gpu_vs_branch_loop", "gpu_window", "gpu_memory"]
    assert main(["device", *names, *DRY, "--out", str(tmp_path), "--commit", "abc123"]) == 0
    printed = capsys.readouterr().out
    documents = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    for document in documents:
        assert (document["commit"], document["small"]) == ("abc123", True)
        assert document["rows"]
        for row in document["rows"]:
            assert "not_verified" not in row
            assert row["measured"] is not None
            assert row["measure"] in printed


def test_names_and_targets(capsys) -> None:
    """The script passes names and codes on; targets are those in docs/contributing/kernels.md."""
    command = [ROOT / "bench" / "h200.sh", "G5", "--small"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": "echo"}, capture_output=True, text=True, check=True)
    assert done.stdout == "-m bench device G5 --small\n"
    assert sorted(CODES) == sorted(f"G{number}" for number in range(12))
    assert set(CODES.values()) == set(NAMES)
    assert {f"catalogue: {entry.name}" for entry in device.ENTRIES} < set(cases())
    assert main(["device", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [row.name for row in ROWS]
    assert all(line.endswith("?") for line in lines)
    page = (ROOT / "docs" / "contributing" / "kernels.md").read_text(encoding="utf-8")
    for row in ROWS:
        (line,) = re.findall(rf"^\| `{row.name}` \|.*$", page, re.MULTILINE)
        stated = {float(number) for number in re.findall(r"[≥≤] (\d[\d.]*)", line)}
        assert {part.bound for each in row.lines for part in each if isinstance(part, Target)} == stated, line


def right(at, target):
    yield Row("right", target, 1.0)


def raises(at, target):
    yield Row("before", target, 1.0)
    raise RuntimeError("planted\nmore")


@pytest.mark.usefixtures("in_this_process")
def test_rows_that_fail_are_reported_and_the_others_go_on(tmp_path, monkeypatch, capsys) -> None:
    """And what was measured before stays, whether an error ends a row, its process ends, or there is no time left."""
    kept = []
    device.measure_all(HERE, ("gpu_correctness", "gpu_memory"), kept.append, limit_s=1.0)
    assert [each["name"] for each in kept] == ["gpu_correctness", "gpu_memory"]
    assert kept[0]["rows"][0]["measured"] == len(kept[0]["rows"]) - 1 == 2
    assert kept[1]["rows"][0]["measured_text"] == "not measured: there was no time left"
    assert all(map(device.is_failed, kept))

    def row_of(name, measure):
        return DeviceRow(name, "", 60, measure, ((at_least(0),),), "Does it?")

    def dies(function, row, at, *, limit_s):
        yield from function(row, at)
        if row.name == "dies":
            raise DiedApart("the process ended with exit code 7 and no result")

    monkeypatch.setattr(device, "ROWS", (row_of("raises", raises), row_of("dies", right), row_of("right", right)))
    monkeypatch.setattr(device, "NAMES", tuple(row.name for row in device.ROWS))
    monkeypatch.setattr(device, "each_apart", dies)
    assert main(["device", *DRY, "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    for reason in ("RuntimeError: planted ", "the process ended with exit code 7"):
        assert f"not measured: {reason}" in table
    found = {row.name: json.loads((tmp_path / f"{row.name}.json").read_text())["rows"] for row in device.ROWS}
    assert {name: [row["measured"] for row in rows] for name, rows in found.items()} == {
        "raises": [1.0, None], "dies": [1.0, None], "right": [1.0],
    }  # fmt: skip
    assert found["raises"][1]["detail"]["reason"] == "RuntimeError: planted\nmore"


def distorted(change):
    """attend, with an output, an lse or a gradient that is wrong, except in the reference."""
    attend = fd.attend

    def wrong(q, k, v, pattern, **options):
        if options.get("engine") == "reference":
            return attend(q, k, v, pattern, **options)
        if change == "dk":
            k = k * 1.05 - 0.05 * k.detach()
        if change == "dsinks" and "sinks" in options:
            options["sinks"] = options["sinks"] * 1.05 - 0.05 * options["sinks"].detach()
        out, lse = attend(q, k, v, pattern, **options)
        if change == "nan":
            lse = lse * torch.nan
        return out * 1.05 if change == "out" else out, lse + 0.69 if change == "lse" else lse

    return wrong


@pytest.mark.parametrize(
    ("case", "change"),
    [
        *(("mixture, head dim 48", change) for change in ("out", "lse", "dk", "nan")),
        ("gradient through lse", "dk"),
        ("one token", "out"),
        ("empty rows, rate not dividing segment", "lse"),
        ("sinks", "dsinks"),
    ],
)
def test_odd_cases_see_a_wrong_kernel(monkeypatch, case, change) -> None:
    """Half precision, too."""
    monkeypatch.setattr(_checks.fd, "attend", distorted(change))
    (found,) = judge(case, HERE, "aten")
    assert found["measure"] == f"{case}, tiles"
    assert "AssertionError" in found["detail"]["reason"]


def test_engines_of_a_case(monkeypatch) -> None:
    """Engine flash only where it is served; `aten` are asked plain calls alone; only the default may not refuse."""
    for reason, engines in ((None, ("flex", "flash", "aten")), ("flash needs torch 2.14", ("flex", "aten"))):
        monkeypatch.setattr(device, "flash_cannot", lambda *_, reason=reason: reason)
        assert Device("cuda").engines == engines
    for engines, wrong in ((("aten", "flex"), 0), (("flex", "aten"), 1)):
        monkeypatch.setattr(Device, "engines", engines)
        # On CPU FlexAttention refuses mixtures.
        assert len(list(judge("mixture, head dim 48", HERE, "flex"))) == wrong
    call = partial(lambda engine, device: None)
    monkeypatch.setattr(device, "cases", lambda: {"plain": (call,), "odd": (partial(call, given=None),)})
    monkeypatch.setattr(Device, "engines", ("flex", "flash", "aten"))
    plain = [("plain", engine) for engine in ("flex", "flash", "aten")]
    assert asked_on(HERE) == [*plain, ("odd", "flex"), ("odd", "flash")]


REACHING = [LONGNET_5.shrunk(256), LONGNET_5.shrunk(256).as_causal(), GIGAPATH_5.shrunk(256)]


@pytest.mark.parametrize("spec", [*REACHING, LongNet("odd", (100, 7), (3, 2))], ids=lambda spec: spec.label)
def test_ranks_have_every_key_that_their_queries_reach(spec) -> None:
    """And the first and last of these are reached, but where a segment has an odd end or its first tokens are idle."""
    num_tokens, num_heads = 1000, 2
    parts = stretches(spec, num_tokens, 8)
    assert [token for queries, _ in parts for token in queries] == list(range(num_tokens))
    for queries, keys in parts:
        masks = spec.masks(torch.tensor(queries), num_tokens=num_tokens, num_heads=num_heads)
        reached = torch.stack(masks).any(2).any(1).any(0).nonzero()
        assert keys.start <= int(reached.min())
        assert int(reached.max()) < keys.stop <= int(reached.max()) + max(spec.dilation_rates)


@pytest.mark.parametrize("what", ["forward", "exchange backward", "ring backward"])
@pytest.mark.parametrize("spec", [SHORT, SHORT.as_causal()], ids=lambda spec: spec.label)
def test_ranks_in_turn_compute_what_one_call_does(spec, what) -> None:
    """Also where a ring's rank needs a third shard, and where it needs none but its own."""
    problem = Problem.draw(replace(SIZE, num_tokens=256))
    if what == "forward":
        check_training(spec.attention(), problem, spec)
    assert InTurn(spec, problem, 4).error(what) < 1e-5


class Pretended(Device):
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
    monkeypatch.setattr(_jobs, "_flush_buffer", lambda device: torch.empty(8))
    monkeypatch.setattr(device, "cuda_flash", cpu_flash)
    return Pretended("cpu", small=True)


# What the flex engine trains, and mixtures: on CPU it refuses both.
REFUSED = {"gpu_memory": 2, "gpu_gathers_and_merge": 2, "gpu_vs_matmul": 0, "gpu_million_tokens": 1, "gpu_window": 0}
REFUSED |= {"gpu_vs_natural_order": 0, "gpu_ranks": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_go_the_way_of_a_device(pretended, row) -> None:
    """In `aten` there are numbers; what FlexAttention cannot do on CPU is reported in words."""
    found = list(device.answer(row, pretended))
    gaps = [each for each in found if each["measured"] is None]
    assert not any("not_verified" in each for each in found)
    assert all("flex " in each["detail"]["reason"] for each in gaps)
    assert len(gaps) == REFUSED.get(row.name, 2)
    assert len(found) > len(gaps) or row.name == "gpu_memory"


@pytest.mark.usefixtures("in_this_process")
def test_rows_are_rehearsed_on_a_device(monkeypatch, pretended) -> None:
    """Each line of those that say so, once, unchecked; what fails there is left for when it counts."""
    tried = []

    def tries(at, target, number):
        tried.append((at.rehearsing, number))
        raise RuntimeError("planted")
        yield

    def apart(function, *args, limit_s):
        try:
            yield from function(*args)
        except RuntimeError as error:
            raise DiedApart(str(error)) from error

    lines = ((at_most(1), 1), (at_most(1), 2))
    rows = [DeviceRow(name, "", 60, tries, lines, "Does it?", name == "a") for name in "ab"]
    monkeypatch.setattr(device, "ROWS", rows)
    monkeypatch.setattr(device, "each_apart", apart)
    monkeypatch.setattr(device, "conditions", lambda name: {})
    kept = []
    device.measure_all(pretended, ("a", "b"), kept.append, limit_s=100)
    assert sorted(tried[:2]) == [(True, 1), (True, 2)]
    assert tried[2:] == [(False, 1), (False, 2)] * 2
    assert [len(each["rows"]) for each in kept] == [1, 2] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["G12"], "a name must be one of gpu_correctness, gpu_forward, gpu_backward"),
        (["--limit", "0"], "the limit must be above 0 seconds; got 0"),
        (["--out", __file__], "the results need a folder"),
        (["--device", "cpu"], "--device cpu needs --small"),
        ([], "PyTorch finds no CUDA device here"),
    ],
)
def test_calls_that_are_refused(monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["device", *arguments])
    assert message in capsys.readouterr().err
