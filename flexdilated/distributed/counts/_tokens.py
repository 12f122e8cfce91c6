"""Counts of the tokens that each rank needs from each other rank, and of the allowed pairs of each rank's queries.

Chunks are the contiguous ranges of positions that ranks hold, in the order of the sequence. Active tokens of a branch
are the queries and keys of the pairs that it allows. The branches that `as_branches` returns are counted in closed
form. A segment with tokens of two chunks contains all positions between these tokens: the end of the earlier chunk and
the beginning of the later one. As the rate divides the segment length, the active tokens of a branch are one residue
class of all positions. So the keys that a rank needs in a chunk are a union of residue classes, each restricted to the
beginning of the chunk, its end, or both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import gcd

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks.attended import KeyQuery, keys_of_any, moved, rules_of_heads
from ...masks.blocks import pairs_of_queries
from ...masks.core import And, Expression, Pattern, Ranges, common_period, require_expression
from ...masks.patterns import Causal, Dilated, missing, run_time_leaves
from ..group import Sharding

# W ranks, R some of them, n chunks, T chunks of a rank (1 or 2)

_MOST_COUNTS = 1 << 20  # entries of a (chunk, range) table computed at once: bounds its memory


@dataclass(frozen=True, eq=False)
class Chunks:
    """All positions of a sequence, in nonempty ascending ranges: chunk i is [start[i], stop[i]), held by rank[i]."""

    start: Int64[Tensor, " n"]
    stop: Int64[Tensor, " n"]
    rank: Int64[Tensor, " n"]
    num_ranks: int

    @classmethod
    def of(cls, sharding: Sharding) -> Chunks:
        ranks = range(sharding.num_ranks)
        runs = sorted((run.start, run.stop, rank) for rank in ranks for run in sharding.ranges(rank))
        start, stop, rank = torch.tensor(runs, dtype=torch.int64).T.contiguous()
        return cls(start, stop, rank, sharding.num_ranks)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def length(self) -> Int64[Tensor, " n"]:
        return self.stop - self.start

    @cached_property
    def by_rank(self) -> Int64[Tensor, "T W"]:
        """Indices of each rank's first chunk (row 0) and second (row 1, only if some rank has two); -1 if missing.

        T is 1 or 2, and column w is for rank w.
        """
        own_chunks = torch.full((2, self.num_ranks), -1)
        order = self.rank.argsort(stable=True)
        again = torch.zeros_like(order)
        again[1:] = self.rank[order][1:] == self.rank[order][:-1]
        own_chunks[again, self.rank[order]] = order
        return own_chunks if bool(again.any()) else own_chunks[:1]

    def by_source(self, tokens: Int64[Tensor, "W n"]) -> Int64[Tensor, "W W"]:
        """Return the sums of `tokens` over the chunks of each rank, indexed [receiver, source]; the diagonal is 0.

        tokens: number of tokens that each rank needs of each chunk.
        """
        counts = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        return counts.index_add_(1, self.rank, tokens).fill_diagonal_(0)

    def count(self, positions: Ranges) -> Int64[Tensor, " n"]:
        """Return, for each chunk, how many of its positions are in `positions`, which are disjoint ranges."""
        first, stop, step = torch.tensor([(run.start, run.stop, run.step) for run in positions] or [(0, 0, 1)]).T
        counts = torch.zeros(len(self), dtype=torch.int64)
        for some in torch.arange(len(first)).split(max(1, _MOST_COUNTS // len(self))):
            before = []
            for edge in (self.start, self.stop):
                span = (edge[:, None].minimum(stop[some]) - first[some]).clamp(min=0)
                before.append((span + step[some] - 1) // step[some])
            counts += (before[1] - before[0]).sum(1)
        return counts


_MOST_VALUES = 1 << 18  # (rank, chunk) pairs counted at once, so that they fit the cache


@dataclass(frozen=True)
class DilatedBranch:
    """Rule for one head: query and key must be in one segment, and be active.

    A position is active if its distance from the start of its segment equals `offset` modulo `rate`.

    segment: length in tokens.
    causal: True if the key must not come after the query.
    """

    segment: int
    rate: int
    offset: int
    causal: bool


def as_branches(rules: Sequence[Pattern]) -> tuple[DilatedBranch, ...] | None:
    """Return the rules as branches in ascending order of rate; None if the closed form does not apply to them.

    It applies if each rule is dilated (and may be causal), and each rate divides its segment and the next larger rate.
    """
    branches = [_as_branch(rule) for rule in rules]
    if None in branches:
        return None
    found = sorted((branch for branch in branches if branch is not None), key=lambda branch: branch.rate)
    fits = all(branch.segment % branch.rate == 0 for branch in found)
    return tuple(found) if fits and all(b.rate % a.rate == 0 for a, b in pairwise(found)) else None


def _as_branch(rule: Pattern) -> DilatedBranch | None:
    factors = rule.parts if isinstance(rule, And) else (rule,)
    dilated = [factor for factor in factors if isinstance(factor, Dilated)]
    others = [factor for factor in factors if not isinstance(factor, Dilated)]
    if len(dilated) != 1 or any(not isinstance(factor, Causal) for factor in others):
        return None
    (base,) = dilated
    assert isinstance(base.offset, int), "a rule for one head has its offset resolved"
    return DilatedBranch(base.segment, base.rate, base.offset, bool(others))


Groups = Sequence[tuple[tuple[DilatedBranch, ...], int]]  # result of `as_branches` for a KV head; number of such heads


def dilated_tokens(groups: Groups, chunks: Chunks) -> Int64[Tensor, "W n"]:
    """Return how many tokens each rank needs in each chunk, summed over KV heads; undefined for its own chunks.

    groups: (branches of a KV head, as `as_branches` returns them, number of KV heads with these branches) pairs.
    """
    tokens = torch.zeros(chunks.num_ranks, len(chunks), dtype=torch.int64)
    for group, times in _merge_groups(groups, chunks):
        for ranks in torch.arange(chunks.num_ranks).split(max(1, _MOST_VALUES // len(chunks))):
            tokens[ranks] += times * _tokens_of_branches(group, chunks, chunks.by_rank[:, ranks])
    return tokens


def _tokens_of_branches(
    group: tuple[DilatedBranch, ...], chunks: Chunks, own_chunks: Int64[Tensor, "T R"]
) -> Int64[Tensor, "R n"]:
    """Return the number of tokens of each chunk that each of R ranks needs in a KV head; undefined for its own chunks.

    A token that several branches need counts once.

    group: the branches of the head, as `as_branches` returns them.
    own_chunks: for each of the R ranks, index of its first chunk and, in row 1, of its second one; -1 if missing.
    """
    total = torch.zeros(own_chunks.shape[1], len(chunks), dtype=torch.int64)
    covered: list[tuple[Tensor, Tensor]] = []
    for index, branch in enumerate(group):
        low, high = _needed_bounds(branch, chunks, own_chunks)
        _, *holders = _containing_branches(group, index)
        known_low, known_high = covered[holders[0]] if holders else (chunks.start, chunks.stop)
        # Count the beginning of each chunk up to `low` and its end from `high`, less tokens that are already counted.
        total += _num_active(branch, known_low, torch.minimum(low, known_high))
        total += _num_active(branch, torch.maximum(torch.maximum(high, low), known_low), known_high)
        covered.append((torch.maximum(low, known_low), torch.minimum(high, known_high)))
    return total


def _needed_bounds(
    branch: DilatedBranch, chunks: Chunks, own_chunks: Int64[Tensor, "T R"]
) -> tuple[Int64[Tensor, "R n"], Int64[Tensor, "R n"]]:
    """Return (low, high), bounds of the keys that each of R ranks needs in each chunk of another rank.

    In chunk j the r-th of the R ranks needs the active keys at positions < low[r, j] or >= high[r, j]. Active
    positions equal the branch's offset modulo its rate. Keys before low are needed by the rank's queries in earlier
    chunks, keys from high on by its queries in later chunks. Queries of a chunk need keys back to the start of the
    chunk's first segment and, unless causal, up to the end of its last segment, if the chunk has an active query in
    that segment.

    own_chunks: for each of the R ranks, indices of its chunks; -1 if missing.
    """
    begin, end = chunks.start // branch.segment * branch.segment, -(-chunks.stop // branch.segment) * branch.segment
    nowhere = int(chunks.stop[-1])
    looks_back = _num_active(branch, chunks.start, torch.minimum(chunks.stop, begin + branch.segment)) > 0
    looks_on = _num_active(branch, torch.maximum(chunks.start, end - branch.segment), chunks.stop) > 0
    back_to = torch.cat([torch.where(looks_back, begin, nowhere), torch.tensor([nowhere])])
    on_to = torch.cat([torch.where(looks_on, end, 0) * (not branch.causal), torch.tensor([0])])
    low, high = chunks.start, chunks.stop
    each = torch.arange(len(chunks))
    for chunk in own_chunks[..., None]:  # chunk of queries of each rank; -1, no chunk, selects the last entry: no keys
        later = torch.where(chunk < each, on_to[chunk], 0)
        low = torch.maximum(low, torch.minimum(later, chunks.stop))
        high = torch.minimum(high, torch.maximum(torch.where(chunk > each, back_to[chunk], nowhere), chunks.start))
    return low, high


def _merge_groups(groups: Groups, chunks: Chunks) -> Groups:
    """Return `groups` with some of them joined: several become one, with the sum of their numbers of KV heads.

    Joined groups have equal `_tokens_of_branches`. Let c be the greatest common divisor of all segment lengths and
    chunk bounds. Two groups are joined if, for each i, their i-th branches have equal segment, rate, causal and
    offset // gcd(rate, c), and equal `_containing_branches`.
    """
    segments = {branch.segment for group, _ in groups for branch in group}
    common = gcd(*segments, *chunks.start.tolist(), *chunks.stop.tolist())
    first: dict[object, tuple[DilatedBranch, ...]] = {}
    times: Counter[object] = Counter()
    for group, each in groups:
        coarse = tuple(replace(branch, offset=branch.offset // gcd(branch.rate, common)) for branch in group)
        key = coarse, tuple(tuple(_containing_branches(group, index)) for index in range(len(group)))
        first.setdefault(key, group)
        times[key] += each
    return [(first[key], each) for key, each in times.items()]


def _containing_branches(group: tuple[DilatedBranch, ...], index: int) -> list[int]:
    """Return `index`, then each smaller i for which the residue class of group[i] contains that of group[index].

    The smaller i are in descending order. The residue class of a branch is the positions that equal its offset modulo
    its rate.

    group: branches as `as_branches` returns them.
    """
    found = [index]
    for at in range(index - 1, -1, -1):
        if (group[found[-1]].offset - group[at].offset) % group[at].rate == 0:
            found.append(at)
    return found


def _num_active(branch: DilatedBranch, begin: Tensor, end: Tensor) -> Tensor:
    """Return how many positions in [begin, end) equal the branch's offset modulo its rate; 0 if end <= begin."""
    before, upto = (_quotient(edge - (1 + branch.offset), branch.rate) for edge in (begin, end))
    return (upto - before).clamp_(min=0)


def _quotient(number: Tensor, divisor: int) -> Tensor:
    """Return number // divisor, by a shift for powers of two, which is several times as fast."""
    if divisor & (divisor - 1):
        return number.div(divisor, rounding_mode="floor")
    return number >> divisor.bit_length() - 1


def tokens_by_chunk(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
) -> tuple[Int64[Tensor, "W n"], Chunks]:
    """Return (tokens, chunks); rank w needs tokens[w, i] tokens of chunk i, summed over KV heads.

    The numbers are undefined for a rank's own chunks. Arguments are as in `KVNeeds.of`.

    Raises ValueError if the pattern does not fit the heads or tokens, or has unresolved run-time tensors.
    """
    needs = KVNeeds.of(pattern, sharding.num_tokens, num_heads, num_kv_heads, head_offset, num_heads_global)
    chunks = Chunks.of(sharding)
    groups = Counter(needs.groups)
    dilated = {group: as_branches([rule for rule, _ in group]) for group in groups}
    tokens = dilated_tokens([(each, groups[group]) for group, each in dilated.items() if each], chunks)
    for group, times in groups.items():
        if dilated[group] is None:
            tokens += times * _tokens_of_rules(group, needs, sharding, chunks)
    return tokens, chunks


def _tokens_of_rules(
    group: tuple[RuleHead, ...], needs: KVNeeds, sharding: Sharding, chunks: Chunks
) -> Int64[Tensor, "W n"]:
    """Return the number of tokens of each chunk that each rank needs in a KV head, by the rules of its query heads.

    group: (rule for one head, global index of a head with this rule) pairs.
    """
    tokens = torch.zeros(sharding.num_ranks, len(chunks), dtype=torch.int64)
    for rank in range(sharding.num_ranks):
        queries = [(rule, run) for rule in group for run in sharding.ranges(rank)]
        if queries:
            tokens[rank] = chunks.count(needs.in_head(queries, (range(sharding.num_tokens),)))
    return tokens


RuleHead = tuple[Pattern, int]  # a rule for one head, and the global index of a head with this rule


@dataclass(frozen=True, eq=False)
class KVNeeds:
    """Finds the keys that some queries need in each KV head of this device, by the rules of its query heads.

    groups: for each KV head, the distinct rules of its query heads, over all branches and batch entries, each with the
        global index of a head with this rule.
    """

    num_heads_global: int
    groups: tuple[tuple[RuleHead, ...], ...]
    _known: dict[tuple[KeyQuery, ...], Ranges] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pattern: Expression,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_offset: int,
        num_heads_global: int | None,
    ) -> KVNeeds:
        """Return the `KVNeeds` of a pattern over a sequence of num_tokens tokens.

        num_heads, num_kv_heads: numbers of query and key/value heads on this device.
        head_offset: index of the first of these query heads among the query heads of all devices.
        num_heads_global: number of query heads on all devices; None: head_offset + num_heads.

        Raises ValueError if the pattern does not fit the heads or tokens, or has unresolved run-time tensors.
        """
        for leaf in run_time_leaves(require_expression(pattern)):
            raise ValueError(missing(leaf.name))
        total = head_offset + num_heads if num_heads_global is None else num_heads_global
        pattern.check_heads(total)
        pattern.check_tokens(range(num_tokens), range(num_tokens))
        size = num_heads // num_kv_heads
        firsts = range(head_offset, head_offset + num_heads, size)
        # Groups with equal rules must compare equal: each rule is paired with the first of all heads with this rule.
        follower = rules_of_heads(pattern, range(head_offset, head_offset + num_heads), total)
        rules = (rules_of_heads(pattern, range(at, at + size), total) for at in firsts)
        groups = tuple(tuple((rule, follower[rule]) for rule in each) for each in rules)
        return cls(total, groups)

    def by_head(self, queries: Ranges, keys: Ranges) -> tuple[Ranges, ...]:
        """Return, for each KV head, the positions among `keys` that some of `queries` need."""
        if not queries or not keys:
            return ((),) * len(self.groups)
        return tuple(self.in_head([(rule, run) for rule in rules for run in queries], keys) for rules in self.groups)

    def in_head(self, runs: Sequence[tuple[RuleHead, range]], keys: Ranges) -> Ranges:
        """Return the positions among `keys` that some of the queries in `runs` need in one KV head.

        Neither argument may be empty.

        runs: pairs (item of `groups[g]` for this KV head g, range of positions of queries).
        """
        # If all rules have a common period, the needs have it, too: a shift by a multiple of it allows reuse.
        period = common_period(tuple(rule for (rule, _), _ in runs))
        least = min(keys[0].start, *(queries.start for _, queries in runs))
        shift = 0 if period is None else least // period * period
        questions = tuple(
            KeyQuery((rule,), moved(queries, -shift), moved(run, -shift), head, self.num_heads_global)
            for (rule, head), queries in runs
            for run in keys
        )
        if questions not in self._known:
            self._known[questions] = keys_of_any(questions)
        return tuple(moved(each, shift) for each in self._known[questions])


def work_of_ranks(
    pattern: Expression,
    sharding: Sharding,
    *,
    num_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    batch: int = 1,
) -> Int64[Tensor, " W"]:
    """Return the number of pairs that the pattern allows for each rank's queries, over all query heads and entries.

    A pair counts once for each branch of a mixture that allows it.

    num_heads, head_offset, num_heads_global: as in `KVNeeds.of`.
    batch: number of batch entries; with 1, the largest batch size of the pattern's run-time tensors, as in `bind`.

    Raises ValueError if the pattern does not fit these sizes, or lacks the values of its run-time tensors.
    """
    tokens = sharding.num_tokens
    heads = {"num_heads": num_heads, "head_offset": head_offset, "num_heads_global": num_heads_global}
    bound = pattern.bind(num_queries=tokens, num_keys=tokens, batch=batch, **heads)
    entries = bound.pattern.num_entries()
    ranges = [(rank, run) for rank in range(sharding.num_ranks) for run in sharding.ranges(rank)]
    rank = torch.tensor([rank for rank, _ in ranges])
    start, stop = (torch.tensor(ends) for ends in zip(*((run.start, run.stop) for _, run in ranges), strict=True))
    rules = Counter(
        branch.for_head(head, bound.num_heads_global)
        for entry in range(entries)
        for branch in bound.entry(entry).pattern.branches()
        for head in range(head_offset, head_offset + num_heads)
    )
    work = torch.zeros(sharding.num_ranks, dtype=torch.int64)
    for rule, times in rules.items():
        work.index_add_(0, rank, bound.batch // entries * times * pairs_of_queries(rule, start, stop, tokens))
    return work
