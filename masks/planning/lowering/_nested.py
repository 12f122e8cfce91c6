"""Nested lowering: pairs that several dilated branches share, computed once and weighted by the number of branches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ...core import And, Bound, Every, Pattern
from ...orders import Compact
from ...patterns import Causal, Dilated
from ._term import KeyWeights, PairWeights, Term

# The number of terms grows with the ratio of neighbouring segment lengths and rates; above this, terms are too many
# and too small.
_MAX_RATIO = 4
# Ratio of the last rate to the first: the side of tables of weights.
_MAX_PERIOD = 64
# Rows of a strip, which all compute the keys up to the strip's last row: on average half this number of keys too many
# for each row. Shorter strips run slower.
_STRIP_ROWS = 256


def chains(branches: Mapping[Pattern, int], bound: Bound) -> list[dict[Pattern, int]]:
    """Group branches that nest, greedily into few groups; a branch that nests with no other is a group alone."""
    groups: list[dict[Pattern, int]] = []
    for branch, times in sorted(branches.items(), key=lambda item: _size(item[0])):
        for group in groups:
            if _Chain.of({**group, branch: times}, bound) is not None:
                group[branch] = times
                break
        else:
            groups.append({branch: times})
    return groups


def nested_terms(branches: Mapping[Pattern, int], bound: Bound) -> list[Term]:
    """Terms that compute every allowed pair once, with the number of branches that allow it as its weight.

    `branches` is one of the `chains`: dilated segments that nest. Each segment length and rate divides the next, and a
    token that is active in a branch is active in all earlier ones. The level of a token is the last branch in which it
    is active. The branches that allow a pair are those from the first with both tokens in one segment up to the lower
    of their levels.
    """
    chain = _Chain.of(branches, bound)
    assert chain is not None
    causal = isinstance(chain.rest, Causal)
    terms = list(_strips(chain)) if causal else []
    for index in range(causal, len(chain.bases)):
        weights = [
            [chain.weights(index, level, offsets) for offsets in chain.offsets]
            for level in range(index, len(chain.bases))
        ]
        for rectangle in _rectangles(chain, index):
            terms += _terms(chain, index, rectangle, weights)
    return terms


def _size(branch: Pattern) -> tuple[int, int]:
    base, _ = _split(branch)
    return (0, 0) if base is None else (base.segment, base.rate)


@dataclass(frozen=True)
class _Chain:
    """Branches from the shortest segments to the longest; `rest` is the other factor, common to all branches."""

    bases: tuple[Dilated, ...]
    times: tuple[int, ...]
    rest: Pattern
    bound: Bound

    @classmethod
    def of(cls, branches: Mapping[Pattern, int], bound: Bound) -> _Chain | None:
        aligned = bound.q_offset == bound.k_offset == 0 and bound.num_queries == bound.num_keys
        split = [(*_split(branch), times) for branch, times in branches.items()]
        bases = [base for base, _, _ in split if base is not None]
        if not aligned or len(bases) < 2 or len(bases) < len(split) or any(rest != split[0][1] for _, rest, _ in split):
            return None
        order = sorted(range(len(bases)), key=lambda index: (bases[index].segment, bases[index].rate))
        chain = cls(tuple(bases[i] for i in order), tuple(split[i][2] for i in order), split[0][1], bound)
        return chain if chain._nests() else None

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Offset of each of the device's heads in each branch."""
        first, num_heads = self.bound.head_offset, self.bound.num_heads_global
        heads = range(first, first + self.bound.num_heads)
        return tuple(tuple(base.offset_of(head, num_heads) for base in self.bases) for head in heads)

    def _nests(self) -> bool:
        # Every segment begins at a multiple of the largest rate, so all segments have equal levels.
        shortest, longest = self.bases[0], self.bases[-1]
        if shortest.segment % longest.rate or longest.rate // shortest.rate > _MAX_PERIOD:
            return False
        for inner, outer in pairwise(self.bases):
            ratios = (outer.segment // inner.segment, outer.rate // inner.rate)
            if outer.segment % inner.segment or outer.rate % inner.rate or max(ratios) > _MAX_RATIO:
                return False
        return all(
            (after - before) % base.rate == 0
            for offsets in self.offsets
            for (base, before), (_, after) in pairwise(zip(self.bases, offsets, strict=True))
        )

    def table(self, offsets: tuple[int, ...]) -> PairWeights:
        """Weights of pairs within a shortest segment: the number of branches in which both tokens are active."""
        step = self.bases[0].rate
        tokens = range(offsets[0], offsets[0] + self.bases[-1].rate, step)
        branches = list(zip(self.bases, offsets, self.times, strict=True))
        active = [[times * ((t - o) % base.rate == 0) for base, o, times in branches] for t in tokens]
        return PairWeights(tuple(tuple(sum(map(min, q, k)) for k in active) for q in active))

    def exactly(self, level: int) -> tuple[int, range]:
        """(branch, phases): tokens of exactly this level follow the branch's active tokens by a phase, at its rate.

        The last level: tokens of the last branch. Other levels: tokens between the active tokens of the next branch.
        """
        if level + 1 == len(self.bases):
            return level, range(1)
        own, upper = self.bases[level].rate, self.bases[level + 1].rate
        return level + 1, range(own, upper, own)

    def weights(self, first: int, level: int, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """Weights of keys, for queries of this level and pairs that first meet in branch `first`.

        One period over the keys active in that branch: the number of branches from `first` to `level` in which a key is
        active.
        """
        step, last = self.bases[first].rate, self.bases[level].rate
        keys = (offsets[first] + index * step for index in range(last // step))
        reached = range(first, level + 1)
        return tuple(
            sum(self.times[i] for i in reached if (key - offsets[i]) % self.bases[i].rate == 0) for key in keys
        )


class _Rectangle(NamedTuple):
    """Queries × keys, both ranges of tokens; repeated in `folds` segments, `stride` tokens apart."""

    queries: range
    keys: range
    folds: int
    stride: int


def _split(branch: Pattern) -> tuple[Dilated | None, Pattern]:
    """(dilated segments, other factor) if the other factor is all pairs or causal order; else (None, branch)."""
    factors = branch.factors()
    bases = [factor for factor in factors if isinstance(factor, Dilated)]
    rest = [factor for factor in factors if not isinstance(factor, Dilated)]
    known = len(bases) == 1 and rest in ([], [Causal()])
    return (bases[0], And.of(*rest)) if known else (None, branch)


def _segments(length: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, number, length) for the whole segments, and for the shorter last one."""
    whole, tail = divmod(num_tokens, length)
    if whole:
        yield 0, whole, length
    if tail:
        yield whole * length, 1, tail


def _strips(chain: _Chain) -> Iterator[Term]:
    """Causal pairs within each shortest segment: strips of queries, each with all keys up to its last query."""
    base, bound = chain.bases[0], chain.bound
    tables = [chain.table(offsets) for offsets in chain.offsets]
    for start, folds, length in _segments(base.segment, bound.num_keys):
        groups: dict[tuple[PairWeights, int], list[int]] = {}
        for head, table in enumerate(tables):
            _, slots = _active(range(length), chain.offsets[head][0], base.rate)
            groups.setdefault((table, slots), []).append(head)
        for (weights, slots), heads in groups.items():
            period = len(weights.table)
            rows = max(period, _STRIP_ROWS // period * period)
            firsts = tuple(start + chain.offsets[head][0] for head in heads)
            for begin in range(0, slots, rows):
                end = min(begin + rows, slots)
                q_firsts = tuple(first + begin * base.rate for first in firsts)
                q = Compact(tuple(heads), q_firsts, base.rate, end - begin, folds, base.segment)
                k = Compact(tuple(heads), firsts, base.rate, end, folds, base.segment)
                yield Term.of(bound, Causal(), "strip", 1, q, k, heads=tuple(heads), weights=weights)


def _rectangles(chain: _Chain, index: int) -> Iterator[_Rectangle]:
    """Pairs within a segment of branch `index` that are in no segment of the previous branch."""
    whole = chain.bases[index].segment
    part = chain.bases[index - 1].segment if index else whole
    for start, folds, length in _segments(whole, chain.bound.num_keys):
        tokens = range(start, start + length)
        if index == 0:
            yield _Rectangle(tokens, tokens, folds, whole)
            continue
        for begin in range(0, length, part):
            queries, before, behind = tokens[begin : begin + part], tokens[:begin], tokens[begin + part :]
            if before:
                yield _Rectangle(queries, before, folds, whole)
            if behind and isinstance(chain.rest, Every):
                yield _Rectangle(queries, behind, folds, whole)


def _terms(chain: _Chain, index: int, rectangle: _Rectangle, weights: list[list[tuple[int, ...]]]) -> Iterator[Term]:
    """Terms of pairs that first meet in branch `index`: one for each level of the queries and size of a head.

    `weights`: of the keys, for each level from `index` on and each head.
    """
    queries, keys, folds, stride = rectangle
    for level, of_heads in enumerate(weights, index):
        upper, phases = chain.exactly(level)
        steps = chain.bases[upper].rate, chain.bases[index].rate
        for phase in phases:
            alike: dict[tuple[int, int], list[tuple[int, int, int, tuple[int, ...]]]] = {}
            for head, (offsets, of_keys) in enumerate(zip(chain.offsets, of_heads, strict=True)):
                q_first, num_queries = _active(queries, offsets[upper] + phase, steps[0])
                k_first, num_keys = _active(keys, offsets[index], steps[1])
                if num_queries and num_keys:
                    alike.setdefault((num_queries, num_keys), []).append((k_first, head, q_first, of_keys))
            for sizes, members in alike.items():
                k_starts, heads, q_starts, periods = zip(*sorted(members), strict=True)  # equal keys side by side
                q, k = (
                    Compact(heads, starts, step, size, folds, stride)
                    for starts, step, size in zip((q_starts, k_starts), steps, sizes, strict=True)
                )
                distinct = {each for period in periods for each in period}
                times, own = (distinct.pop(), None) if len(distinct) == 1 else (1, KeyWeights(periods))
                yield Term.of(chain.bound, Every(), "dense", times, q, k, heads=heads, weights=own)


def _active(tokens: range, offset: int, rate: int) -> tuple[int, int]:
    """(first, number) of the tokens that are congruent to `offset` modulo the rate."""
    first = tokens.start + (offset - tokens.start) % rate
    return first, max(0, -(-(tokens.stop - first) // rate))
