"""Relations: which pairs a bound pattern allows, as squares, section by section; for what describe counts of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

from ..core import And, Bound, Every, Or, Pattern
from ..patterns import Neighborhood, PerDocument, Spans, Windows
from ._rule_squares import RuleSquares
from ._squares import NO_PAIR, Squares, TooManySquaresError

# Of one quantity: a second or two of work.
_MOST_SQUARES = 1 << 18
_MOST_BOXES = 1 << 21

Rules = tuple[tuple[Pattern, int], ...]  # of one head: the rule of each distinct branch, and how often it counts


@dataclass(frozen=True)
class Group:
    """Heads, of this device and in its count, that all follow the same rules."""

    heads: tuple[int, ...]
    rules: Rules


@dataclass(frozen=True)
class Section:
    """Queries and keys at these positions; copies of it begin with these queries and keys.

    The positions are those that the rules of the groups count: from a document's start where `groups` say so.
    """

    queries: range
    keys: range
    groups: tuple[Group, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def side(self) -> int:
        """Of the least square that holds it: a power of two."""
        return 1 << (max(len(self.queries), len(self.keys)) - 1).bit_length()


def groups_of(bound: Bound) -> tuple[Group, ...]:
    """The heads by their rules, in the order of their first heads."""
    groups: dict[Rules, list[int]] = {}
    branches = Counter(bound.pattern.branches()).items()
    for head in range(bound.num_heads):
        here = head + bound.head_offset, bound.num_heads_global
        groups.setdefault(tuple((branch.for_head(*here), times) for branch, times in branches), []).append(head)
    return tuple(Group(tuple(heads), rules) for rules, heads in groups.items())


def sections_of(bound: Bound) -> tuple[Section, ...]:
    """The documents, where every rule keeps to the same ones and counts from their starts; else one for all."""
    groups = groups_of(bound)
    split = {rule: _split(rule) for group in groups for rule, _ in group.rules}
    spans = next(iter(split.values()))[0]
    queries = range(bound.q_offset, bound.q_offset + bound.num_queries)
    keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
    if spans is None or any(own != spans for own, _ in split.values()):
        return (Section(queries, keys, groups, ((0, 0),)),)
    inside = tuple(Group(each.heads, tuple((split[rule][1], times) for rule, times in each.rules)) for each in groups)
    documents = Windows.squares(spans.starts, spans.stops).from_start().within(queries, keys)
    return tuple(_section(documents.select(index), bound, inside) for index in documents.kinds(None))


def _section(documents: Windows, bound: Bound, groups: tuple[Group, ...]) -> Section:
    """Documents of one length, counted from their starts."""
    start, q, q_stop, k, k_stop = (
        int(edge[0])
        for edge in (documents.origin, documents.q_start, documents.q_stop, documents.k_start, documents.k_stop)
    )
    begins = (documents.q_start - bound.q_offset).tolist(), (documents.k_start - bound.k_offset).tolist()
    copies = tuple(zip(*begins, strict=True))
    return Section(range(q - start, q_stop - start), range(k - start, k_stop - start), groups, copies)


def _split(rule: Pattern) -> tuple[Spans | None, Pattern]:
    """(the documents that a rule keeps to, the rule counted from their starts); None where it is not that simple."""
    kept: list[Spans] = []
    rest: list[Pattern] = []
    for factor in rule.parts if isinstance(rule, And) else (rule,):
        if isinstance(factor, Spans):
            kept.append(factor)
        elif isinstance(factor, PerDocument) and isinstance(factor.spans, Spans):
            kept.append(factor.spans)
            rest.append(factor.part)
        elif factor.period() == 1:  # a rule of distances is the same counted from anywhere
            rest.append(factor)
        else:
            return None, rule
    if not kept or any(other != kept[0] for other in kept):
        return None, rule
    return kept[0], And.of(*rest) if rest else Every()


class Relations:
    """The sections of a bound pattern, and the squares of its rules over each of them, all in one store."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.sections = sections_of(bound)
        self.squares = Squares()
        self._exceeding: set[Pattern] = set()
        stop = max((max(section.queries.stop, section.keys.stop) for section in self.sections), default=1)
        self._rules = RuleSquares(self.squares, stop)

    def with_allowance(self) -> Relations:
        """The same, with an allowance for one more quantity: what was counted before takes nothing from it."""
        self.squares.most = len(self.squares) + _MOST_SQUARES
        self._rules.most_boxes = self._rules.boxes + _MOST_BOXES
        return self

    def of(self, section: Section, rule: Pattern) -> int:
        """The pairs of a rule for one head, of the section's queries and keys alone."""
        with self._within_allowance(rule):
            whole = self._rules.over(rule, section.queries.start, section.keys.start, section.side)
        sizes = range(len(section.queries)), range(len(section.keys))
        return self.squares.both(whole, self.squares.rectangle(*sizes, section.side))

    @contextmanager
    def _within_allowance(self, rule: Pattern) -> Iterator[None]:
        """A rule that exceeded most of an allowance is not tried again."""
        if rule in self._exceeding:
            raise TooManySquaresError
        squares, boxes = len(self.squares), self._rules.boxes
        try:
            yield
        except TooManySquaresError:
            took = (len(self.squares) - squares) / _MOST_SQUARES + (self._rules.boxes - boxes) / _MOST_BOXES
            if took > 0.5:
                self._exceeding.add(rule)
            raise

    def lines(self, section: Section, group: Group) -> tuple[int, int]:
        """The queries with a key by any rule of a group, and the keys with a query, as the bits of integers."""
        sides = [0, 0]
        for rule, _ in group.rules:
            # The parts of a union apart: joined they may be far more squares.
            for part in rule.parts if isinstance(rule, Or) else (rule,):
                if isinstance(part, Neighborhood) and section.queries == section.keys:
                    # Every token of a grid is in its own window.
                    return (1 << len(section.queries)) - 1, (1 << len(section.keys)) - 1
                square = self.of(section, part)
                for side, columns in enumerate((False, True)):
                    sides[side] |= self.squares.lines(square, section.side, columns=columns)
        return sides[0], sides[1]

    def of_all(self, section: Section) -> int:
        """The pairs that any head allows. A rule that several groups share is evaluated once."""
        rules = dict.fromkeys(rule for group in section.groups for rule, _ in group.rules)
        return reduce(self.squares.either, (self.of(section, rule) for rule in rules), NO_PAIR)
