"""Wrong command lines, and output that cannot be written: a status, and one error that names what to write."""

import errno
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from flexdilated.cli import main
from tests.support.commands import MODULE, parsers, run

FILES = {
    "mine.py": MODULE,
    "raises.py": "one = 1\nraise LookupError('none')\n",
    "syntax.py": "def (\n",
    "two.py": "from flexdilated import masks\ngood = bad = masks.causal()\nnumber = 3\n",
    "ends.py": "raise SystemExit(0)\n",
    "broken.json": "{",
    "bad.pt": "x",
}
TENSORS = {"ids": torch.tensor([0, 0, 1, -1]), "lengths": torch.tensor(70000), "list": [1]}
TENSORS["two"] = torch.zeros(2, 4, dtype=torch.int64)

# A command line, and what the error says; ... stands for more text.
REFUSED = {
    "show causal() --head 8": "head must be below the number of heads, 8; got head=8",
    "show causal() --batch 1": "batch must be below the number of batch entries, 1; got batch=1",
    "show causal() --rows 5": "--rows takes A:B with 0 <= A < B <= 65536, such as 0:64; got '5'",
    "show causal() --cols 1:65537": "--cols takes A:B with 0 <= A < B <= 65536, such as 0:64; got '1:65537'",
    "show causal() --cells 0x4": "--cells takes ROWSxCOLUMNS from 1x1 to 4096x4096, such as 40x80; got '0x4'",
    "show documents('d')": "the pattern needs run-time tensors: give --bind d=FILE.pt; got none for d",
    "show causal() --bind d=ids.pt": "--bind must name a run-time tensor of the pattern, which needs none; got 'd'",
    "show documents('d') --bind d": "--bind takes NAME=FILE.pt, a tensor that torch.save wrote; got 'd'",
    "show documents('d') --bind d=ids.pt --bind d=ids.pt": "one value; got two for 'd'",
    "show lengths('n') --bind n=lengths.pt -n 64K": "at most the number of positions, 65536; got 70000",
    "show documents('d') --bind d=bad.pt": "--bind d must name a file with a tensor; torch.load does not read bad.pt",
    "show documents('d') --bind d=list.pt": "--bind d must name a file with a tensor; list.pt holds a list",
    "show neighborhood((4,4),1) -n 17": "within the 16 tokens of a 4x4 grid; got queries up to position 16",
    "show causal() --plot out.gif": "--plot writes .png or .svg files; got out.gif",
    "show causal() --html nowhere/out.html": "--html must be in a folder that exists; got nowhere/out.html",
    "show documents('d') --bind d=ids.pt -n 1024M": "--tokens must be at most 16777216 with --bind",
    "show causal() --json --cells 4096x1024": "at most 262144 cells, such as --cells 512x512; got 4096x1024",
    "show causal() --seq-len 16": "unrecognized arguments: --seq-len 16; there are --tokens, --heads",
    "explain causal() --query 1e3 --key 2": "a position must be a whole number, such as 5000 or 64K; got '1e3'",
    "plan causal() --ranks 4097": "--ranks must be at most 4096; got 4097",
    "plan causal() -n 64 --ranks 2 --codec bf16 --dtype fp16": 'codec="bf16" makes',
    "plan causal() --dropout-p 1": "dropout_p...below 1...1.0",
    "plan causal() --kv-heads 3": "num_kv_heads must divide num_heads; got num_kv_heads=3 and num_heads=8",
    "plan causal() --embed-dim 100": "--embed-dim...--heads...100...8",
    "plan causal() -n 4000M": f"--tokens...2147483647...{4000 << 20}",
    "plan documents('d') --bind d=two.pt": "--bind...2",
    "plan neighborhood((8,8),1) -n 65": "64...8x8...up to position 64",
    "plan per_head([causal(),causal()]) --heads 3 --budget 8": "per_head...2...3",
    **{
        f"plan causal() --budget={bad}": "--budget takes a number of GiB above 0, such as 24 or 0.5; got"
        for bad in ("8GiB", "0", "nan", "1e400")
    },
    "check causal() --examples 0": "--examples must be at least 1; got 0",
    "check causal() --heads 4096": "squared must be at most 4194304; got 4096 heads and 96 tokens",
    "check block_list([[7]],block=16)": "block_list must name blocks below",
    "check documents('ids')": "check_pattern draws positions, so",
    "check raises.py:p": "raises.py must run without an error, line 2; got LookupError: none",
    "check syntax.py:p": "syntax.py must run without an error; got SyntaxError: invalid syntax",
    "check ends.py:p": "ends.py must run without an error, line 1; got SystemExit: 0",
    "check two.py:": "must make a pattern of that name; got '', and the patterns in it are 'good', 'bad'",
    "check none.py:p": "PATTERN must be an expression or a file that can be read; got 'none.py', which is no file",
    "check none.json": "PATTERN must be an expression or a file that can be read; ...No such file...none.json",
    "check folder.json": "PATTERN must be an expression or a file that can be read; ...directory...folder.json",
    "check binary.json": "PATTERN must be an expression or a file of JSON in UTF-8; got binary.json",
    "check broken.json": "a pattern must be JSON as to_json writes it; got '{'",
    "check chunked(": "'(' was never closed; at column 8",
    "check causal()+3": "+ takes patterns; got 3; at column 9",
    f"check {'(' * 2000}": "brackets must nest at most",
    "check two.py:p": "must make a pattern of that name; got 'p', and the patterns in it are 'good', 'bad'",
    "tune x.json --device abacus": "--device must be one of cpu",
    "tune x.json --seconds 0": "--seconds must be above 0",
    "shwo causal() -n 16": "no command is called 'shwo': did you mean show? There are show, explain, plan",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_command_line_is_answered(line: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("binary.json").write_bytes(b"\xff\x00")
    Path("folder.json").mkdir()
    for name, tensor in TENSORS.items():
        torch.save(tensor, f"{name}.pt")
    status, printed, said = run(line.split(), capsys)
    assert (status, printed) == (2, "[]")
    assert re.search(".*".join(map(re.escape, REFUSED[line].split("..."))), said)
    assert said.count("error: ") == 1


def test_every_command_is_there() -> None:
    assert {line.split()[0] for line in REFUSED} > parsers().keys() - {"doctor"}


NO_DENSE_TENSORS = {
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(size, dtype=torch.int64) for size in (2, 3)]),
    "sparse": lambda: torch.ones(5, dtype=torch.int64).to_sparse(),
    "meta": lambda: torch.ones(5, dtype=torch.int64, device="meta"),
    "large": lambda: torch.zeros(1, dtype=torch.int64).expand(10**12),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_file_of_no_dense_tensor_or_of_too_many_values_is_refused(tmp_path, capsys) -> None:
    for kind, make in NO_DENSE_TENSORS.items():
        torch.save(make(), tmp_path / f"{kind}.pt")
        status, _, said = run(
            ["show", "documents('d')", "--bind", f"d={tmp_path / kind}.pt", "--brief", "-n", "5"], capsys
        )
        assert status == 2
        told = "takes at most" if kind == "large" else "must be dense, and not on the meta device"
        assert told in said or (kind == "nested" and "torch.load does not read" in said)  # since torch 2.15


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
