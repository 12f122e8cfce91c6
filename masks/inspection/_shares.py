"""Shares: how the pairs of a pattern divide over its heads and branches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ..blocks._exact_pairs import exact_pairs
from ..blocks._query_pairs import pairs_of_queries
from ..core._bound import Bound
from ..core._box import Box, Progression
from ..core._pattern import Pattern
from ._relations import Relations
from ._sections import Group, groups_of
from ._squares import TooManySquaresError


@dataclass(frozen=True)
class HeadShare:
    """Heads that follow the same rules, and the useful pairs of each of them: of all branches, and of each one."""

    heads: tuple[int, ...]
    branch_pairs: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return sum(self.branch_pairs)


@dataclass(frozen=True)
class BranchShare:
    """A distinct branch, how often it counts, and its useful pairs over all heads, as often as they count."""

    pattern: Pattern
    multiplicity: int
    pairs: int


def branch_shares(bound: Bound, heads: tuple[HeadShare, ...]) -> tuple[BranchShare, ...]:
    """In the order of the pattern."""
    branches = Counter(bound.pattern.branches()).items()
    pairs = (sum(len(share.heads) * share.branch_pairs[index] for share in heads) for index in range(len(branches)))
    return tuple(BranchShare(branch, times, own) for (branch, times), own in zip(branches, pairs, strict=True))


def head_shares(relations: Relations) -> tuple[HeadShare, ...]:
    """Exact, in the order of the first heads; a branch's pairs count as often as the branch does."""
    bound = relations.bound
    try:
        counted = _by_squares(relations)
    except TooManySquaresError:
        known: dict[Pattern, int] = {}
        counted = [_by_boxes(relations, group, known) for group in groups_of(bound)]
    return tuple(HeadShare(group.heads, pairs) for group, pairs in zip(groups_of(bound), counted, strict=True))


def _by_squares(relations: Relations) -> list[tuple[int, ...]]:
    """For each group of heads the pairs of each branch, from what repeats in its rule."""
    groups = groups_of(relations.bound)
    pairs = [[0] * len(group.rules) for group in groups]
    for section in relations.sections:
        for group, own in zip(section.groups, pairs, strict=True):
            for index, (rule, times) in enumerate(group.rules):
                square = relations.of(section, group, rule)
                own[index] += times * len(section.copies) * relations.squares.pairs(square, section.side)
    return [tuple(own) for own in pairs]


def _by_boxes(relations: Relations, group: Group, known: dict[Pattern, int]) -> tuple[int, ...]:
    """The same from bounds on boxes, which some rules without repeats answer in closed form."""
    for rule, _ in group.rules:
        if rule not in known:
            known[rule] = _pairs(relations, rule)
    return tuple(times * known[rule] for rule, times in group.rules)


def _pairs(relations: Relations, rule: Pattern) -> int:
    bound = relations.bound
    if bound.num_queries == bound.num_keys and bound.q_offset == bound.k_offset == 0:
        whole = torch.tensor([0]), torch.tensor([bound.num_queries])
        return int(pairs_of_queries(rule, *whole, bound.num_keys))
    q, k = (
        Progression(torch.tensor([first]), 1, torch.tensor([size]))
        for first, size in ((bound.q_offset, bound.num_queries), (bound.k_offset, bound.num_keys))
    )
    return int(exact_pairs(rule, Box(torch.tensor([0]), q, k)))
