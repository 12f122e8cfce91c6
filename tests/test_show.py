"""show: heat maps whose every character is the rule, that fit any terminal, and clear answers to wrong questions."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.cli import main
from flexdilated.cli._heat_levels import levels_of
from flexdilated.cli._show import map_lines
from flexdilated.cli._show_arguments import add_arguments
from flexdilated.cli._show_settings import ShowSettings, settings_from
from flexdilated.cli._terminal import Terminal, terminal_of
from flexdilated.masks import _bounded_pairs, _cells
from flexdilated.masks._cells import count_cells
from tests import oracle
from tests.strategies import Case, whole_cases, written_expressions

LONGNET = "longnet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)) & causal()"
_ANSI = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(autouse=True)
def terminal_size(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("NO_COLOR", raising=False)


def asked(*arguments: str) -> ShowSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_from(parser.parse_args(arguments))


def body(lines: Sequence[str]) -> list[str]:
    """What stands inside the frame."""
    first = next(index for index, line in enumerate(lines) if re.search("[┌+][┴─+-]+[┐+]$", line))
    framed = lines[first + 1 :]
    height = next(index for index, line in enumerate(framed) if re.search("^ *[└+][─-]+[┘+]$", line))
    return [_inside(line) for line in framed[:height]]


def _inside(line: str) -> str:
    found = re.fullmatch("[0-9KM, ]* [┤│|+](.*)[│|]", line)
    assert found, line
    return found[1]


def test_the_picture_of_a_small_longnet() -> None:
    lines = map_lines(asked("longnet((4, 8), (1, 2)) & causal()", "-n", "10"))
    assert "\n".join(line.rstrip() for line in lines) == SMALL.strip("\n")


SMALL = """
longnet((4, 8), (1, 2)) & causal()
head 0 of 8, 10 tokens, natural order; cells of 1 query x 1 key
   0         5
  ┌┴─────────┴─────────┐
0 ┤2                   │
  │1 1                 │
  │2 1 2               │
  │1 1 1 1             │
  │1   1   2           │
5 ┤        1 1         │
  │1   1   2 1 2       │
  │        1 1 1 1     │
  │                2   │
  │                1 1 │
  └────────────────────┘
A cell is a pair:  2 branches  1 branch
"""


def test_a_picture_of_many_tokens() -> None:
    """LongNet's ladder at 64K: on the diagonal dense, thinner away from it, nothing beyond the largest segment."""
    lines = map_lines(asked(LONGNET, "-n", "64K"))
    assert lines[1] == "head 0 of 8, 64K tokens, natural order; cells of 4K queries x 2K keys"
    assert lines[2] == "     0       16K     32K     48K"
    rows = body(lines)
    assert rows[0] == "▓▓" + " " * 30
    assert rows[7] == "░" * 8 + "▒" * 6 + "▓▓" + " " * 16
    assert rows[8] == " " * 16 + "▓▓" + " " * 14
    assert lines[-2:] == [
        "Pairs allowed:  ▓ 10%+  ▒ 1%+  ░ 0.1%+",
        "A pair counts once for each branch that allows it.",
    ]


@st.composite
def small_windows(draw: st.DrawFn) -> tuple[Case, int, str, range, range]:
    """A case, a head, an order, and a window that is small enough for a character a pair."""
    case = draw(whole_cases(written_expressions, max_heads=3, largest=40))
    start, left = (draw(st.integers(0, case.num_queries - 1)) for _ in range(2))
    rows = range(start, min(case.num_queries, start + draw(st.integers(1, 16))))
    columns = range(left, min(case.num_queries, left + draw(st.integers(1, 60))))
    return case, draw(st.integers(0, case.num_heads - 1)), draw(st.sampled_from(["natural", "residue"])), rows, columns


@given(small_windows(), st.booleans())
def test_single_pairs_are_the_rule(question, colour):
    """Read back from the characters, or from the colours, in natural and in residue order."""
    case, head, order, rows, columns = question
    counts = oracle.counts(case.twin.rule, range(head, head + 1), case.num_heads, *2 * [torch.arange(case.num_queries)])
    place = torch.arange(case.num_queries)
    if order == "residue":
        place = masks.layout(case.twin.pattern, case.num_queries).positions()
    expected = counts[0][place[rows.start : rows.stop]][:, place[columns.start : columns.stop]]
    settings = asked(
        *(masks_file(case), "-n", str(case.num_queries), "--heads", str(case.num_heads), "--head", str(head)),
        *("--rows", f"{rows.start}:{rows.stop}", "--cols", f"{columns.start}:{columns.stop}", "--order", order),
        *("--color", "always" if colour else "never"),
    )
    shown = body([_ANSI.sub("", line) if not colour else line for line in map_lines(settings)])
    assert read(shown, len(columns), colour=colour) == expected.clamp(max=9).tolist()


def masks_file(case: Case) -> str:
    path = Path(os.environ["SHOW_FOLDER"]) / "pattern.json"
    path.write_text(masks.to_json(case.twin.pattern), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOW_FOLDER", str(tmp_path_factory.mktemp("patterns")))
        yield


def read(lines: Sequence[str], columns: int, *, colour: bool) -> list[list[int]]:
    """How often each pair is allowed, by what is shown."""
    table = []
    for line in lines:
        cells: list[str] = []
        for code, text in re.findall("(?:\x1b\\[48;5;([0-9]+);30m)?([^\x1b]+)(?:\x1b\\[0m)?", line):
            cells += [character if not code or character != " " else "full" for character in text]
        width = len(cells) // columns
        assert len(cells) == width * columns
        firsts = cells[::width]
        table.append([int(first) if first.isdigit() else int(first in ("█", "full")) for first in firsts])
        assert not (colour and "█" in firsts)
    return table


@pytest.mark.parametrize("size", [(40, 12), (40, 60), (80, 24), (200, 60), (24, 100)])
@pytest.mark.parametrize("colour", ["always", "never"])
@pytest.mark.parametrize(
    "question",
    [
        (LONGNET, "-n", "1M"),
        (LONGNET, "-n", "1M", "--rows", "1000K:1M", "--cols", "0:3"),
        ("local_window(left=5, right=0)", "-n", "17"),
        ("longnet((60, 3000), (1, 7))", "-n", "12345", "--order", "residue"),
        ("causal()", "-n", "1"),
        ("causal()", "-n", "2000000000"),
        ("dilated(8, 2, 1)", "-n", "1000", "--rows", "7:9"),
    ],
)
def test_it_fits_the_terminal(size, colour, question, monkeypatch):
    columns, height = size
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(height))
    lines = [_ANSI.sub("", line) for line in map_lines(asked(*question, "--color", colour))]
    assert max(map(len, lines)) <= columns
    assert len(lines) <= max(height - 1, 12)
    inside = body(lines)
    assert len({len(line) for line in inside}) == 1
    if question == (LONGNET, "-n", "1M"):  # room is used
        assert len(lines) >= 0.8 * height or len(inside[0]) >= 0.7 * columns


def test_halves_of_lines_are_cells(monkeypatch):
    """Upper and lower colour of each character, decoded, are the levels of two rows."""
    pattern = masks.parse("longnet((60, 300), (1, 7)) & causal()")
    monkeypatch.setenv("COLUMNS", "60")
    lines = map_lines(asked("longnet((60, 300), (1, 7)) & causal()", "-n", "500", "--color", "always"))
    halves = [decode(line) for line in body_of_colours(lines)]
    rows = [row for upper, lower in halves for row in (upper, lower)]
    shape = (len(rows) - 1 if set(rows[-1]) == {0} else len(rows), len(rows[0]))
    cells = count_cells(pattern, 500, num_heads=8, shape=shape)
    levels, number = levels_of(cells, colour=True)
    assert shape[0] > 16  # more rows than lines
    assert rows[: shape[0]] == [[levels[index].colour for index in row] for row in number.tolist()]


def body_of_colours(lines: Sequence[str]) -> list[str]:
    return [line.partition("┤" if "┤" in line else "│")[2][:-1] for line in lines if re.match("^ *[0-9K,]* [┤│]", line)]


def decode(line: str) -> tuple[list[int], list[int]]:
    """The colours of the upper and of the lower half of each character; 0 where there is none."""
    upper, lower = [], []
    for codes, text in re.findall("(?:\x1b\\[([0-9;]+)m)?([^\x1b]+)(?:\x1b\\[0m)?", line):
        front = int(next(iter(re.findall("38;5;([0-9]+)", codes)), 0))
        back = int(next(iter(re.findall("48;5;([0-9]+)", codes)), 0))
        halves = {"█": (front, front), "▀": (front, back), "▄": (back, front), " ": (back, back)}
        for character in text:
            upper.append(halves[character][0])
            lower.append(halves[character][1])
    return upper, lower


class Stream(io.StringIO):
    def __init__(self, *, tty: bool, encoding: str) -> None:
        super().__init__()
        self.tty, self.named = tty, encoding

    def isatty(self) -> bool:
        return self.tty

    @property
    def encoding(self) -> str:  # pyright: ignore
        return self.named


def test_what_a_terminal_takes(monkeypatch):
    screen, pipe = Stream(tty=True, encoding="utf-8"), Stream(tty=False, encoding="ascii")
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_of(screen) == Terminal(80, 24, colour=True, shapes=True)
    assert terminal_of(pipe) == Terminal(80, 24, colour=False, shapes=False)
    assert terminal_of(pipe, colour="always").colour
    assert not terminal_of(screen, colour="never").colour
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal_of(screen).colour
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal_of(screen).colour
    assert terminal_of(screen, colour="always").colour
    monkeypatch.setenv("NO_COLOR", "")  # set, and empty: as if it were not there
    assert terminal_of(screen).colour


@pytest.mark.parametrize("colour", ["always", "never"])
def test_plain_characters_where_the_encoding_has_no_others(monkeypatch, colour):
    monkeypatch.setattr(sys, "stdout", Stream(tty=False, encoding="ascii"))
    lines = map_lines(asked("longnet((8, 32), (1, 4)) & causal()", "-n", "100", "--color", colour))
    "\n".join(lines).encode("ascii")
    if colour == "never":
        assert "#" in body(lines)[0] or "2" in body(lines)[0]


def test_estimates_are_named(monkeypatch):
    """Cells in doubt are counted in a line of their own; a cell without a hit is not shown as empty."""
    monkeypatch.setattr(_cells, "_EVERY_PAIR", 0)
    monkeypatch.setattr(_cells, "_MOST_LOOKS", 0)
    monkeypatch.setattr(_bounded_pairs, "_SAMPLES", 1)
    lines = map_lines(asked("global_tokens(8) | random_blocks(4096, block=8, count=1)", "-n", "4096"))
    assert re.match("^[0-9,]+ of [0-9,]+ cells are estimates within bounds", lines[-2])
    assert any("?" in row for row in body(lines))
    assert "? none found, some possible" in "".join(lines)


def test_a_window_without_pairs_says_so() -> None:
    lines = map_lines(asked("causal()", "-n", "64", "--rows", "0:4", "--cols", "8:16"))
    assert lines[-1] == "No pair is allowed here."
    assert not "".join(body(lines)).strip()


def test_documents_from_the_command_line() -> None:
    """Lengths one after the other; what is left is padding; --batch chooses an entry."""
    question = ["causal() & documents('d')", "--bind", "d=3,2/6", "-n", "6"]
    first, second = (body(map_lines(asked(*question, "--batch", str(entry)))) for entry in (0, 1))
    assert [row.count("█") // 2 for row in first] == [1, 2, 3, 1, 2, 0]
    assert [row.count("█") // 2 for row in second] == [1, 2, 3, 4, 5, 6]


def test_the_command_prints_the_map_and_the_numbers(capsys):
    assert main(["show", "dilated(64, 4, 'interleaved')", "-n", "256", "--heads", "4", "--head", "3"]) == 0
    printed = capsys.readouterr().out
    pattern, facts = printed.splitlines()[:2]
    assert pattern == "dilated(64, 4, offset='interleaved')"
    assert facts.startswith("head 3 of 4, 256 tokens, natural order; ")
    useful = 4 * 4 * 16 * 16  # heads, segments, active tokens squared
    assert f"{useful:,} useful" in printed


def test_data(capsys):
    question = ["longnet((8, 32), (1, 4)) & causal()", "-n", "64", "--heads", "2", "--head", "1", "--order", "residue"]
    assert main(["show", *question, "--json", "--cells", "8x16", "--rows", "10:40"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["head"], data["num_heads"], data["order"], data["rate"]) == (1, 2, "residue", 4)
    assert data["row_edges"][0] == 10
    assert data["row_edges"][-1] == 40
    assert len(data["column_edges"]) == 17
    rule = oracle.both(oracle.longnet((8, 32), (1, 4)), oracle.causal())
    position = masks.layout(masks.parse(question[0]), 64).positions()
    table = rule(1, 2, position[10:40], position)
    assert torch.tensor(data["low"]).sum() == table.sum()
    assert data["low"] == data["high"]
    assert data["likely"] is None
    parts = torch.tensor([branch["low"] for branch in data["branches"]])
    assert parts.sum(0).tolist() == data["low"]
    assert data["branches"][0]["pattern"] == "dilated(8, 1, offset='interleaved') & causal()"
    assert data["description"]["useful_pairs"] == masks.describe(masks.parse(question[0]), 64, num_heads=2).useful_pairs


def test_a_page(tmp_path, capsys):
    path = tmp_path / "out.html"
    question = ["show", "longnet((64, 256), (1, 4)) & causal()", "-n", "4K", "--html", str(path)]
    assert main([*question, "--ranks", "4", "--sharding", "zigzag"]) == 0
    assert capsys.readouterr().out == f"wrote {path}: {path.stat().st_size:,} bytes\n"
    assert path.read_text(encoding="utf-8").lower().startswith("<!doctype html>")


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture(tmp_path, capsys, kind, start):
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    path = tmp_path / f"out.{kind}"
    assert main(["show", "longnet((64, 256), (1, 4))", "-n", "4K", "--rows", "1K:2K", "--plot", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}: {path.stat().st_size:,} bytes\n"
    assert path.read_bytes().startswith(start)


BAD = {
    "causal(": "expected",
    "causal() -n 0": "--tokens must be a whole number above 0",
    "causal() --heads 0": "--heads must be at least 1; got 0",
    "causal() --head 8": "--head must be at least 0 and below 8; got 8",
    "causal() --head -1": "--head must be at least 0 and below 8; got -1",
    "causal() --batch 1": "--batch must be at least 0 and below 1; got 1",
    "causal() --rows 5": "--rows takes A:B with 0 <= A < B <= 65536, such as 0:64; got '5'",
    "causal() --rows 5:5": "--rows takes A:B with 0 <= A < B <= 65536, such as 0:64; got '5:5'",
    "causal() --cols 1:65537": "--cols takes A:B with 0 <= A < B <= 65536, such as 0:64; got '1:65537'",
    "causal() --cols=-1:4": "--cols takes A:B with 0 <= A < B <= 65536, such as 0:64; got '-1:4'",
    "causal() --cells 0x4": "--cells takes ROWSxCOLUMNS from 1x1 to 4096x4096, such as 40x80; got '0x4'",
    "causal() --cells 4": "--cells takes ROWSxCOLUMNS",
    "documents('d')": "the pattern needs run-time tensors: give --bind d=...; got none for d",
    "causal() --bind d=3": "--bind must name a run-time tensor of the pattern, which needs none; got 'd'",
    "documents('d') --bind d": "--bind takes NAME=VALUE, such as documents=100,200,300; got 'd'",
    "documents('d') --bind d=3,x": "--bind d takes whole numbers with commas",
    "documents('d') --bind d=3,4 -n 5": "the documents of d must fit into 5 tokens; got 7 in all",
    "documents('d') --bind d=3 --bind d=4": "--bind gives each run-time tensor one value; got two for 'd'",
    "visible_keys('v') --bind v=3": "--bind v takes ranges FIRST:STOP with commas, such as 0:100,200:300; got '3'",
    "lengths('n') --bind n=70000": "lengths must lie between 0 and the 65536 positions; got 70000",
    "documents('d')|visible_keys('d') --bind d=3": "--bind d needs a .json or .pt file with the tensor itself",
    "documents('d') --bind d=none.json": "--bind d must name a file that can be read",
    "neighborhood((4,4),1)": "a grid of 4x4 holds 16 tokens; got queries up to 65536",
    "causal() --plot out.gif": "--plot writes .png or .svg files; got out.gif",
    "causal() --html out.txt": "--html writes .html or .htm files; got out.txt",
    "causal() --html nowhere/out.html": "--html must be in a folder that exists; got nowhere/out.html",
    "causal() --json --html out.html": "show gives one form at a time; got --json and --html",
    "causal() --html out.html --rows 0:5": "a page holds every window and both orders; got --html with --rows",
    "causal() --html out.html --order residue": "a page holds every window and both orders; got --html with --order",
    "causal() --ranks 4": "--ranks needs --html; got it without",
    "causal() --sharding zigzag": "--sharding needs --ranks; got it without",
    "causal() --plot out.png --cells 3x3": "--cells is for the terminal and --json; got it with --plot",
    "causal() --html out.html --ranks 0": "num_ranks must be at least 1",
}  # fmt: skip


@pytest.mark.parametrize("question", BAD)
def test_wrong_questions_have_clear_answers(question, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *question.split(" ")]) == 2
    said = capsys.readouterr()
    assert BAD[question] in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_tensors_from_files(tmp_path):
    """The tensor itself, from torch.save or as a JSON list."""
    ids: Tensor = torch.tensor([0, 0, 1, -1])
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "ids.json").write_text("[0, 0, 1, -1]", encoding="utf-8")
    for name in ("ids.pt", "ids.json"):
        settings = asked("documents('d')", "--bind", f"d={tmp_path / name}")
        assert settings.asked.num_tokens == 4
        assert [row.count("█") // 2 for row in body(map_lines(settings))] == [2, 2, 1, 0]
    (tmp_path / "seen.json").write_text("[[true, false, true], [false, false, true]]", encoding="utf-8")
    settings = asked("visible_keys('v')", "--bind", f"v={tmp_path / 'seen.json'}", "-n", "3", "--batch", "1")
    assert body(map_lines(settings)) == ["    ██"] * 3


@pytest.mark.parametrize(
    ("name", "content"),
    [("bad.pt", "x"), ("bad.json", "{}"), ("bad.json", "[[1, 2], [3]]"), ("bad.json", "[1, true]"), ("bad.json", "")],
)
def test_files_without_a_tensor(tmp_path, capsys, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert main(["show", "documents('d')", "--bind", f"d={tmp_path / name}"]) == 2
    assert "--bind d must name a file with a tensor" in capsys.readouterr().err
