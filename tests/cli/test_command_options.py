"""Options two by two: refused as declared, or both have an effect; patterns and sizes as every command reads them."""

from argparse import Namespace
from itertools import combinations
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexdilated
from flexdilated import masks
from flexdilated.cli import main
from flexdilated.cli._pattern import AskedPattern, asked_from, most_tokens
from flexdilated.cli._terminal import UsageError, size_of
from tests.support.commands import OPTIONS, first_words, make_light, needed, parsers, run

RELATIONS = {command: parser.rules for command, parser in parsers().items() if parser.rules}
OF_ALL = {"pattern", "file"}  # what a command cannot be without


@pytest.fixture
def light(tmp_path, monkeypatch) -> None:
    make_light(tmp_path, monkeypatch)


def with_needs(command: str, option: str) -> frozenset[str]:
    """The option and, in turn, all that it needs."""
    found, left = set(), [option]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += RELATIONS[command][name].needs
    return frozenset(found)


def clash(command: str, options: frozenset[str]) -> tuple[str, str] | None:
    """Two that are declared to have no effect together."""
    for option in sorted(options):
        for other in RELATIONS[command][option].excludes:
            dest, equals, value = other.partition("=")
            if dest in options and (not equals or OPTIONS[command][dest][-1] == value):
                return option, dest
    return None


def arguments(command: str, options: frozenset[str]) -> list[str]:
    words = [word for option in sorted(options) for word in OPTIONS[command][option]]
    return [*first_words(command, options), *needed(command, options), *words]


def without(command: str, options: frozenset[str], option: str) -> frozenset[str]:
    """The others, without those that need it."""
    return frozenset(each for each in options if option not in with_needs(command, each))


def flag(command: str, option: str) -> str:
    return next((word for word in OPTIONS[command][option] if word.startswith("--")), f"--{option}")


def test_every_option_of_every_command_is_tried() -> None:
    assert {command: set(found) - OF_ALL for command, found in RELATIONS.items()} == {
        command: set(found) - OF_ALL for command, found in OPTIONS.items()
    }


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("command", OPTIONS)
def test_two_options_are_refused_as_declared_or_both_have_an_effect(command: str, capsys, monkeypatch) -> None:
    if command == "show":
        pytest.importorskip("matplotlib", reason="draws with matplotlib")
        told = lambda pattern, **named: f"{[each.tolist() for each in pattern.given_tensors().values()]} {named}"  # noqa: E731
        monkeypatch.setattr("flexdilated.cli._show.page", told)
    known: dict[tuple[str, ...], tuple[int, str, str]] = {}

    def result(words: list[str]) -> tuple[int, str, str]:
        if tuple(words) not in known:
            known[tuple(words)] = run(words, capsys)
        return known[tuple(words)]

    wrong = []
    for pair in combinations(OPTIONS[command], 2):
        options = with_needs(command, pair[0]) | with_needs(command, pair[1])
        status, printed, said = result(arguments(command, options))
        if found := clash(command, options):
            if status != 2 or not all(flag(command, each) in said or each in said.lower() for each in found):
                wrong.append((*pair, f"must be refused for {found}; status {status}: {said}"))
            continue
        if status not in (0, 1) or said.count("error"):
            wrong.append((*pair, f"status {status}: {said}"))
            continue
        for option in pair:
            # The same pattern, with its own values where --bind is left out.
            words = [*first_words(command, options), *needed(command, without(command, options, option))]
            if option == "tokens":  # instead of as many as by default, which take longer
                words += ["-n", "64"]
            others = sorted(without(command, options, option))
            words += [word for each in others for word in OPTIONS[command][each]]
            if result(words)[:2] == (status, printed):
                wrong.append((*pair, f"{option} has no effect"))
    assert wrong == []


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("command", OPTIONS)
def test_an_option_without_what_it_needs_is_refused(command: str, capsys) -> None:
    for option, relation in RELATIONS[command].items():
        for missing in relation.needs:
            options = frozenset(each for each in with_needs(command, option) if each != missing)
            status, _, said = run(arguments(command, options), capsys)
            assert status == 2, (option, missing)
            assert missing.replace("_", "-") in said.lower(), (option, missing, said)


def texts() -> st.SearchStrategy[str]:
    """What no option takes, and what some do."""
    bad = ["", " ", "-1", "0", "nan", "inf", "1e400", "9" * 25, "-" + "9" * 25, "²", "٣", "none.json", ".", "a\nb"]
    bad += ["x=y", "[]"]
    bad += ["d=", "=one.pt", "e=one.pt", "d=none.pt", "d=mine.py", "0:0", "5:3", ":", "1:99999999999", "0x0", "9x9x9"]
    bad += ["/", "none/x.png", "mine.py:none", "none.py:x", "mine.py:", "mine.py", "1GB"]
    return st.sampled_from(bad) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("command", OPTIONS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bad_values_end_in_a_status(command: str, data, capsys) -> None:
    """Never with a traceback, whatever is written behind whichever option."""
    chosen = data.draw(st.lists(st.sampled_from(sorted(OPTIONS[command])), unique=True, max_size=3))
    words = first_words(command, frozenset(chosen))
    if len(words) > 1 and data.draw(st.booleans()):
        words[1] = data.draw(texts())
    for option in chosen:
        word, *value = OPTIONS[command][option]
        words += [word, *([data.draw(texts())] if value else [])] if word.startswith("-") else [data.draw(texts())]
    status, printed, said = run(words, capsys)
    assert status in (0, 1, 2)
    assert "Traceback" not in said
    assert status != 2 or ("error: " in said and printed == "[]")


@pytest.mark.usefixtures("light")
def test_an_expression_a_file_and_a_module_are_one_pattern(capsys) -> None:
    Path("p.json").write_text(masks.to_json(masks.strided(5)), encoding="utf-8")
    module = "from flexdilated import masks\nfirst = masks.every()\nmine = masks.strided(5)\nlast = masks.causal()\n"
    Path("p.py").write_text(module, encoding="utf-8")
    told = [run(["show", pattern, "-n", "40", "--json"], capsys) for pattern in ("strided(5)", "p.json", "p.py:mine")]
    assert "strided(5)" in told[0][1]
    assert told[0] == told[1] == told[2]


def ask(pattern: str, tokens: str | None = None, bind: tuple[str, ...] = ()) -> AskedPattern:
    return asked_from(Namespace(pattern=pattern, tokens=tokens, heads=None, bind=bind))


@given(
    grid=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    around=st.sampled_from(
        ["{}", "{} & causal()", "causal() | {}", "~{}", "{} + strided(4)", "head_groups([causal(), {}])"]
    ),
    block=st.integers(1, 9),
)  # fmt: skip
def test_tokens_default_to_those_of_the_grid(grid, around, block) -> None:
    """Through whatever it stands in; a grid of blocks has as many tokens as its blocks."""
    text = f"neighborhood(({', '.join(map(str, grid))},), 0)"
    plain, blocks = around.format(text), around.format(f"blockwise({text}, {block})")
    assert ask(plain).num_tokens == prod(grid)
    assert ask(blocks).num_tokens == prod(grid) * block
    assert most_tokens(masks.parse(around.format("strided(3)"))) is None
    assert ask(around.format("strided(3)")).num_tokens == 65536
    with pytest.raises(UsageError, match=f"up to position {prod(grid)} and"):
        ask(plain, str(prod(grid) + 1))


def test_sizes_in_full_in_k_and_in_m() -> None:
    assert [size_of(text) for text in ("65536", "64K", " 1m ", "0")] == [65536, 65536, 1 << 20, 0]
    assert [size_of(text) for text in ("", "K", "-5", "64k tokens", "1.5K", "9" * 30, "64G", "²")] == [None] * 8


def test_help_names_what_was_started_and_there_is_a_version(capsys) -> None:
    for program in ("flexdilated", "python -m flexdilated"):
        with pytest.raises(SystemExit, match="0"):
            main(["plan", "--help"], program=program)
        assert capsys.readouterr().out.startswith(f"usage: {program} plan [-h]")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"flexdilated {flexdilated.__version__}\n"


@pytest.mark.parametrize(
    ("pattern", "tensor", "tokens"),
    [
        ("documents('d')", torch.zeros(12, dtype=torch.int64), 12),
        ("causal().per_document(documents('d'))", torch.zeros(2, 20, dtype=torch.int64), 20),
        ("lengths('d')", torch.tensor([7, 90]), 90),
        ("visible_keys('d')", torch.ones(33, dtype=torch.bool), 33),
    ],
)
def test_tokens_default_to_those_of_the_tensor_and_heads_to_those_of_the_pattern(pattern, tensor, tokens, tmp_path):
    torch.save(tensor, tmp_path / "d.pt")
    found = ask(f"{pattern} & per_head([causal(), chunked(3), chunked(4)])", bind=(f"d={tmp_path / 'd.pt'}",))
    assert (found.num_tokens, found.num_heads) == (tokens, 3)
