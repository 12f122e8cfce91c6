"""Output that cannot be written: one line of error and its exit status, for every command, and never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from flexdilated.cli import main

COMMANDS = {
    "show": ["show", "causal()", "-n", "64", "--brief"],
    "explain": ["explain", "causal()", "--query", "4", "--key", "2"],
    "plan": ["plan", "causal()", "-n", "64", "--layers", "1"],
    "check": ["check", "causal()", "--examples", "1", "--max-tokens", "8"],
    "doctor": ["doctor"],
    "help": ["--help"],
}
each_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch) -> None:
    """The doctor tries flex, whose compiler takes its time."""
    monkeypatch.setenv("CXX", "no-such-compiler")


def status(command: list[str]) -> int:
    try:
        return main(command)
    except SystemExit as ended:  # argparse, after --help
        return int(ended.code or 0)


@full_disk
@each_command
def test_a_full_disk_is_one_line(command, monkeypatch, capsys) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert status(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "flexdilated: error: standard output must be writable; No space left on device"


@each_command
def test_a_reader_that_has_gone_is_no_error(command, monkeypatch, capsys) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        assert status(command) == 141
    assert "error" not in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_other_errors_stay(monkeypatch, capsys) -> None:
    ends: list[BaseException] = [KeyboardInterrupt(), FileNotFoundError(errno.ENOENT, "", "a library's own file")]
    monkeypatch.setattr("flexdilated.cli._device.doctor", Mock(side_effect=ends))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nstopped\n"
    with pytest.raises(FileNotFoundError):
        main(["doctor"])


def test_progress_without_tqdm_is_lines(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(COMMANDS["check"]) == 0
    said = capsys.readouterr()
    assert 'pip install "flexdilated[testing]"' in said.err
    assert said.err.splitlines()[-1].startswith("example 2 of 2: ")
    assert said.out.startswith("causal(): no counterexample")


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys) -> None:
    refuse = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(Path, "write_bytes", refuse)
    path = tmp_path / "out.html"
    assert main(["show", "causal()", "-n", "64", "--html", str(path)]) == 2
    said = capsys.readouterr()
    rule = f"the file must be one that can be written; {str(path)!r}: No space left on device"
    assert (said.out, said.err) == ("", f"flexdilated: error: {rule}\n")
