"""Every planted bug is caught, by the check that its row of contributing/tests.md names and in the words it quotes."""

import pytest

from tests.support.planted_bugs import Bug, Look, nothing_kept
from tests.support.planted_bugs_page import BUGS, PAGE, filled

passed: set[Look] = set()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_it_is_caught_and_nothing_is_without_it(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug.look not in passed:
        with nothing_kept():
            bug.look()
        passed.add(bug.look)
    bug.plant(monkeypatch)
    with nothing_kept(), pytest.raises(AssertionError) as caught:
        bug.look()
    said = " ".join(str(caught.value).split())
    assert bug.says in said, f"it was caught, and said to be something else: {said}"


def test_each_has_something_to_say() -> None:
    assert all(bug.says for bug in BUGS)
    assert len({bug.what for bug in BUGS}) == len(BUGS) >= 40


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), "after a change of the bugs: python -m tests.support.planted_bugs_page"
