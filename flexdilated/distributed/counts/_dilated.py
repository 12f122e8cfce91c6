"""Token counts of dilated branches in closed form, for all pairs of a rank and a chunk at once.

A segment that contains tokens of two chunks contains all positions between them: the end of the earlier chunk and the
beginning of the later one. If rates divide their segments, the active tokens of a branch are one residue class of all
positions. So the keys that a rank needs in a chunk are a union of residue classes, each restricted to the beginning of
the chunk, its end, or both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks.core import And, Pattern
from ...masks.patterns import Causal, Dilated
from ._chunks import Chunks

# W ranks, R some of them, n chunks, T turns (a rank's first chunk, its second)

_MOST_VALUES = 1 << 18  # (rank, chunk) pairs counted at once, so that they fit the cache


@dataclass(frozen=True)
class Branch:
    """A dilated rule for one head, causal or not: query and key in one segment, both congruent to the offset."""

    segment: int
    rate: int
    offset: int
    causal: bool


def as_branches(rules: Sequence[Pattern]) -> tuple[Branch, ...] | None:
    """The rules by ascending rates, if each is a dilated branch whose rate divides its segment and the next rate."""
    branches = [_as_branch(rule) for rule in rules]
    if None in branches:
        return None
    found = sorted((branch for branch in branches if branch is not None), key=lambda branch: branch.rate)
    fits = all(branch.segment % branch.rate == 0 for branch in found)
    return tuple(found) if fits and all(b.rate % a.rate == 0 for a, b in pairwise(found)) else None


def _as_branch(rule: Pattern) -> Branch | None:
    factors = rule.parts if isinstance(rule, And) else (rule,)
    dilated = [factor for factor in factors if isinstance(factor, Dilated)]
    others = [factor for factor in factors if not isinstance(factor, Dilated)]
    if len(dilated) != 1 or any(not isinstance(factor, Causal) for factor in others):
        return None
    (base,) = dilated
    assert isinstance(base.offset, int), "a rule for one head has its offset resolved"
    return Branch(base.segment, base.rate, base.offset, bool(others))


def dilated_tokens(groups: Sequence[tuple[tuple[Branch, ...], int]], chunks: Chunks) -> Int64[Tensor, "W n"]:
    """Number of tokens that each rank needs in each chunk, summed over (group of branches, multiplicity)."""
    tokens = torch.zeros(chunks.num_ranks, len(chunks), dtype=torch.int64)
    for group, times in _distinct(groups, chunks):
        for ranks in torch.arange(chunks.num_ranks).split(max(1, _MOST_VALUES // len(chunks))):
            tokens[ranks] += times * _of_group(group, chunks, chunks.by_turn[:, ranks])
    return tokens


def _of_group(group: tuple[Branch, ...], chunks: Chunks, turns: Int64[Tensor, "T R"]) -> Int64[Tensor, "R n"]:
    """Tokens of each chunk that these ranks need; each branch adds only tokens that no branch of smaller rate has."""
    total = torch.zeros(turns.shape[1], len(chunks), dtype=torch.int64)
    covered: list[tuple[Tensor, Tensor]] = []
    for index, branch in enumerate(group):
        head, tail = _reached(branch, chunks, turns)
        _, *holders = _lineage(group, index)
        known_head, known_tail = covered[holders[0]] if holders else (chunks.start, chunks.stop)
        # Count the beginning of each chunk up to `head` and its end from `tail`, less tokens that are already counted.
        total += _count(branch, known_head, torch.minimum(head, known_tail))
        total += _count(branch, torch.maximum(torch.maximum(tail, head), known_head), known_tail)
        covered.append((torch.maximum(head, known_head), torch.minimum(tail, known_tail)))
    return total


def _reached(
    branch: Branch, chunks: Chunks, turns: Int64[Tensor, "T R"]
) -> tuple[Int64[Tensor, "R n"], Int64[Tensor, "R n"]]:
    """(end of the part at a chunk's beginning that earlier queries need, start of the part at its end for later ones).

    Queries need keys back to the start of their first segment and, unless causal, up to the end of their last one, if
    one of the queries in that segment is active.
    """
    begin, end = chunks.start // branch.segment * branch.segment, -(-chunks.stop // branch.segment) * branch.segment
    nowhere = int(chunks.stop[-1])
    looks_back = _count(branch, chunks.start, torch.minimum(chunks.stop, begin + branch.segment)) > 0
    looks_on = _count(branch, torch.maximum(chunks.start, end - branch.segment), chunks.stop) > 0
    # The last entry, which index -1 selects, is for ranks without a chunk.
    back_to = torch.cat([torch.where(looks_back, begin, nowhere), torch.tensor([nowhere])])
    on_to = torch.cat([torch.where(looks_on, end, 0) * (not branch.causal), torch.tensor([0])])
    head, tail = chunks.start, chunks.stop
    each = torch.arange(len(chunks))
    for queries in turns[..., None]:
        later = torch.where(queries < each, on_to[queries], 0)
        head = torch.maximum(head, torch.minimum(later, chunks.stop))
        tail = torch.minimum(tail, torch.maximum(torch.where(queries > each, back_to[queries], nowhere), chunks.start))
    return head, tail


def _distinct(groups: Sequence[tuple[tuple[Branch, ...], int]], chunks: Chunks) -> list[tuple[tuple[Branch, ...], int]]:
    """Merge groups that have equal counts into one, adding their multiplicities.

    If chunks and segments all begin at multiples of a number, offsets between two consecutive multiples of it give
    equal counts, provided that in both groups the branches with nested classes are equal.
    """
    segments = {branch.segment for group, _ in groups for branch in group}
    common = gcd(*segments, *chunks.start.tolist(), *chunks.stop.tolist())
    first: dict[object, tuple[Branch, ...]] = {}
    times: Counter[object] = Counter()
    for group, each in groups:
        coarse = tuple(replace(branch, offset=branch.offset // gcd(branch.rate, common)) for branch in group)
        key = coarse, tuple(tuple(_lineage(group, index)) for index in range(len(group)))
        first.setdefault(key, group)
        times[key] += each
    return [(first[key], each) for key, each in times.items()]


def _lineage(group: tuple[Branch, ...], index: int) -> list[int]:
    """This branch, then the last earlier branch whose residue class contains its class, and so on.

    That lists every earlier branch whose class contains it, because each rate divides the next.
    """
    lineage = [index]
    for at in range(index - 1, -1, -1):
        if (group[lineage[-1]].offset - group[at].offset) % group[at].rate == 0:
            lineage.append(at)
    return lineage


def _count(branch: Branch, begin: Tensor, end: Tensor) -> Tensor:
    """Number of active positions in [begin, end); 0 if end <= begin."""
    before, upto = (_quotient(edge - (1 + branch.offset), branch.rate) for edge in (begin, end))
    return (upto - before).clamp_(min=0)


def _quotient(number: Tensor, divisor: int) -> Tensor:
    """Floor division; by a power of two it shifts, which is several times as fast."""
    if divisor & (divisor - 1):
        return number.div(divisor, rounding_mode="floor")
    return number >> divisor.bit_length() - 1
