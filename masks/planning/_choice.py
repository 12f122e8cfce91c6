"""Choice: the ways of computing a pattern that won a measurement, by name; the planner then follows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..core import Bound
from ._options import Allowed, Option, in_blocks_of, nested_option, options_of
from .machine._machine import Machine


@dataclass(frozen=True)
class Choice:
    """For each distinct branch the name of its layout and the sides of its block lists, or all branches together.

    A name that does not occur among a pattern's options is no error: the planner then decides itself.
    """

    together: bool
    ways: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Candidates:
    """All ways of computing a pattern: for each distinct branch, the cheapest first, and of all branches together."""

    branches: tuple[tuple[Option, ...], ...]
    together: Option | None

    @classmethod
    def of(cls, bound: Bound, machine: Machine, allowed: Allowed) -> Candidates:
        branches = Counter(bound.pattern.branches())
        ways = tuple(options_of(branch, times, bound, machine, allowed) for branch, times in branches.items())
        cheapest = {branch: options[0] for branch, options in zip(branches, ways, strict=True)}
        return cls(ways, nested_option(cheapest, bound, machine, allowed))

    def chosen(self, choice: Choice) -> tuple[tuple[Option, ...], ...] | None:
        """The options of each group of terms with the chosen one in front; None where the choice does not fit."""
        groups = self.branches
        if choice.together:
            groups = ((self.together,),) if self.together is not None else ()
        if len(groups) != len(choice.ways):
            return None
        found = tuple(_in_front(options, *way) for options, way in zip(groups, choice.ways, strict=True))
        return None if any(not options for options in found) else found


def way_of(option: Option) -> tuple[str, tuple[int, ...]]:
    """What names an option in a Choice."""
    return option.layout, tuple(term.block_side for term in option.terms if term.shape == "blocks")


def in_other_blocks(option: Option) -> tuple[Option, ...]:
    """The option, and the same with all block lists in blocks of each other side that is weighed on its machine."""
    others = (in_blocks_of(option, side) for side in option.machine.sides)
    return (option, *(each for each in others if way_of(each) != way_of(option)))


def _in_front(options: tuple[Option, ...], layout: str, sides: tuple[int, ...]) -> tuple[Option, ...]:
    for option in options:
        if option.layout == layout:
            ways = {way_of(each): each for each in in_other_blocks(option)}
            if (layout, sides) in ways:
                return (ways[layout, sides], *(other for other in options if other is not option))
    return ()
