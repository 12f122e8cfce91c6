"""Options of every command, two by two: each pair is refused as declared, or both have an effect."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.commands import OPTIONS, first_words, make_light, needed, parsers, run

RELATIONS = {command: parser.known for command, parser in parsers().items() if parser.known}
OF_ALL = {"pattern", "file"}  # what a command cannot be without


@pytest.fixture(autouse=True)
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
