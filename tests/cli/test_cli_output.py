"""Output that cannot be written: one line of error and its exit status, for every command, and never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from flexdilated.cli import main
from flexdilated.cli._output import replace

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


@pytest.mark.parametrize("command", [COMMANDS["show"], COMMANDS["explain"], COMMANDS["doctor"], ["tune"]])
def test_a_closed_output_is_refused_before_any_work(command, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(command) == 2
    rule = "standard output must be open, as the answer is printed there; got it closed"
    assert capsys.readouterr().err == f"flexdilated: error: {rule}\n"


def test_closed_standard_error_does_not_end_in_the_output(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert main(COMMANDS["check"]) == 0
    assert main(["show", "casual()"]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("causal(): no counterexample")
    assert "casual" not in printed


def test_ctrl_c_is_one_line(monkeypatch, capsys) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexdilated.cli._doctor.doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nstopped\n"


def test_progress_without_tqdm_is_lines(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(COMMANDS["check"]) == 0
    said = capsys.readouterr()
    assert 'pip install "flexdilated[testing]"' in said.err
    assert said.err.splitlines()[-1].startswith("example 2 of 2: ")
    assert said.out.startswith("causal(): no counterexample")


def test_an_error_that_is_not_of_the_output_stays_one(monkeypatch) -> None:
    def missing():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a library's own file")

    monkeypatch.setattr("flexdilated.cli._doctor.doctor", missing)
    with pytest.raises(FileNotFoundError):
        main(["doctor"])


@pytest.fixture
def no_space(monkeypatch):
    def refuse(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)


@pytest.mark.usefixtures("no_space")
def test_a_file_on_a_full_disk_is_named_and_not_left_half(tmp_path, capsys) -> None:
    path = tmp_path / "out.html"
    assert main(["show", "causal()", "-n", "64", "--html", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err == (
        f"flexdilated: error: the file must be one that can be written; {path}: No space left on device\n"
    )
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "out.html"
    path.write_text("old", encoding="utf-8")

    def fail(partial: Path) -> None:
        partial.write_text("half", encoding="utf-8")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["out.html"]
    assert path.read_text(encoding="utf-8") == "old"


def test_what_a_link_names_is_written_and_the_link_stays(tmp_path) -> None:
    """A device is no file to be replaced, as `--html /dev/stdout` would be."""
    for name, target in (("device.html", os.devnull), ("page.html", str(tmp_path / "real"))):
        link = tmp_path / name
        link.symlink_to(target)
        assert main(["show", "causal()", "-n", "64", "--html", str(link)]) == 0
        assert os.readlink(link) == target
    assert "<html" in (tmp_path / "real").read_text(encoding="utf-8")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["device.html", "page.html", "real"]
