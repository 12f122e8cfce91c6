"""How pairs divide over heads and branches, how many branches allow them, and which tokens have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import sqrt

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..blocks import exact_pairs, pairs_of_queries
from ..core import Bound, Box, Pattern, Progression
from ._relations import Group, Relations, groups_of
from ._squares import EVERY_PAIR, NO_PAIR, Squares, TooManySquaresError

# N tokens, K keys

_MOST_KNOWN = 1 << 18  # squares counted together: a few seconds of work
_MOST_SAMPLES, _MOST_SAMPLED_PAIRS = 64, 1 << 26
_SEED = 0


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
    groups = groups_of(relations.bound)
    try:
        counted = _shares_by_squares(relations, groups)
    except TooManySquaresError:
        rules = {rule for group in groups for rule, _ in group.rules}
        known = {rule: _pairs_by_boxes(relations.bound, rule) for rule in rules}
        counted = [[times * known[rule] for rule, times in group.rules] for group in groups]
    return tuple(HeadShare(group.heads, tuple(pairs)) for group, pairs in zip(groups, counted, strict=True))


def _shares_by_squares(relations: Relations, groups: tuple[Group, ...]) -> list[list[int]]:
    """For each group of heads the pairs of each branch."""
    pairs = [[0] * len(group.rules) for group in groups]
    for section in relations.sections:
        for group, own in zip(section.groups, pairs, strict=True):
            for index, (rule, times) in enumerate(group.rules):
                square = relations.of(section, rule)
                own[index] += times * len(section.copies) * relations.squares.pairs(square, section.side)
    return pairs


def _pairs_by_boxes(bound: Bound, rule: Pattern) -> int:
    """The pairs of a rule for one head by bounds on boxes, which some rules without repeats have in closed form."""
    if bound.num_queries == bound.num_keys and bound.q_offset == bound.k_offset == 0:
        whole = torch.tensor([0]), torch.tensor([bound.num_queries])
        return int(pairs_of_queries(rule, *whole, bound.num_keys))
    q, k = (
        Progression(torch.tensor([first]), 1, torch.tensor([size]))
        for first, size in ((bound.q_offset, bound.num_queries), (bound.k_offset, bound.num_keys))
    )
    return int(exact_pairs(rule, Box(torch.tensor([0]), q, k)))


def multiplicity_of(relations: Relations) -> Mapping[int, int]:
    """Pairs over all heads by the number of branches that allow them, ascending; a branch counts as often as it occurs.

    Key 0 holds the pairs that no branch allows. Raises TooManySquaresError where a pattern repeats too little.
    """
    counted, count = Counter[int](), _SquaresTogether(relations.squares)
    for section in relations.sections:
        for group in section.groups:
            squares = tuple(relations.of(section, rule) for rule, _ in group.rules)
            found = count.of(squares, tuple(times for _, times in group.rules), section.side)
            for number, pairs in found.items():
                counted[number] += pairs * len(group.heads) * len(section.copies)
    bound = relations.bound
    # Squares reach beyond the last token, and sections leave out what lies between them.
    counted[0] = bound.num_heads * bound.num_queries * bound.num_keys - sum(counted.values()) + counted[0]
    return {number: counted[number] for number in sorted(counted) if number == 0 or counted[number]}


class _SquaresTogether:
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


@dataclass(frozen=True)
class SampledMultiplicity:
    """Estimates of `multiplicity` where it is not counted: unbiased, from all keys of some queries, in all heads.

    `pairs` and `standard_errors` are by the number of branches; `queries` says how many queries were drawn.
    """

    queries: int
    pairs: Mapping[int, float]
    standard_errors: Mapping[int, float]


def sampled_multiplicity(bound: Bound) -> SampledMultiplicity:
    """Pairs by how many branches allow them, from queries drawn evenly."""
    groups = groups_of(bound)
    affordable = _MOST_SAMPLED_PAIRS // (bound.num_keys * sum(len(group.rules) for group in groups))
    rows = drawn_tokens(bound.num_queries, max(2, min(_MOST_SAMPLES, affordable)))
    most = sum(times for _, times in groups[0].rules)
    found = torch.stack([_row_multiplicity(bound, groups, row + bound.q_offset, most) for row in rows]).double()
    left_out = max(0.0, 1 - len(rows) / bound.num_queries)
    error = found.std(0) * sqrt(left_out / len(rows)) if len(rows) > 1 else torch.zeros(most + 1)
    numbers = [number for number in range(most + 1) if number == 0 or found[:, number].any()]
    pairs = {number: float(found[:, number].mean()) * bound.num_queries for number in numbers}
    return SampledMultiplicity(len(rows), pairs, {n: float(error[n]) * bound.num_queries for n in numbers})


def _row_multiplicity(bound: Bound, groups: tuple[Group, ...], query: int, most: int) -> Int64[Tensor, " n"]:
    """The keys of one query by how many branches allow them, over all heads."""
    zero, device = torch.tensor(0), torch.device("cpu")
    keys = torch.arange(bound.k_offset, bound.k_offset + bound.num_keys)
    found = torch.zeros(most + 1, dtype=torch.int64)
    for group in groups:
        counts = torch.zeros_like(keys)
        for rule, times in group.rules:
            counts += times * rule.mask_mod(num_heads=1, device=device)(zero, zero, torch.tensor(query), keys)
        found += torch.bincount(counts, minlength=most + 1) * len(group.heads)
    return found


def drawn_tokens(size: int, most: int) -> list[int]:
    """All tokens, or `most` of them, one drawn at random from each of as many equal parts; the same ones each time."""
    if size <= most:
        return list(range(size))
    shares = torch.rand(most, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return ((torch.arange(most) + shares) * size / most).long().tolist()


@dataclass(frozen=True)
class Gap:
    """Tokens of one side without a pair: in every head, in at least one head, and the first such token of each."""

    in_every_head: int
    in_some_head: int
    first_in_every_head: int | None
    first_in_some_head: int | None


@dataclass(frozen=True)
class Gaps:
    """Queries without any key, whose output is 0, and keys without any query; tokens by their index."""

    queries: Gap
    keys: Gap


def gaps_of(relations: Relations) -> Gaps:
    """Raises TooManySquaresError where a pattern repeats too little."""
    sizes = relations.bound.num_queries, relations.bound.num_keys
    # The tokens of each side that have a pair in any head, and in every head.
    in_any, in_all = ([torch.zeros(size, dtype=torch.bool) for size in sizes] for _ in range(2))
    for section in relations.sections:
        lines = [relations.lines(section, group) for group in section.groups]
        for side, held in enumerate(zip(*lines, strict=True)):
            starts = torch.tensor([copy[side] for copy in section.copies])[:, None]
            in_any[side][(starts + _places(reduce(int.__or__, held))).flatten()] = True
            in_all[side][(starts + _places(reduce(int.__and__, held))).flatten()] = True
    return Gaps(*(_gap(*each) for each in zip(in_any, in_all, strict=True)))


def _places(bits: int) -> Int64[Tensor, " n"]:
    """The places of the bits that are set, from the lowest on."""
    held = torch.frombuffer(bytearray(bits.to_bytes(bits.bit_length() // 8 + 1, "little")), dtype=torch.uint8)
    return (held[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().nonzero().squeeze(1)


def _gap(in_any: Bool[Tensor, " N"], in_all: Bool[Tensor, " N"]) -> Gap:
    lacking = [(~held).nonzero().squeeze(1) for held in (in_any, in_all)]
    firsts = [int(tokens[0]) if len(tokens) else None for tokens in lacking]
    return Gap(len(lacking[0]), len(lacking[1]), *firsts)
