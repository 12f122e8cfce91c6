"""show: forms and run-time tensors from the command line, and clear answers to wrong questions."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexdilated import masks
from flexdilated.cli import main
from tests.support import oracle
from tests.support.shown import body, drawn

pytestmark = pytest.mark.usefixtures("plain_terminal")


def test_documents_from_the_command_line(tmp_path) -> None:
    """Of shape (B, N), or (N,) for all entries; -1 is padding; --batch chooses an entry."""
    ids = torch.tensor([[0, 0, 0, 1, 1, -1], [0] * 6])
    torch.save(ids, tmp_path / "ids.pt")
    torch.save(ids[0], tmp_path / "one.pt")
    visible = [[1, 2, 3, 1, 2, 0], [1, 2, 3, 4, 5, 6]]
    documents = masks.causal().per_document(ids)
    for batch, file in ((0, "ids.pt"), (1, "ids.pt"), (0, "one.pt")):
        question = ["causal() & documents('d')", "--bind", f"d={tmp_path / file}", "--batch", str(batch)]
        for lines in (drawn(*question), masks.show(documents, 6, batch=batch).lines):
            assert [row.count("█") // 2 for row in body(lines)] == visible[batch]


@pytest.mark.parametrize(
    ("flag", "kind", "start"),
    [("html", "html", b"<!doctype html>"), ("plot", "png", b"\x89PNG"), ("plot", "svg", b"<?xml")],
)
def test_a_page_and_pictures_are_files(tmp_path, capsys, flag, kind, start):
    if flag == "plot":
        pytest.importorskip("matplotlib", reason="draws with matplotlib")
    path = tmp_path / f"out.{kind}"
    assert main(["show", "longnet((64, 256), (1, 4)) & causal()", "-n", "4K", f"--{flag}", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}: {path.stat().st_size:,} bytes\n"
    assert path.read_bytes().startswith(start)


def test_a_picture_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flexdilated.cli._terminal.find", lambda package: None)
    assert main(["show", "causal()", "--plot", str(tmp_path / "out.png")]) == 2
    assert "matplotlib is not installed: no pictures" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("show",), ("explain", "--query", "5", "--key", "4")])
def test_what_the_output_cannot_write_is_an_error_of_usage(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(torch.zeros(12, dtype=torch.int64), tmp_path / "ids.pt")
    monkeypatch.setattr("sys.stdout", TextIOWrapper(BytesIO(), encoding="ascii"))
    command, *others = arguments
    assert main([command, "documents('ü')", "--bind", f"ü={tmp_path / 'ids.pt'}", *others]) == 2
    assert "the output needs more characters than ascii has" in capsys.readouterr().err


def test_the_largest_sequence_is_drawn_and_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "causal()", "-n", "2147483647", "--cells", "4x4"]) == 0
    assert "Density, blocks and work are counted up to 128M tokens." in capsys.readouterr().out
    assert main(["show", "causal()", "-n", "2147483647", "--cells", "4x4", "--json"]) == 0
    assert '"description": null' in capsys.readouterr().out
    assert main(["show", "causal()", "--json", "--cells", "4096x1024", "-n", "8"]) == 0
    assert len(json.loads(capsys.readouterr().out)["low"]) == 8


@pytest.mark.parametrize(
    ("pattern", "tensor", "shown"),
    [
        ("causal().per_document(documents('d'))", torch.arange(9) // 3, "causal().per_document(<3 documents>)"),
        ("lengths('d')", torch.tensor(5), "<1 document>"),
        ("causal() & visible_keys('d')", torch.arange(9) % 3 == 1, "causal() & <3 of 9 keys>"),
    ],
)
def test_run_time_tensors_are_told_in_a_few_words(pattern: str, tensor: Tensor, shown: str, tmp_path, capsys) -> None:
    torch.save(tensor, tmp_path / "d.pt")
    assert main(["show", pattern, "--bind", f"d={tmp_path / 'd.pt'}", "-n", "9", "--heads", "1"]) == 0
    assert {*shown.split()} <= {*capsys.readouterr().out.split()}  # words, as cells of tables wrap
    rule = masks.documents([[0, 1], [0, 0]]).bind(num_heads=1, num_queries=2, num_keys=2, batch=2).pattern
    assert repr(rule) == "<documents of 2 batch entries>"


def test_the_command_prints_what_masks_show_draws(capsys: pytest.CaptureFixture[str]) -> None:
    """Window, order, cells and head as in Python, in the same words."""
    pattern = masks.longnet((8, 32), (1, 4)) & masks.causal()
    window = ["--rows", "10:40", "--cols", "5:60", "--cells", "6x11", "--order", "residue", "--head", "1"]
    found = masks.show(
        pattern, 64, num_heads=2, head=1, queries=range(10, 40), keys=range(5, 60), cells=(6, 11), order="residue"
    )
    assert main(["show", str(pattern), "-n", "64", "--heads", "2", *window, "--brief"]) == 0
    assert capsys.readouterr().out == f"{found}\n" == "\n".join([*found.lines, ""])
    assert main(["show", str(pattern), "-n", "64", "--heads", "2", *window]) == 0
    assert capsys.readouterr().out == f"{found}\n\n{masks.describe(pattern, 64, num_heads=2)}\n"
    assert main(["show", str(pattern), "-n", "64", "--heads", "2", *window, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {**told, "description": 0} == {**found.to_data(), "description": 0}
    assert told["description"]["useful_pairs"] == masks.describe(pattern, 64, num_heads=2).useful_pairs
    position = masks.layout(pattern, 64).positions()
    rule = oracle.both(oracle.longnet((8, 32), (1, 4)), oracle.causal())
    assert found.cells.low.sum() == rule(1, 2, position[10:40], position[5:60]).sum()
    assert found.rate == 4
    data = found.to_data()
    assert (data["head"], data["num_heads"], data["order"], data["rate"]) == (1, 2, "residue", 4)
    assert (data["row_edges"][0], data["row_edges"][-1], len(data["column_edges"])) == (10, 40, 12)
    assert data["low"] == data["high"]
    assert data["likely"] is None
    parts = torch.tensor([branch["low"] for branch in data["branches"]])
    assert parts.sum(0).tolist() == data["low"]
    assert data["branches"][0]["pattern"] == "dilated(8, 1, offset='interleaved') & causal()"
