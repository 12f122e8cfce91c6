"""Some of the cases of `flex_cases`, drawn: `python -m bench flex_cases` runs all of them, also compiled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.attend.flex_cases import GROUPS
from tests.attend.flex_cases.verdicts import EQUAL, verdicts

CASES = {f"{group}: {case.name}": case for group, cases in GROUPS.items() for case in cases}
# Answered by an error that names what is not computed.
REFUSED = ("lists for one", "a block twice", "a block partial and full", "narrower", "lse: maxima", "lse: both")


@given(name=st.sampled_from(sorted(CASES)))
def test_drawn_cases_of_torch(name: str) -> None:
    kind = EQUAL
    if CASES[name].refused or any(part in name for part in REFUSED):
        kind = "refused"
    ways = ("forward",) if CASES[name].refused else ("forward", "backward")
    found = verdicts(CASES[name], ways)
    assert {way: text.partition(":")[0] for way, text in found.items()} == dict.fromkeys(ways, kind), found


def test_cases_have_names_of_their_own() -> None:
    assert len(CASES) == sum(map(len, GROUPS.values()))
