"""Relations: who sees whom in a bound pattern, as squares, section by section; what describe counts beyond pairs."""

from __future__ import annotations

from functools import reduce

from ._bound import Bound
from ._describe_rules import RuleSquares
from ._describe_sections import Group, Section, sections_of
from ._describe_squares import EMPTY, Squares
from ._pattern import Pattern

_MOST_SQUARES = 1 << 19  # a few seconds of work


class Relations:
    """The sections of a bound pattern, and the squares of its rules over each of them, all in one store."""

    def __init__(self, bound: Bound, *, most: int = _MOST_SQUARES) -> None:
        self.bound = bound
        self.sections = sections_of(bound)
        self.squares = Squares(most)
        stop = max((max(section.queries.stop, section.keys.stop) for section in self.sections), default=1)
        self._rules = RuleSquares(self.squares, stop)

    def of(self, section: Section, group: Group, rule: Pattern) -> int:
        """The pairs of one rule of a group of heads, of the section's queries and keys alone."""
        head = group.heads[0] + self.bound.head_offset
        starts = section.queries.start, section.keys.start
        whole = self._rules.over(rule, head, self.bound.num_heads_global, *starts, section.side)
        sizes = range(len(section.queries)), range(len(section.keys))
        return self.squares.both(whole, self.squares.rectangle(*sizes, section.side))

    def of_group(self, section: Section, group: Group) -> int:
        """The pairs that any rule of a group of heads allows."""
        return reduce(self.squares.either, (self.of(section, group, rule) for rule, _ in group.rules), EMPTY)

    def of_all(self, section: Section) -> int:
        """The pairs that any head allows. A rule that several groups share is looked at once."""
        rules = {rule: group for group in section.groups for rule, _ in group.rules}
        return reduce(self.squares.either, (self.of(section, group, rule) for rule, group in rules.items()), EMPTY)
