"""The device suite: its dry run on CPU, the way that it goes on a device, pretended on CPU."""

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import _jobs, device
from bench.__main__ import main
from bench._jobs import Size
from bench._measures import Target
from bench._rules import LongNet
from bench.device import CODES, NAMES, ROWS, Device, cases, judge, judged
from bench.peers import cpu_flash
from tests.support.compilers import nothing_is_built  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[2]
HERE = Device("cpu", small=True)
SHORT = LongNet("LongNet-2", (16, 64), (1, 4))
SIZE = Size(1024, num_heads=4, head_dim=16, repeats=1)
# Of the catalogue those that differ most in how they are called; the patterns themselves are for other tests.
FEW = {"per_head", "custom", "documents"}
TRIED = [name for name in cases() if "catalogue" not in name or name.partition(": ")[2] in FEW]
# About a second each, of what the law of tests/attend/test_oracle.py draws.
SLOW = {"selected blocks", "other lengths, same pattern", "union, partial and full lists of unlike width"}
SLOW |= {"documents, and others", "blocks larger than tiles, whole tiles"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.thorough if x in SLOW else ()) for x in TRIED])
def test_every_odd_case_is_right_on_cpu(name) -> None:
    assert [wrong for engine in judged(name, HERE) for wrong in judge(name, HERE, engine)] == []


@pytest.fixture
def tiny(monkeypatch):
    """Half and a quarter of the tokens that --small has, and two branches."""
    size = lambda self, tokens, *_, **__: replace(SIZE, num_tokens=max(256, tokens // 2048))  # noqa: E731
    monkeypatch.setattr(Device, "size", size)
    monkeypatch.setattr(Device, "longnet", lambda self, causal: SHORT.as_causal() if causal else SHORT)


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
LONG = dict.fromkeys(("gpu_vs_natural_order", "gpu_window"), pytest.mark.thorough)  # compile as gpu_forward does


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=LONG.get(row.name, [])) for row in ROWS])
def test_rows_go_the_way_of_a_device(pretended, row) -> None:
    """In `aten` there are numbers; what FlexAttention cannot do on CPU is reported in words."""
    found = list(device.answer(row, pretended))
    gaps = [each for each in found if each["measured"] is None]
    assert not any("not_verified" in each for each in found)
    assert all("flex " in each["detail"]["reason"] for each in gaps)
    assert len(gaps) == REFUSED.get(row.name, 2)
    assert len(found) > len(gaps) or row.name == "gpu_memory"
