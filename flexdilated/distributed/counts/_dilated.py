"""Token counts of dilated branches in closed form, for all pairs of a rank and a chunk at once.

A segment that holds tokens of two chunks holds all that lies between: of the chunk that comes first an end, of the
other a beginning. Where rates divide their segments, a branch's active tokens are one residue class of all positions,
so what a rank needs of a chunk is a union of such classes, each of them at the chunk's beginning, its end, or both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ...masks.core import And, Pattern
from ...masks.patterns import Causal, Dilated
from ._chunks import Chunks

# W ranks, n chunks, B branches, T turns (a rank's first chunk, its second), p pieces, D kinds of ranks

_MOST_VALUES = 1 << 26  # pieces times kinds: bounds the memory


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


def dilated_tokens(groups: Sequence[tuple[tuple[Branch, ...], int]], chunks: Chunks) -> Int64[Tensor, "W n"] | None:
    """Tokens that each rank needs of each chunk, summed over groups of branches, each as often as it counts.

    None where ranks come in too many kinds, by which branches have an active query among their tokens.
    """
    if not groups:
        return torch.zeros(chunks.num_ranks, len(chunks), dtype=torch.int64)
    groups = _distinct(groups, chunks)
    pieces = _Pieces(chunks, sorted({branch.segment for group, _ in groups for branch in group}))
    active = [_active_queries(group, chunks) for group, _ in groups]
    kinds, kind = torch.cat(active, 1).unique(dim=0, return_inverse=True)
    if len(kinds) * len(pieces) > _MOST_VALUES:
        return None
    values = torch.zeros(len(pieces), len(kinds), dtype=torch.int64)
    widths = [each.shape[1] for each in active]
    for (group, times), own in zip(groups, kinds.split(widths, 1), strict=True):
        rows, row = own.unique(dim=0, return_inverse=True)
        values += times * _Union(group, pieces).count(rows.unflatten(1, (len(chunks.by_turn), 2, -1)))[:, row]
    return values.flatten()[pieces.of_pair * len(kinds) + kind[:, None]]


def _distinct(groups: Sequence[tuple[tuple[Branch, ...], int]], chunks: Chunks) -> list[tuple[tuple[Branch, ...], int]]:
    """One group for all that have the same counts.

    Where all chunks and segments begin at multiples of a number, offsets between the same two multiples of it are as
    good as equal, except for which branches hold each other's tokens.
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
    """This branch, the last one before it whose class of positions holds its own, the last such of that one, ...

    Those are all before it that do: each rate divides the next.
    """
    lineage = [index]
    for at in range(index - 1, -1, -1):
        if (group[lineage[-1]].offset - group[at].offset) % group[at].rate == 0:
            lineage.append(at)
    return lineage


def _active_queries(group: tuple[Branch, ...], chunks: Chunks) -> Bool[Tensor, "W 4B"]:
    """By turn, side and branch: whether the chunk holds a query that is active in its first segment, in its last one.

    In its first segment queries share keys with chunks before theirs, in its last one with chunks after it.
    """
    active = torch.zeros(len(chunks) + 1, 2, len(group), dtype=torch.bool)  # one row more, for ranks without a chunk
    for index, branch in enumerate(group):
        end = torch.minimum(chunks.stop, _segment_start(chunks.start, branch) + branch.segment)
        active[:-1, 0, index] = _count(branch, chunks.start, end) > 0
        if not branch.causal:
            begin = torch.maximum(chunks.start, _segment_start(chunks.stop - 1, branch))
            active[:-1, 1, index] = _count(branch, begin, chunks.stop) > 0
    return active[chunks.by_turn].transpose(0, 1).flatten(1)


class _Pieces:
    """Pairs of a rank and a chunk in pieces: ranks in a row whose queries share the same segments with the chunk."""

    def __init__(self, chunks: Chunks, widths: Sequence[int]) -> None:
        self.chunks, self.widths = chunks, list(widths)
        begins = [chunks.start // width * width for width in widths]
        ends = [(chunks.stop - 1) // width * width + width for width in widths]
        # By width and chunk: the first and the last chunk that shares a segment with it.
        self.first = torch.stack([torch.searchsorted(chunks.stop, begin, right=True) for begin in begins])
        self.last = torch.stack([torch.searchsorted(chunks.start, end) - 1 for end in ends])
        levels = self._levels()
        begins_here = torch.zeros(chunks.num_ranks, len(chunks), dtype=torch.bool)
        begins_here[0] = True
        for turn in chunks.by_turn:
            begins_here[1:] |= levels[turn[1:]] != levels[turn[:-1]]
        column, rank = begins_here.T.nonzero().unbind(1)
        self.of_pair = (begins_here.T.flatten().cumsum(0) - 1).view(len(chunks), -1).T
        self.chunk, self.queries = column, chunks.by_turn[:, rank]

    def __len__(self) -> int:
        return len(self.chunk)

    def _levels(self) -> Tensor:
        """(n + 1, n): in how many widths a chunk shares a segment with another; below 0 where it comes before it.

        The widths that do are the same where as many do: segments that reach further hold what is nearer.
        """
        size = len(self.chunks)
        after, before = (torch.zeros(size + 1, size, dtype=torch.int16) for _ in range(2))
        one, columns = torch.ones(size, dtype=torch.int16), torch.arange(size)
        for first, last in zip(self.first, self.last, strict=True):
            before.index_put_((first, columns), one, accumulate=True)
            after.index_put_((last, columns), one, accumulate=True)
        chunk = torch.arange(size)[:, None]
        after = after[:-1].flip(0).cumsum(0, dtype=torch.int16).flip(0)
        before = before[:-1].cumsum(0, dtype=torch.int16)
        level = torch.where(chunk > columns, 1 + after, torch.where(chunk < columns, -1 - before, 0))
        return torch.cat([level, level.new_zeros(1, size)])  # one row more, for ranks without a chunk


class _Union:
    """What a group of branches needs of each piece's chunk: coarser classes beside the finer ones that hold them."""

    def __init__(self, group: tuple[Branch, ...], pieces: _Pieces) -> None:
        self.group, self.pieces = group, pieces
        self.start = pieces.chunks.start[pieces.chunk][:, None]
        self.stop = pieces.chunks.stop[pieces.chunk][:, None]

    def count(self, active: Bool[Tensor, "D T 2 B"]) -> Int64[Tensor, "p D"]:
        """Tokens by piece, for ranks of each kind."""
        total = torch.zeros(len(self.pieces), len(active), dtype=torch.int64)
        covered: list[tuple[Tensor, Tensor, Tensor]] = []
        for index, branch in enumerate(self.group):
            # Kinds that differ in other branches only are counted together: in most branches all are active.
            lineage, row = _lineage(self.group, index), torch.zeros(len(active), dtype=torch.int64)
            if not bool(active[..., lineage].all()):
                row = active[..., lineage].flatten(1).unique(dim=0, return_inverse=True)[1]
            one_of_each = torch.zeros(int(row.max()) + 1, dtype=torch.int64)
            one_of_each[row] = torch.arange(len(active))
            head, tail = self._reached(branch, active[one_of_each][..., index])
            head_known, tail_known = self.start, self.stop
            if len(lineage) > 1:
                *known, kind = covered[lineage[1]]
                head_known, tail_known = (each[:, kind[one_of_each]] for each in known)
            # At the beginning up to `head` and at the end from `tail` on, less what is known.
            found = _count(branch, head_known, torch.minimum(head, tail_known))
            found += _count(branch, torch.maximum(torch.maximum(tail, head), head_known), tail_known)
            total += found[:, row]
            covered.append((torch.maximum(head, head_known), torch.minimum(tail, tail_known), row))
        return total

    def _reached(self, branch: Branch, active: Bool[Tensor, "D T 2"]) -> tuple[Tensor, Tensor]:
        """(where the beginning ends that earlier chunks need, where the end begins that later ones need)."""
        width, chunk = self.pieces.widths.index(branch.segment), self.pieces.chunk
        first, last = self.pieces.first[width, chunk], self.pieces.last[width, chunk]
        before, after = (torch.zeros(len(chunk), len(active), dtype=torch.bool) for _ in range(2))
        for turn, queries in enumerate(self.pieces.queries):
            shares_after = (queries > chunk) & (queries <= last)
            shares_before = (queries < chunk) & (queries >= first)
            after |= shares_after[:, None] & active[None, :, turn, 0]
            before |= shares_before[:, None] & active[None, :, turn, 1]
        head = torch.minimum(self.stop, _segment_start(self.start, branch) + branch.segment)
        tail = torch.maximum(self.start, _segment_start(self.stop - 1, branch))
        return torch.where(before, head, self.start), torch.where(after, tail, self.stop)


def _segment_start(position: Tensor, branch: Branch) -> Tensor:
    return position // branch.segment * branch.segment


def _count(branch: Branch, begin: Tensor, end: Tensor) -> Tensor:
    """Active positions in [begin, end); 0 where it ends before it begins."""
    before, upto = (_quotient(edge - (1 + branch.offset), branch.rate) for edge in (begin, end))
    return (upto - before).clamp_(min=0)


def _quotient(number: Tensor, divisor: int) -> Tensor:
    """Rounded down. Dividing integers takes several times as long as shifting them."""
    if divisor & (divisor - 1):
        return number.div(divisor, rounding_mode="floor")
    return number >> divisor.bit_length() - 1
