"""Tables that fit a width: nothing wider than asked for, nothing lost, and the catalogue's patterns in 80 columns."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from bench._catalogue import ENTRIES
from flexdilated import masks
from flexdilated.cli import main
from flexdilated.masks.inspection._fitted_table import fitted_facts, fitted_table
from tests.support import commands

_LEAST = 30
words = st.text("abc(,)[]=1 ", max_size=60).map(lambda text: " ".join(text.split()))


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[str]], list[str]]:
    columns = draw(st.integers(2, 8))
    row = st.lists(words, min_size=columns, max_size=columns)
    return draw(st.lists(row, min_size=1, max_size=4)), draw(row)


def atoms(text):
    """Words and numbers of a text, which no line may split."""
    return re.findall(r"(?:[^\s,()\[\]|]|(?<=\d),(?=\d))+", text)


@given(tables(), st.integers(24, 200))
def test_no_line_is_longer_and_no_character_is_lost(table, columns):
    rows, headers = table
    text = fitted_table(rows, headers, columns=columns)
    longest = max(map(len, atoms(" ".join(cell for row in (headers, *rows) for cell in row))), default=0)
    assert max(map(len, text.splitlines())) <= max(columns, _LEAST, 2 * longest + 12)
    for character in "abc(,)=1":
        assert text.count(character) >= sum(cell.count(character) for row in (headers, *rows) for cell in row)


@given(tables(), st.integers(24, 200), st.sampled_from([1, 1_048_576]))
def test_no_word_or_number_is_split(table, columns, number):
    rows, headers = table
    rows = [[f"{cell} {number:,}" for cell in row] for row in rows]
    whole = {atom for row in (headers, *rows) for cell in row for atom in atoms(cell)}
    for text in (
        fitted_table(rows, headers, columns=columns),
        fitted_facts(list(zip(headers, rows[0], strict=True)), columns=columns),
    ):
        assert {atom for atom in atoms(text) if set(atom) != {"-"}} <= whole


@pytest.mark.parametrize("columns", range(40, 201, 20))
@pytest.mark.parametrize("entry", ENTRIES[::7], ids=lambda entry: entry.name)
def test_plans_split_no_word_of_a_pattern(entry, columns):
    report = fd.plan(entry.pattern(576), 576, num_heads=entry.num_heads, layers=1)
    whole = {atom for each in (repr(entry.pattern(576)), *(term.rule for term in report.terms)) for atom in atoms(each)}
    printed = atoms(report.to_text(columns=columns))
    cut = {atom for atom in printed if any(atom != each and each.startswith(atom) for each in whole if len(atom) > 3)}
    assert cut <= whole | {"block", "blocks", "head", "heads", "token", "tokens"}, cut


def test_a_table_that_fits_is_left_alone():
    rows, headers = [["a b", "1"], ["c", "22"]], ["name of it", "number"]
    assert fitted_table(rows, headers, columns=80, align=("left", "right")) == (
        "name of it      number\n------------  --------\na b                  1\nc                   22"
    )


def test_columns_that_do_not_fit_follow_with_the_first():
    rows, headers = [["x", *(str(10**9 + place) for place in range(6))]], ["row", *"abcdef"]
    first, second = fitted_table(rows, headers, columns=50).split("\n\n")
    assert first.splitlines()[0].split() == ["row", "a", "b", "c"]
    assert second.splitlines()[0].split() == ["row", "d", "e", "f"]
    assert second.splitlines()[2].split() == ["x", "1000000003", "1000000004", "1000000005"]


def test_facts_are_wrapped_beside_their_names():
    assert fitted_facts([("name", "one two three four five six seven"), ("b", "eight")], columns=30) == (
        "name  one two three four five\n      six seven\nb     eight"
    )


LONGEST = sorted(ENTRIES, key=lambda entry: len(entry.text))[-3:]


@pytest.mark.parametrize("entry", [*LONGEST, *ENTRIES[::13]], ids=lambda entry: entry.name)
def test_the_catalogue_fits_in_80_columns(entry):
    told = masks.describe(entry.pattern(576), 576, num_heads=entry.num_heads)
    assert max(map(len, str(told).splitlines())) <= 80
    assert f"{told.useful_pairs:,}" in str(told)


@pytest.mark.parametrize("columns", [80, 140])
def test_commands_fit_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    commands.make_memory_up(monkeypatch)
    pattern = "longnet((32, 128, 256), (1, 2, 4)) & causal() & ~global_tokens(4)"
    assert main(["show", pattern, "-n", "256", "--heads", "2"]) == 0
    assert main(["plan", pattern, "-n", "256", "--heads", "2", "--layers", "1"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert "saturates" in printed
    assert "What was weighed" in printed


def test_a_very_long_pattern_is_cut_and_whole_in_data(capsys):
    pattern = masks.block_list([[place] for place in range(200)], block=16)
    told = masks.describe(pattern, 3200, num_heads=1)
    assert "…" in str(told)
    assert told.to_data()["branches"][0]["pattern"] == repr(pattern)
