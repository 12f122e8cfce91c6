"""Subsets: pairs by how many rules allow them, from those that all rules of each set allow."""

from __future__ import annotations

from collections import Counter

from ._runs import Runs


def pairs_by_times(rules: list[tuple[Runs, int]]) -> Counter[int]:
    """Pairs by the sum of the numbers of the rules that allow them; those that none allows are left out.

    By inclusion and exclusion, over the pairs that all rules of a set allow.
    """
    found: Counter[int] = Counter()

    def add(chosen: Runs, times: tuple[int, ...], following: int) -> None:
        pairs = chosen.pairs
        if not pairs:
            return
        # A set of rules counts for each of its subsets, once more or once less by how many it is larger.
        for subset in range(1, 1 << len(times)):
            inside = [number for index, number in enumerate(times) if subset >> index & 1]
            found[sum(inside)] += pairs * (-1) ** (len(times) - len(inside))
        for index in range(following, len(rules)):
            runs, number = rules[index]
            add(chosen & runs, (*times, number), index + 1)

    for index, (runs, number) in enumerate(rules):
        add(runs, (number,), index + 1)
    return found
