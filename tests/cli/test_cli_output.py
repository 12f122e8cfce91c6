"""Output that cannot be written: one line of error and its exit status, for every command, and never a traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flexdilated.cli import main
from flexdilated.cli._command_parser import UsageError
from flexdilated.cli._demo_model import ByteModel, model_config
from flexdilated.cli._demo_training import Run

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
    """test_doctor.py holds what is compiled."""
    monkeypatch.setattr("flexdilated.cli._doctor._compiled_trial", lambda: None)


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


@pytest.mark.parametrize("command", [COMMANDS["show"], COMMANDS["explain"], ["demo"], ["tune"]])
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


@pytest.mark.usefixtures("no_space")
def test_a_checkpoint_on_a_full_disk_is_a_usage_error(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"checkpoint\.pt: No space left on device"):
        Run(ByteModel(model_config(2), seed=0), {}).save(tmp_path)


def test_what_a_link_names_is_written_and_the_link_stays(tmp_path) -> None:
    """A device is no file to be replaced, as `--html /dev/stdout` would be."""
    for name, target in (("device.html", os.devnull), ("page.html", str(tmp_path / "real"))):
        link = tmp_path / name
        link.symlink_to(target)
        assert main(["show", "causal()", "-n", "64", "--html", str(link)]) == 0
        assert os.readlink(link) == target
    assert "<html" in (tmp_path / "real").read_text(encoding="utf-8")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["device.html", "page.html", "real"]
