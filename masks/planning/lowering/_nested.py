"""Nested lowering: compute pairs common to several dilated branches once, weighted by the number of branches.

A token is active in a branch, for a head, if its place in the segment, modulo the rate, is the head's offset.
"""

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
    """Return the branches, grouped greedily so that the dilated segments of each group nest.

    `branches` and the groups map each branch to its multiplicity. The segments of some branches, sorted by length and
    then by rate, nest if

    * each segment length is 1, 2, 3 or 4 times the one before, and so is each rate;
    * the last rate divides the shortest segment, and is at most 64 times the first rate;
    * a token that is active in a branch is active in all earlier branches;
    * each branch is dilated segments alone, or each is dilated segments in causal order;
    * queries and keys are the same positions, from 0 on.

    A branch that nests with no other is a group by itself.
    """
    groups: list[dict[Pattern, int]] = []
    for branch, times in sorted(branches.items(), key=lambda item: _segment_and_rate(item[0])):
        for group in groups:
            if _Chain.of({**group, branch: times}, bound) is not None:
                group[branch] = times
                break
        else:
            groups.append({branch: times})
    return groups


def nested_terms(branches: Mapping[Pattern, int], bound: Bound) -> list[Term]:
    """Return terms that compute each allowed pair once, weighted by how often the branches together count it.

    branches: a group of at least two branches that `chains` returns, each with its multiplicity.

    The level of a token is the last branch in which it is active. A pair is allowed by consecutive branches: from the
    first that has both tokens in one segment to the lower of the two tokens' levels.
    """
    chain = _Chain.of(branches, bound)
    assert chain is not None
    causal = isinstance(chain.rest, Causal)
    terms = list(_strip_terms(chain)) if causal else []
    first = 1 if causal else 0  # in causal order the strips compute the first branch
    for index in range(first, len(chain.bases)):
        weights = [
            [chain.key_weights(index, level, offsets) for offsets in chain.offsets]
            for level in range(index, len(chain.bases))
        ]
        for rectangle in _rectangles(chain, index):
            terms += _terms_of_rectangle(chain, index, rectangle, weights)
    return terms


def _segment_and_rate(branch: Pattern) -> tuple[int, int]:
    base, _ = _dilated_and_rest(branch)
    return (0, 0) if base is None else (base.segment, base.rate)


@dataclass(frozen=True)
class _Chain:
    """Nested branches, from the shortest segments to the longest.

    bases: dilated factor of each branch.
    times: multiplicity of each.
    rest: the other factor of all branches, `causal` or `every`.
    """

    bases: tuple[Dilated, ...]
    times: tuple[int, ...]
    rest: Pattern
    bound: Bound

    @classmethod
    def of(cls, branches: Mapping[Pattern, int], bound: Bound) -> _Chain | None:
        aligned = bound.q_offset == bound.k_offset == 0 and bound.num_queries == bound.num_keys
        split = [(*_dilated_and_rest(branch), times) for branch, times in branches.items()]
        bases = [base for base, _, _ in split if base is not None]
        if not aligned or len(bases) < 2 or len(bases) < len(split) or any(rest != split[0][1] for _, rest, _ in split):
            return None
        order = sorted(range(len(bases)), key=lambda index: (bases[index].segment, bases[index].rate))
        chain = cls(tuple(bases[i] for i in order), tuple(split[i][2] for i in order), split[0][1], bound)
        return chain if chain._nests() else None

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Dilation offset of each head of the bound pattern (outer tuple) in each branch (inner tuple)."""
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

    def pair_weights(self, offsets: tuple[int, ...]) -> PairWeights:
        """Return the weights of the pairs in a segment of the first branch.

        A weight is the sum of the multiplicities of the branches in which both tokens are active.

        offsets: dilation offset of one head in each branch.
        """
        step = self.bases[0].rate
        tokens = range(offsets[0], offsets[0] + self.bases[-1].rate, step)
        branches = list(zip(self.bases, offsets, self.times, strict=True))
        active = [[times * ((t - o) % base.rate == 0) for base, o, times in branches] for t in tokens]
        return PairWeights(tuple(tuple(sum(map(min, q, k)) for k in active) for q in active))

    def tokens_of_level(self, level: int) -> tuple[int, range]:
        """Return (branch index, phases): a token t has this level iff (t - offset) % rate is one of the phases.

        The offset and rate are those of the branch returned. A token's level is the last branch in which it is active.
        For the last level, the branch is the last one, and the only phase is 0. For another level it is the next one,
        and the phases are the multiples of the level's own rate above 0 and below the next rate, e.g. rates (1, 4) ->
        (1, range(1, 4)) for level 0.
        """
        if level + 1 == len(self.bases):
            return level, range(1)
        own, upper = self.bases[level].rate, self.bases[level + 1].rate
        return level + 1, range(own, upper, own)

    def key_weights(self, first: int, level: int, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """Return the weights of one period of the keys that are active in branch `first`, from offsets[first] on.

        The weights are for queries whose last active branch is `level`, and for pairs whose tokens are in one segment
        in branch `first` but in no earlier branch. A weight is the sum of the multiplicities of the branches from
        `first` to `level`, both included, in which the key is active.

        offsets: dilation offset of one head in each branch.
        """
        step, last = self.bases[first].rate, self.bases[level].rate
        keys = (offsets[first] + index * step for index in range(last // step))
        reached = range(first, level + 1)
        return tuple(
            sum(self.times[i] for i in reached if (key - offsets[i]) % self.bases[i].rate == 0) for key in keys
        )


class _Rectangle(NamedTuple):
    """Pairs of all queries and keys in two ranges of tokens; repeated `folds` times, `stride` tokens apart."""

    queries: range
    keys: range
    folds: int
    stride: int


def _dilated_and_rest(branch: Pattern) -> tuple[Dilated | None, Pattern]:
    """Return (dilated factor, `every` or `causal`) if the branch is their intersection; else (None, branch)."""
    factors = branch.factors()
    bases = [factor for factor in factors if isinstance(factor, Dilated)]
    rest = [factor for factor in factors if not isinstance(factor, Dilated)]
    known = len(bases) == 1 and rest in ([], [Causal()])
    return (bases[0], And.of(*rest)) if known else (None, branch)


def _segments(length: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, number of segments, their length): for all whole segments, then for a shorter last one."""
    whole, tail = divmod(num_tokens, length)
    if whole:
        yield 0, whole, length
    if tail:
        yield whole * length, 1, tail


def _strip_terms(chain: _Chain) -> Iterator[Term]:
    """Yield terms for the causal pairs within each segment of the first branch.

    A term is a strip: consecutive active queries, and all active keys of their segment up to the last of them.
    """
    base, bound = chain.bases[0], chain.bound
    tables = [chain.pair_weights(offsets) for offsets in chain.offsets]
    for start, folds, length in _segments(base.segment, bound.num_keys):
        groups: dict[tuple[PairWeights, int], list[int]] = {}
        for head, table in enumerate(tables):
            _, slots = _active_tokens(range(length), chain.offsets[head][0], base.rate)
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
    """Yield rectangles of the pairs within a segment of branch `index` but in no segment of the previous branch.

    For index 0 these are all pairs within a segment. In causal order, with index 1 or more, rectangles whose keys are
    after the queries are left out.
    """
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


def _terms_of_rectangle(
    chain: _Chain, index: int, rectangle: _Rectangle, weights: list[list[tuple[int, ...]]]
) -> Iterator[Term]:
    """Yield the terms of a rectangle of pairs; branch `index` is the first with query and key in one segment.

    Each combination of a level of queries, a residue class of these (a phase of `_Chain.tokens_of_level`) and a group
    of heads with equal numbers of active tokens, not 0, has one term.

    weights[level - index][head]: as from `_Chain.key_weights`, the weight of each active key, for one period of keys.
    """
    queries, keys, folds, stride = rectangle
    for level, of_heads in enumerate(weights, index):
        upper, phases = chain.tokens_of_level(level)
        steps = chain.bases[upper].rate, chain.bases[index].rate
        for phase in phases:
            alike: dict[tuple[int, int], list[tuple[int, int, int, tuple[int, ...]]]] = {}
            for head, (offsets, of_keys) in enumerate(zip(chain.offsets, of_heads, strict=True)):
                q_first, num_queries = _active_tokens(queries, offsets[upper] + phase, steps[0])
                k_first, num_keys = _active_tokens(keys, offsets[index], steps[1])
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


def _active_tokens(tokens: range, offset: int, rate: int) -> tuple[int, int]:
    """Return (first, number) of the tokens in the range that are congruent to `offset` modulo `rate`."""
    first = tokens.start + (offset - tokens.start) % rate
    return first, max(0, -(-(tokens.stop - first) // rate))
