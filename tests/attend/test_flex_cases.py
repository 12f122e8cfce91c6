"""Some of the cases of `flex_cases`, drawn: `python -m bench flex_cases` runs all of them, also compiled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.attend.flex_cases import GROUPS
from tests.attend.flex_cases.verdicts import EQUAL, verdicts

CASES = {f"{group}: {case.name}": case for group, cases in GROUPS.items() for case in cases}
# Parts of the names of cases that are answered by an error, which names what is not computed.
REFUSED = ("a block twice", "a block partial and full", "narrower dtype", "lists for more entries")


@given(name=st.sampled_from(sorted(CASES)))
def test_drawn_cases_of_torch(name: str) -> None:
    kind = "refused" if CASES[name].refused or any(part in name for part in REFUSED) else EQUAL
    found = verdicts(CASES[name], ("forward", "backward", "torch"))
    ours = [text.partition(":")[0] for way, text in found.items() if way != "torch"]
    assert set(ours) == {kind}, found


def test_cases_have_names_of_their_own() -> None:
    assert len(CASES) == sum(map(len, GROUPS.values()))
