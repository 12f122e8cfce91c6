"""Every planted bug is caught, in the words that stand beside it; those of other libraries: test_wrong_modules.py."""

import pytest

from tests.support.planted_bugs import Bug, Look, nothing_kept
from tests.support.planted_bugs_in_engines import IN_ENGINES
from tests.support.planted_bugs_in_patterns import IN_PATTERNS

pytestmark = pytest.mark.usefixtures("without_masks")

passed: set[Look] = set()


@pytest.mark.parametrize("bug", [*IN_PATTERNS, *IN_ENGINES], ids=lambda bug: bug.what)
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
