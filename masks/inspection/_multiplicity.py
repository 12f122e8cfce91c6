"""Multiplicity: how many pairs are allowed by exactly so many branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ._relations import Relations
from ._squares import EVERY_PAIR, NO_PAIR, Squares, TooManySquaresError
from ._subsets import pairs_by_times

_MOST_KNOWN = 1 << 18  # of squares counted together: a few seconds of work
_MOST_BRANCHES = 8  # whose subsets are counted


def multiplicity_of(relations: Relations) -> Mapping[int, int]:
    """Pairs over all heads by the number of branches that allow them, ascending; a branch counts as often as it occurs.

    The pairs that no branch allows stand at 0. Raises TooManySquaresError where a pattern repeats too little.
    """
    try:
        counted = _by_squares(relations)
    except TooManySquaresError:
        by_runs = _by_runs(relations)
        if by_runs is None:
            raise
        counted = by_runs
    bound = relations.bound
    # Squares reach beyond the last token, and sections leave out what lies between them.
    counted[0] = bound.num_heads * bound.num_queries * bound.num_keys - sum(counted.values()) + counted[0]
    return {number: counted[number] for number in sorted(counted) if number == 0 or counted[number]}


def _by_squares(relations: Relations) -> Counter[int]:
    """Pairs of all heads, from what repeats in the rules; some that no branch allows may be left out."""
    counted, count = Counter[int](), _Count(relations.squares)
    for section in relations.sections:
        for group in section.groups:
            squares = tuple(relations.of(section, group, rule) for rule, _ in group.rules)
            found = count.of(squares, tuple(times for _, times in group.rules), section.side)
            for number, pairs in found.items():
                counted[number] += pairs * len(group.heads) * len(section.copies)
    return counted


def _by_runs(relations: Relations) -> Counter[int] | None:
    """The same, from the runs that the rules let tokens see; None where one of them is not of runs."""
    counted = Counter[int]()
    for section in relations.sections:
        for group in section.groups:
            runs = [(relations.runs(section, rule), times) for rule, times in group.rules]
            known = [(found, times) for found, times in runs if found is not None]
            if len(known) < len(runs) or len(runs) > _MOST_BRANCHES:
                return None
            for number, pairs in pairs_by_times(known).items():
                counted[number] += pairs * len(group.heads) * len(section.copies)
    return counted


class _Count:
    """Pairs of several squares together, by how often they count."""

    def __init__(self, squares: Squares) -> None:
        self.squares = squares
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], int], Counter[int]] = {}

    def of(self, squares: tuple[int, ...], times: tuple[int, ...], side: int) -> Counter[int]:
        """`times` says how often each square counts."""
        if all(square in (NO_PAIR, EVERY_PAIR) for square in squares):
            return Counter({sum(each for square, each in zip(squares, times, strict=True) if square): side**2})
        found = self._known.get((squares, times, side))
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                raise TooManySquaresError
            found = self._known[squares, times, side] = Counter()
            for quarters in zip(*map(self.squares.quarters, squares), strict=True):
                for number, pairs in self.of(quarters, times, side // 2).items():
                    found[number] += pairs
        return found
