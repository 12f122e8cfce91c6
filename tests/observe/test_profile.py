"""FLEXDILATED_PROFILE: what a process writes about itself, and folders that cannot be."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flexdilated.observe import _profile
from flexdilated.observe._profile import VARIABLE, folder_from_environment, profile_process


@pytest.fixture
def at_exit(monkeypatch) -> list[Callable[[], None]]:
    """What would run as the process ends."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(_profile, "atexit", SimpleNamespace(register=registered.append))  # not of all modules
    return registered


def test_a_process_writes_operators_memory_and_a_trace(tmp_path, monkeypatch, at_exit) -> None:
    """Into a folder that is not there yet; nothing else is left in it."""
    folder = tmp_path / "new" / "profiles"
    monkeypatch.setenv(VARIABLE, str(folder))
    profile_process()
    kept = [torch.ones(1000, 1000) @ torch.ones(1000, 1000) for _ in range(3)]
    (write,) = at_exit
    write()
    trace, text = sorted(folder.iterdir())
    assert (trace.name, text.name) == (f"{trace.name.partition('.')[0]}.trace.json.gz", f"{text.stem}.txt")
    events = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "aten::ones", "[memory]"} <= events
    told = text.read_text(encoding="utf-8")
    assert re.match(r"\d+\.\d s, [\d,]+ events, torch ", told)
    if Path("/proc/self/status").exists():
        assert re.search("^peak memory, resident: [0-9.,]+ [MG]iB$", told, re.MULTILINE)
    rows = [line.split() for line in told.splitlines() if line.strip().startswith("aten::mm ")]
    assert len(rows) == 2, "by time, and by memory"
    assert all(row[-1] == str(len(kept)) for row in rows)
    memory = told[told.index("By self_cpu_memory_usage") :]
    assert re.search(r"^ +aten::empty .* 22\.89 MB .* 6 *$|^ +aten::mm .* 11\.44 MB", memory, re.MULTILINE)


def test_without_the_variable_nothing_is_recorded(tmp_path, monkeypatch, at_exit) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        monkeypatch.delenv(VARIABLE, raising=False) if value is None else monkeypatch.setenv(VARIABLE, value)
        profile_process()
        assert folder_from_environment() is None
    assert at_exit == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path, monkeypatch, at_exit) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv(VARIABLE, str(bad))
        for use in (folder_from_environment, profile_process):
            with pytest.raises(ValueError, match="must name a folder") as caught:
                use()
            assert str(caught.value) == f"FLEXDILATED_PROFILE must name a folder that can be written; got '{bad}'"
    assert at_exit == []
