"""show, explain and check: what the command line asks for, and what is printed."""

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

from flexdilated import masks
from flexdilated.cli import _check, main
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
    monkeypatch.setattr("flexdilated.cli._terminal.optional_package", lambda package: None)
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


def test_show_prints_what_masks_show_draws(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_explain_prints_what_masks_explain_returns(capsys):
    for text, pair, words in (
        ("longnet((2048, 4096, 8192), (1, 2, 4)) & causal()", (5000, 17, 3, 8), []),
        ("causal() + strided(4)", (40, 8, 0, 2), ["-n", "8K", "--heads", "2", "--block-size", "64"]),
    ):
        at = dict(zip(("query", "key", "head", "num_heads"), pair, strict=True))
        sizes = {"num_tokens": 8192, "block_size": 64} if words else {"num_tokens": 1 << 16}
        found = masks.explain(masks.parse(text), **at, **sizes)
        command = ["explain", text, *(f"--{name}={at[name]}" for name in ("query", "key", "head")), *words]
        assert main(command) == 0
        assert capsys.readouterr().out.splitlines() == str(found).splitlines()
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_data()))
    assert main(["explain", "causal()", "--query", "3K", "--key", "1k"]) == 0
    assert capsys.readouterr().out.startswith("query 3072, key 1024, head 0 of 8: allowed")


FEW = ["--examples", "8", "--heads", "2", "--max-tokens", "20"]

FILE = """
import torch
from flexdilated import masks
from flexdilated.masks import EMPTY, FULL, PARTIAL


def near(b, h, q, k):
    return (k <= q) & (k > q - 5)


def too_sure(head, q_first, q_last, k_first, k_last):
    return torch.where(k_first > q_last, EMPTY, torch.where(k_last <= q_first, FULL, PARTIAL))


good = masks.custom(near)
bad = masks.custom(near, classify=too_sure) | masks.first_tokens(1)
"""


@pytest.mark.parametrize("pattern", ["longnet((4, 8), (1, 2)) & causal()", "per_head((chunked(3), ~strided(2)))"])
def test_a_pattern_that_is_right(pattern, capsys) -> None:
    assert main(["check", pattern, *FEW]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{masks.parse(pattern)!r}: no counterexample in 8 boxes a kind and 8 calls of attend")
    assert "16/16" in said.err


def test_a_pattern_of_ones_own(tmp_path, capsys) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    assert main(["check", f"{file}:good", *FEW]) == 0
    assert main(["check", f"{file}:bad", *FEW]) == 1
    said = capsys.readouterr().out
    assert "counterexample, after 0 examples" in said
    assert "head 0, queries 6, keys 1: 0 of 1 pairs are allowed, count says 1 to 1 (FULL)" in said
    assert main(["check", f"{file}:bad", *FEW, "--json"]) == 1
    assert "count must bound" in json.loads(capsys.readouterr().out)["counterexample"]


def test_an_attend_that_is_wrong(monkeypatch, capsys) -> None:
    """The rule is right, so what attend gets wrong is found by the second half, in the shortest case."""
    attend = _check.attend

    def from_nine_on(q, k, v, pattern, *, q_offset=0, **options):
        if k.shape[2] >= 9:
            pattern = pattern | masks.causal()
        return attend(q, k, v, pattern, q_offset=q_offset, **options)

    monkeypatch.setattr(_check, "attend", from_nine_on)
    assert main(["check", "local_window(left=2, right=0)", *FEW, "--examples", "30"]) == 1
    said = capsys.readouterr().out
    assert "3 of 3 checks failed" in said
    assert "9 tokens" in said
    assert "out is wrong" in said


def test_a_pattern_of_few_lengths(capsys) -> None:
    pattern = "neighborhood((4, 4), 1) & ~block_list([[3], [0, 1]], block=4)"
    assert main(["check", pattern, *FEW, "--examples", "1"]) == 0
    assert "(up to 16 tokens, as it takes no more, 2 heads" in capsys.readouterr().out
    assert main(["check", pattern, *FEW, "--examples", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sizes = [told[name] for name in ("counterexample", "examples", "num_heads", "max_tokens", "seed")]
    assert sizes == [None, 2, 2, 16, 0]
