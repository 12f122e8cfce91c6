"""Multiplicity: how many pairs are allowed by exactly so many branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ._relations import Relations
from ._squares import EMPTY, FULL, Squares


def multiplicity_of(relations: Relations) -> Mapping[int, int]:
    """Pairs over all heads by the number of branches that allow them, ascending; a branch counts as often as it occurs.

    The pairs that no branch allows stand at 0. Raises TooManySquaresError where a pattern repeats too little.
    """
    counted: Counter[int] = Counter()
    for section in relations.sections:
        for group in section.groups:
            count = _Count(relations.squares, tuple(times for _, times in group.rules))
            squares = tuple(relations.of(section, group, rule) for rule, _ in group.rules)
            for number, pairs in count.of(squares, section.side).items():
                counted[number] += pairs * len(group.heads) * len(section.copies)
    bound = relations.bound
    # Squares reach beyond the last token, and sections leave out what lies between them.
    counted[0] = bound.num_heads * bound.num_queries * bound.num_keys - sum(counted.values()) + counted[0]
    return {number: counted[number] for number in sorted(counted) if number == 0 or counted[number]}


class _Count:
    """Pairs of several squares together, by how often they count."""

    def __init__(self, squares: Squares, times: tuple[int, ...]) -> None:
        self.squares, self.times = squares, times
        self._known: dict[tuple[tuple[int, ...], int], Counter[int]] = {}

    def of(self, squares: tuple[int, ...], side: int) -> Counter[int]:
        if all(square in (EMPTY, FULL) for square in squares):
            return Counter({sum(times for square, times in zip(squares, self.times, strict=True) if square): side**2})
        found = self._known.get((squares, side))
        if found is None:
            found = self._known[squares, side] = Counter()
            for quarters in zip(*map(self.squares.quarters, squares), strict=True):
                for number, pairs in self.of(quarters, side // 2).items():
                    found[number] += pairs
        return found
