"""`flexdilated.flex_attention` on the cases of torch's own tests of FlexAttention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.attend.flex_cases import GROUPS, Case
from tests.attend.flex_cases.verdicts import EQUAL, WAYS, verdicts

from ._jobs import say
from ._measures import Row, at_least, at_most, measure

_CALLS = ("forward", "backward", "compiled")


@measure(groups=("kernel options", "refused by torch too"), of_each=1)
def flex_cases(
    groups: tuple[str, ...] = tuple(GROUPS), of_each: int | None = None, graph_every: int = 3
) -> Iterator[Row]:
    """Do the cases of torch's tests of FlexAttention give the same by our flex_attention, and what is refused?

    of_each: cases of each group that are run; None for all.
    graph_every: one of so many cases is compiled into one graph, too.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for group in groups:
        say(group)
        found[group] = {
            case.name: _verdicts(group, case, in_graph=index % graph_every == 0)
            for index, case in enumerate(GROUPS[group][:of_each])
        }
    refused = {case.name for cases in GROUPS.values() for case in cases if case.refused}
    defined = [each for cases in found.values() for name, each in cases.items() if name not in refused]
    counts = {group: {way: _counts(cases, way) for way in WAYS} for group, cases in found.items()}
    other = {
        f"{group}: {name}": {way: each[way] for way in each if each[way] != EQUAL}
        for group, cases in found.items()
        for name, each in cases.items()
        if any(text != EQUAL for text in each.values())
    }
    detail = {"groups": counts, "other": other}
    for way in _CALLS:
        equal = sum(each[way] == EQUAL for each in defined)
        more = detail if way == "forward" else {}
        yield Row(f"{way}: cases that are equal", at_least(98, "%"), 100 * equal / len(defined), detail={**more})
    errors = [each["forward"] for cases in found.values() for name, each in cases.items() if name in refused]
    named = sum(text.startswith("refused") for text in errors)
    yield Row("cases that torch refuses: refused by a named error", at_least(100, "%"), 100 * named / len(errors))
    wrong = sum(_kind(each[way]) in ("wrong", "failed") for each in defined for way in _CALLS)
    yield Row("neither equal nor refused by name", at_most(0), wrong)


def _verdicts(group: str, case: Case, *, in_graph: bool) -> dict[str, str]:
    found = verdicts(case, [way for way in WAYS if in_graph or way != "one graph"])
    if any(_kind(text) in ("wrong", "failed") for text in found.values()):
        say(f"{group}, {case.name}: {found}")
    return found


def _kind(verdict: str) -> str:
    return verdict.partition(":")[0]


def _counts(cases: dict[str, dict[str, Any]], way: str) -> dict[str, int]:
    """Number of cases of each kind of verdict."""
    return dict(Counter(_kind(each[way]) for each in cases.values() if way in each))
