"""`flexdilated.flex_attention` on the cases of torch's own tests of FlexAttention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ._jobs import say
from ._measures import Row, at_least, at_most, measure
from .cases.flex import GROUPS, Case
from .cases.flex.verdicts import EQUAL, WAYS, verdicts

_CALLS = ("forward", "backward", "compiled")

Verdicts = dict[str, str]  # by way


@measure(groups=("kernel options", "refused by torch too"), of_each=1)
def flex_cases(
    groups: tuple[str, ...] = tuple(GROUPS), of_each: int | None = None, compiled_every: int = 1, graph_every: int = 3
) -> Iterator[Row]:
    """Do the cases of torch's tests of FlexAttention give the same by our flex_attention, and what is refused?

    of_each: cases of each group that are run; None for all.
    compiled_every, graph_every: one of so many cases is run in a compiled function, and compiled into one graph.
    """
    every = {"compiled": compiled_every, "one graph": graph_every}
    found = {group: list(_verdicts(group, GROUPS[group][:of_each], every)) for group in groups}
    counts = {group: {way: _counts((each for _, each in cases), way) for way in WAYS} for group, cases in found.items()}
    defined = [
        (f"{group}: {case.name}", each) for group, cases in found.items() for case, each in cases if not case.refused
    ]
    other = {name: {way: text for way, text in each.items() if text != EQUAL} for name, each in defined}
    detail = {"groups": counts, "other": {name: texts for name, texts in other.items() if texts}}
    for way in _CALLS:
        tried = [each[way] for _, each in defined if way in each]
        more = detail if way == "forward" else {}
        yield Row(f"{way}: cases that are equal", at_least(98, "%"), 100 * tried.count(EQUAL) / len(tried), detail=more)
    wrong = sum(_kind(each.get(way, EQUAL)) in ("wrong", "failed") for _, each in defined for way in _CALLS)
    wrong += sum(_kind(each.get("one graph", EQUAL)) == "wrong" for _, each in defined)
    yield Row("neither equal nor refused by name", at_most(0), wrong)
    answers = [each["forward"] for cases in found.values() for case, each in cases if case.refused]
    named = sum(_kind(answer) == "refused" for answer in answers)
    yield Row("cases that torch refuses: refused by a named error", at_least(100, "%"), 100 * named / len(answers))


def _verdicts(group: str, cases: Iterable[Case], every: dict[str, int]) -> Iterator[tuple[Case, Verdicts]]:
    say(group)
    for index, case in enumerate(cases):
        each = verdicts(case, [way for way in WAYS if index % every.get(way, 1) == 0])
        if any(_kind(text) in ("wrong", "failed") for text in each.values()):
            say(f"{case.name}: {each}")
        yield case, each


def _kind(verdict: str) -> str:
    return verdict.partition(":")[0]


def _counts(cases: Iterable[Verdicts], way: str) -> dict[str, int]:
    """Number of cases of each kind of verdict."""
    return dict(Counter(_kind(each[way]) for each in cases if way in each))
