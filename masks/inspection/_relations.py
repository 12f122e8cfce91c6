"""Relations: who sees whom in a bound pattern, as squares, section by section; what describe counts beyond pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

from jaxtyping import Bool
from torch import Tensor

from ..core._algebra import Or
from ..core._bound import Bound
from ..core._pattern import Pattern
from ..patterns._neighborhood import Neighborhood
from ._packed_rows import packed_bits
from ._rule_squares import RuleSquares
from ._runs import Runs, runs_of
from ._sections import Group, Section, sections_of
from ._squares import NO_PAIR, Squares, TooManySquaresError

# Of one question: a few seconds of work.
_MOST_SQUARES = 1 << 19
_MOST_BOXES = 1 << 21


class Relations:
    """The sections of a bound pattern, and the squares of its rules over each of them, all in one store."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.sections = sections_of(bound)
        self.squares = Squares()
        self._hopeless: set[Pattern] = set()
        stop = max((max(section.queries.stop, section.keys.stop) for section in self.sections), default=1)
        self._rules = RuleSquares(self.squares, stop)

    def ask(self) -> Relations:
        """The same with an allowance for one more question: what was asked before takes nothing from it."""
        self.squares.most = len(self.squares) + _MOST_SQUARES
        self._rules.most_boxes = self._rules.boxes + _MOST_BOXES
        return self

    def of(self, section: Section, group: Group, rule: Pattern) -> int:
        """The pairs of one rule of a group of heads, of the section's queries and keys alone."""
        head = group.heads[0] + self.bound.head_offset
        starts = section.queries.start, section.keys.start
        with self._remembering(rule):
            whole = self._rules.over(rule, head, self.bound.num_heads_global, *starts, section.side)
        sizes = range(len(section.queries)), range(len(section.keys))
        return self.squares.both(whole, self.squares.rectangle(*sizes, section.side))

    @contextmanager
    def _remembering(self, rule: Pattern) -> Iterator[None]:
        """A rule that took most of an allowance in vain is not tried again."""
        if rule in self._hopeless:
            raise TooManySquaresError
        squares, boxes = len(self.squares), self._rules.boxes
        try:
            yield
        except TooManySquaresError:
            took = (len(self.squares) - squares) / _MOST_SQUARES + (self._rules.boxes - boxes) / _MOST_BOXES
            if took > 0.5:
                self._hopeless.add(rule)
            raise

    def lines(self, section: Section, group: Group) -> tuple[int, int]:
        """The queries that see a key by any rule of a group, and the keys that are seen, as the bits of integers."""
        sides = [0, 0]
        for rule, _ in group.rules:
            # The parts of a union apart: joined they may be far more squares.
            for part in rule.parts if isinstance(rule, Or) else (rule,):
                if isinstance(part, Neighborhood) and section.queries == section.keys:
                    # Every token of a grid is in its own window.
                    return (1 << len(section.queries)) - 1, (1 << len(section.keys)) - 1
                for side, held in enumerate(self._lines_of(section, group, part)):
                    sides[side] |= held
        return sides[0], sides[1]

    def _lines_of(self, section: Section, group: Group, rule: Pattern) -> tuple[int, int]:
        """The same of one rule, from what repeats in it or from the runs that it lets tokens see."""
        try:
            square = self.of(section, group, rule)
        except TooManySquaresError:
            runs = self.runs(section, rule)
            if runs is None:
                raise
            queries, keys = runs.lines()
            return _bits(queries), _bits(keys)
        return self.squares.lines(square, section.side), self.squares.lines(square, section.side, columns=True)

    def runs(self, section: Section, rule: Pattern) -> Runs | None:
        """The runs that a rule lets tokens see; None for other rules, and where queries and keys are not the same."""
        return runs_of(rule, section.queries) if section.queries == section.keys else None

    def of_all(self, section: Section) -> int:
        """The pairs that any head allows. A rule that several groups share is looked at once."""
        rules = {rule: group for group in section.groups for rule, _ in group.rules}
        return reduce(self.squares.either, (self.of(section, group, rule) for rule, group in rules.items()), NO_PAIR)


def _bits(held: Bool[Tensor, " n"]) -> int:
    """The bits of an integer, the first one the lowest."""
    return int.from_bytes(bytes(packed_bits(held).tolist()), "little")
