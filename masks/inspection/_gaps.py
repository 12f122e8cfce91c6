"""Gaps: queries without a key, and keys that no query sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from ._relations import Relations


@dataclass(frozen=True)
class Gap:
    """Tokens of one side without a pair: in every head, in at least one head, and the first such token of each."""

    in_every_head: int
    in_some_head: int
    first_in_every_head: int | None
    first_in_some_head: int | None


@dataclass(frozen=True)
class Gaps:
    """Queries without any key, whose output is 0, and keys that no query sees; tokens by their index."""

    queries: Gap
    keys: Gap


def gaps_of(relations: Relations) -> Gaps:
    """Raises TooManySquaresError where a pattern repeats too little."""
    bound = relations.bound
    in_all = [0, 0]  # the tokens that have a pair in every head, as bits
    in_any = [0, 0]
    for section in relations.sections:
        lines = [relations.lines(section, group) for group in section.groups]
        for side, held in enumerate(zip(*lines, strict=True)):
            every, some = reduce(int.__and__, held), reduce(int.__or__, held)
            for copy in section.copies:
                in_all[side] |= every << copy[side]
                in_any[side] |= some << copy[side]
    sizes = bound.num_queries, bound.num_keys
    return Gaps(*(_gap(size, *each) for size, each in zip(sizes, zip(in_any, in_all, strict=True), strict=True)))


def _gap(size: int, in_any: int, in_all: int) -> Gap:
    lacking = [((1 << size) - 1) & ~held for held in (in_any, in_all)]
    firsts = [(bits & -bits).bit_length() - 1 if bits else None for bits in lacking]
    return Gap(lacking[0].bit_count(), lacking[1].bit_count(), *firsts)
