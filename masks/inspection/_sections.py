"""Sections: stretches of tokens without pairs between them, such as documents; alike ones are looked at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..core._algebra import And, Every
from ..core._bound import Bound
from ..core._pattern import Pattern
from ..patterns._per_document import PerDocument
from ..patterns.run_time._spans import Spans
from ..patterns.run_time._window_list import Windows

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
    """The documents, where every rule keeps to the same ones and counts from their starts; else all in one."""
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
    """Documents that look alike, counted from their starts."""
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
