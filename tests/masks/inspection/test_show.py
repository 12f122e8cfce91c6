"""show: heat maps whose every character is the rule, and that fit any terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.cli._terminal import Terminal, terminal_of
from flexdilated.masks.blocks import _pair_search
from flexdilated.masks.inspection import _cells
from tests.support import oracle
from tests.support.shown import body, drawn
from tests.support.strategies import Case, whole_cases, written_expressions

LONGNET = "longnet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)) & causal()"
_ANSI = re.compile("\x1b\\[[0-9;]*m")

pytestmark = pytest.mark.usefixtures("plain_terminal")


def test_the_picture_of_a_small_longnet() -> None:
    lines = drawn("longnet((4, 8), (1, 2)) & causal()", "-n", "10")
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


@st.composite
def small_windows(draw: st.DrawFn) -> tuple[Case, int, str, range, range]:
    """A case, a head, an order, and a window that is small enough for a character a pair."""
    case = draw(whole_cases(written_expressions, max_heads=3, largest=40))
    start, left = (draw(st.integers(0, case.num_queries - 1)) for _ in range(2))
    rows = range(start, min(case.num_queries, start + draw(st.integers(1, 16))))
    columns = range(left, min(case.num_queries, left + draw(st.integers(1, 60))))
    return case, draw(st.integers(0, case.num_heads - 1)), draw(st.sampled_from(["natural", "residue"])), rows, columns


@given(small_windows(), st.booleans())
def test_single_pairs_are_the_rule(file, question, colour):
    """Read back from the characters, or from the colours, in natural and in residue order."""
    case, head, order, rows, columns = question
    counts = oracle.counts(case.twin.rule, range(head, head + 1), case.num_heads, *2 * [torch.arange(case.num_queries)])
    place = torch.arange(case.num_queries)
    if order == "residue":
        place = masks.layout(case.twin.pattern, case.num_queries).positions()
    expected = counts[0][place[rows.start : rows.stop]][:, place[columns.start : columns.stop]]
    file.write_text(masks.to_json(case.twin.pattern), encoding="utf-8")
    lines = drawn(
        *(str(file), "-n", str(case.num_queries), "--heads", str(case.num_heads), "--head", str(head)),
        *("--rows", f"{rows.start}:{rows.stop}", "--cols", f"{columns.start}:{columns.stop}", "--order", order),
        *("--color", "always" if colour else "never"),
    )
    shown = body([_ANSI.sub("", line) if not colour else line for line in lines])
    assert read(shown, len(columns), colour=colour) == expected.clamp(max=9).tolist()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("patterns") / "pattern.json"


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


QUESTIONS = [
    (LONGNET, "-n", "1M"),
    (LONGNET, "-n", "1M", "--rows", "1000K:1M", "--cols", "0:3"),
    ("local_window(left=5, right=0)", "-n", "17"),
    ("longnet((60, 3000), (1, 7))", "-n", "12345", "--order", "residue"),
    ("causal()", "-n", "1"),
    ("causal()", "-n", "2000000000"),
    ("dilated(8, 2, 1)", "-n", "1000", "--rows", "7:9"),
]


@pytest.mark.parametrize(
    ("turn", "question"), [*((turn, QUESTIONS[0]) for turn in range(3)), *enumerate(QUESTIONS[1:])]
)
def test_it_fits_the_terminal(turn, question, monkeypatch):
    """In every size, and with and without colour in turn."""
    columns, height = [(40, 16), (200, 60), (24, 50)][turn % 3]
    colour = ["always", "never"][turn % 2]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(height))
    lines = [_ANSI.sub("", line) for line in drawn(*question, "--color", colour)]
    assert max(map(len, lines)) <= columns
    assert len(lines) < height
    inside = body(lines)
    assert len({len(line) for line in inside}) == 1
    if question == (LONGNET, "-n", "1M"):  # room is used
        assert len(lines) >= 0.8 * height or len(inside[0]) >= 0.6 * columns


@given(st.integers(1, 1 << 21), st.integers(1, 1 << 21), st.integers(24, 120))
def test_both_axes_have_one_unit(num_queries, num_keys, columns) -> None:
    window = {"queries": range(num_queries), "keys": range(num_keys)}
    picture = masks.show(masks.causal(), 1 << 21, **window, size=(columns, 24), ascii=True)
    assert max(map(len, picture.lines)) <= columns
    frame = next(index for index, line in enumerate(picture.lines) if re.search("[+][+-]+[+]$", line))
    beside = [line.split("+")[0] for line in picture.lines[frame + 1 :] if re.match(" *[0-9]", line) and "+" in line]
    labels = re.findall(r"[0-9,]+[KM]?", " ".join([picture.lines[frame - 1], *beside]))
    assert "0" in labels
    assert len({label.lstrip("0123456789,") for label in labels if label != "0"}) <= 1, labels


class Stream(io.StringIO):
    def __init__(self, *, tty: bool, encoding: str) -> None:
        super().__init__()
        self.isatty, self.named = lambda: tty, encoding

    @property
    def encoding(self) -> str:  # pyright: ignore
        return self.named


@pytest.mark.parametrize(
    ("tty", "color", "environment", "expected"),
    [
        (True, "auto", {"TERM": "xterm"}, True),
        (False, "auto", {"TERM": "xterm"}, False),
        (False, "always", {"TERM": "xterm"}, True),
        (True, "never", {"TERM": "xterm"}, False),
        (True, "auto", {"TERM": "dumb"}, False),
        (True, "auto", {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, "always", {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (True, "auto", {"TERM": "xterm", "NO_COLOR": ""}, True),  # set, and empty: as if it were not there
    ],
)
def test_what_a_terminal_takes(tty, color, environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    encoding = "utf-8" if tty else "ascii"
    assert terminal_of(Stream(tty=tty, encoding=encoding), color=color) == Terminal(80, 24, color=expected, shapes=tty)


def test_plain_characters_where_the_encoding_has_no_others(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(tty=False, encoding="ascii"))
    for colour in ("always", "never"):
        lines = drawn("longnet((8, 32), (1, 4)) & causal()", "-n", "100", "--color", colour)
        "\n".join(lines).encode("ascii")
    assert "*" in "".join(body(lines))


def test_estimates_are_named(monkeypatch):
    """Cells in doubt are counted in a line of their own; a cell without a hit is not shown as empty."""
    monkeypatch.setattr(_cells, "_EVERY_PAIR", 0)
    monkeypatch.setattr(_cells, "_BUDGET", 0)
    monkeypatch.setattr(_pair_search, "_SAMPLES", 1)
    lines = drawn("global_tokens(8) | random_blocks(4096, block=8, count=1)", "-n", "4096")
    assert re.match("^[0-9,]+ of [0-9,]+ cells are estimates within bounds", lines[-2])
    assert any("?" in row for row in body(lines))
    assert "? none found, some possible" in "".join(lines)


def test_a_window_without_pairs_says_so() -> None:
    lines = drawn("causal()", "-n", "64", "--rows", "0:4", "--cols", "8:16")
    assert lines[-1] == "No pair is allowed here."
    assert not "".join(body(lines)).strip()
