"""Cells of a coarse grid, counted exactly or within bounds; show: heat maps whose every character is the rule."""

import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import process_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.cli._terminal import Terminal, terminal_of
from flexdilated.masks.blocks import _pair_search
from flexdilated.masks.inspection import _cells
from flexdilated.masks.inspection._cells import Cells, count_cells
from flexdilated.masks.orders._layout import Layout
from flexdilated.testing._drawn_inputs import in_range
from tests.support import oracle
from tests.support.ladders import LONGNET_5
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.shown import body, drawn
from tests.support.strategies import Case, cases, whole_cases, written_expressions

MILLION = 1 << 20
LONGNET = masks.longnet(*LONGNET_5) & masks.causal()


@st.composite
def windows(draw: st.DrawFn, size: int) -> tuple[range, int]:
    """Some of the slots, often all, and a number of cells."""
    start = draw(st.one_of(st.just(0), st.integers(0, size - 1)))
    stop = draw(st.one_of(st.just(size), st.integers(start + 1, size)))
    return range(start, stop), draw(st.integers(1, stop - start))


@st.composite
def questions(draw: st.DrawFn, pattern: masks.Pattern | masks.Mixture, num_queries: int, num_keys: int) -> dict:
    """Keywords of `count_cells` beside the head: window, shape and order, that of the pattern or another."""
    (queries, rows), (keys, columns) = draw(windows(num_queries)), draw(windows(num_keys))
    layout = masks.layout(pattern, num_queries)
    order = draw(st.sampled_from([None, layout, Layout(num_queries, draw(st.integers(1, 9)))]))
    return {"queries": queries, "keys": keys, "shape": (rows, columns), "order": order}


def dense_cells(counts: Tensor, question: dict) -> Tensor:
    """The same cells, by summing a dense table over token positions."""
    order, sides = question["order"], []
    for window, number, size in zip(
        (question["queries"], question["keys"]), question["shape"], counts.shape, strict=True
    ):
        position = torch.arange(size) if order is None else Layout(size, order.rate).positions()
        edges = [window.start + cell * len(window) // number for cell in range(number + 1)]
        sides.append([position[first:stop] for first, stop in pairwise(edges)])
    return torch.tensor([[int(counts[row][:, column].sum()) for column in sides[1]] for row in sides[0]])


def assert_true(cells: Cells, counts: Tensor, question: dict) -> None:
    truth = dense_cells(counts, question)
    assert (cells.low <= truth).all()
    assert (truth <= cells.high).all()
    assert torch.equal(cells.area, dense_cells(torch.ones_like(counts), question))
    assert (cells.low <= cells.likely).all()
    assert (cells.likely <= cells.high).all()
    assert torch.equal(cells.low, sum(branch.low for branch in cells.branches))
    assert torch.equal(cells.high, sum(branch.high for branch in cells.branches))
    assert (cells.high <= len(cells.branches) * cells.area).all()


# (pairs evaluated one by one, budget for undecided boxes, boxes at most, side of small boxes): as they are; all by
# boxes; with a small budget or none; by a sample alone.
WAYS = {
    "pair by pair": (1 << 20, 1 << 26, 1 << 20, 64),
    "by boxes": (0, 1 << 26, 1 << 20, 4),
    "small budget": (0, 4000, 1 << 20, 3),
    "no budget": (0, 0, 1 << 20, 2),
    "sampled": (0, 0, 0, 2),
}


@contextmanager
def counted(way: str) -> Iterator[None]:
    every_pair, budget, boxes, side = WAYS[way]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cells, "_EVERY_PAIR", every_pair)
        patch.setattr(_cells, "_BUDGET", budget)
        patch.setattr(_cells, "_MOST_BOXES", boxes)
        patch.setattr(_cells, "_PARTS_AT_ONCE", 200)
        patch.setattr(_cells, "_SAMPLES", 500)
        patch.setattr(_pair_search, "_SAMPLES", 500)
        patch.setattr(_pair_search, "_CELL_SIDE", side)
        patch.setattr(_pair_search, "_FRONTIER", 100)
        yield


@given(data=st.data())
def test_cells_hold_the_pairs_of_the_dense_rule(data: st.DataObject) -> None:
    case = data.draw(cases(largest=30).map(Case.from_zero).filter(lambda case: in_range(case.bind)))
    heads, head = case.num_heads_global, data.draw(st.integers(0, case.num_heads_global - 1))
    question = data.draw(questions(case.twin.pattern, case.num_queries, case.num_keys))
    sizes = {"head": head, "num_heads": heads, "num_keys": case.num_keys}
    q, k = torch.arange(case.num_queries), torch.arange(case.num_keys)
    counts = oracle.counts(case.twin.rule, range(head, head + 1), heads, q, k)[0]
    assert_true_in_all_ways(case.twin.pattern, case.num_queries, counts, question, **sizes)


@settings(max_examples=10)
@given(data=st.data())
def test_cells_of_run_time_tensors(data: st.DataObject) -> None:
    packed: Packed = data.draw(packed_cases().filter(lambda packed: packed.q_offset == packed.k_offset == 0))
    entry, head = data.draw(st.integers(0, packed.batch - 1)), data.draw(st.integers(0, packed.num_heads - 1))
    question = data.draw(questions(packed.pattern, packed.num_queries, packed.num_keys))
    sizes = {"head": head, "num_heads": packed.num_heads, "num_keys": packed.num_keys}
    batch = min(entry, packed.pattern.bind(**packed.sizes | {"batch": 1}).batch - 1)
    counts = packed.counts[batch, head]
    assert_true_in_all_ways(packed.pattern, packed.num_queries, counts, question, batch=batch, **sizes)


def assert_true_in_all_ways(pattern, num_queries: int, counts: Tensor, question: dict, **sizes: int) -> None:
    for way in WAYS:
        with counted(way):
            cells = count_cells(pattern, num_queries, **sizes, **question)
        assert_true(cells, counts, question)
        if way in ("pair by pair", "by boxes"):
            assert cells.exact.all()


@pytest.mark.parametrize("residue", [False, True])
def test_a_million_tokens_are_counted_exactly(residue: bool) -> None:
    """LongNet, causal, in 64 x 64 cells: all its pairs, and none above the diagonal."""
    order = masks.layout(LONGNET, MILLION) if residue else None
    began = process_time()
    cells = count_cells(LONGNET, MILLION, head=3, num_heads=8, shape=(64, 64), order=order)
    took = process_time() - began
    assert cells.exact.all()
    expected = 0
    for width, rate in zip(*LONGNET_5, strict=True):
        active = width // rate  # every segment is whole
        expected += MILLION // width * active * (active + 1) // 2
    assert int(cells.low.sum()) == expected
    if not residue:
        assert not cells.high.triu(1).any()
    assert took < 20  # about half a second by itself


def test_a_rule_without_bounds_is_estimated_and_says_so() -> None:
    """A third of all pairs of a function, estimated from a few; bounds hold."""
    third = masks.custom(lambda b, h, q, k: (q + 2 * k) % 3 == 0)
    cells = count_cells(third, MILLION, shape=(30, 20))
    assert not cells.exact.any()
    assert (cells.low == 0).all()
    share = cells.likely / cells.area
    assert float((share - 1 / 3).abs().max()) < 0.05


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
def test_single_pairs_are_the_rule(file, question, color):
    """Read back from the characters, or from the colors, in natural and in residue order."""
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
        *("--color", "always" if color else "never"),
    )
    shown = body([_ANSI.sub("", line) if not color else line for line in lines])
    assert read(shown, len(columns), color=color) == expected.clamp(max=9).tolist()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("patterns") / "pattern.json"


def read(lines: Sequence[str], columns: int, *, color: bool) -> list[list[int]]:
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
        assert not (color and "█" in firsts)
    return table


@given(
    st.sampled_from([masks.causal(), LONGNET, masks.local_window(left=5, right=0)]),
    *[st.integers(1, 1 << 21)] * 2,
    st.tuples(st.integers(24, 200), st.integers(14, 60)),
    st.booleans(),
)
def test_it_fits_and_both_axes_have_one_unit(pattern, num_queries, num_keys, size, color) -> None:
    window = {"queries": range(num_queries), "keys": range(num_keys)}
    picture = masks.show(pattern, 1 << 21, **window, size=size, ascii=True, color=color)
    lines = [_ANSI.sub("", line) for line in picture.lines]
    assert max(map(len, lines)) <= size[0]
    assert len(lines) < size[1]
    frame = next(index for index, line in enumerate(lines) if re.search("[+][+-]+[+]$", line))
    end = next(index for index, line in enumerate(lines) if index > frame and re.search("[+]-+[+]$", line))
    beside = [line.split("+")[0] for line in lines[frame + 1 : end] if re.match(" *[0-9]", line) and "+" in line]
    labels = re.findall(r"[0-9,]+[KM]?", " ".join([lines[frame - 1], *beside]))
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
    for color in ("always", "never"):
        lines = drawn("longnet((8, 32), (1, 4)) & causal()", "-n", "100", "--color", color)
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
