"""Useful pairs by head and branch, and pairs by the number of branches that allow them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from ..blocks import LISTED_BYTES, UNKNOWN, Blocks, count_pairs
from ..core import Bound, Expression, Pattern
from ..needs import positions
from ..planning import CountedPairs, PaddedTerm, Term, computed_pairs, plan

# H heads, n queries or blocks

_MOST_PAIRS = 1 << 25  # evaluations for a sample; finding the keys of a query takes as long as _COUNT evaluations
_COUNT = 1 << 12
_SEED = 0


class TermCount(NamedTuple):
    """Counts over all heads and folds; useful pairs are multiplied by the term's multiplicity."""

    useful_pairs: int
    computed_pairs: int
    full_blocks: int
    partial_blocks: int
    table_bytes: int


def count_term(term: Term) -> TermCount:
    """Counts of a term; rebuilds its block lists as attention builds them."""
    if isinstance(term, PaddedTerm):
        full, partial = (round(number) for number in term.listed_blocks[1:])
        lists = (full + partial) // len(term.heads) * LISTED_BYTES
        return TermCount(term.counted_pairs(), computed_pairs(term), full, partial, lists)
    if isinstance(term.weights, CountedPairs):
        return TermCount(term.counted_pairs(), computed_pairs(term), 0, len(term.heads), 0)
    if term.shape != "blocks":
        return _count_plain(term)
    blocks, pairs = _listed(term)
    users = torch.bincount(torch.tensor(blocks.heads))[blocks.table.long()]
    useful, listed = int((pairs * users).sum()), int(users.sum()) * term.folds
    full = int(users[blocks.full].sum()) * term.folds
    computed = listed * term.block_side**2
    return TermCount(term.multiplicity * useful * term.folds, computed, full, listed - full, blocks.nbytes)


def _listed(term: Term) -> tuple[Blocks, Int64[Tensor, " n"]]:
    """Blocks of a term, and the number of allowed pairs of each."""
    blocks = term.blocks(term.block_side, term.block_side)
    unknown, pairs = (blocks.pairs == UNKNOWN).nonzero().squeeze(1), blocks.pairs.long()
    pairs[unknown] = count_pairs(term.table_rule(), blocks.places(unknown), blocks.shape)
    return blocks, pairs


def _count_plain(term: Term) -> TermCount:
    """Counts of a term without block lists, in closed form."""
    computed = computed_pairs(term)
    listed, problems = computed // term.block_side**2, len(term.heads) * term.folds
    full = _full_blocks(term) * problems
    held = listed // problems * (max(term.tables()) + 1) * LISTED_BYTES
    return TermCount(term.counted_pairs(), computed, full, listed - full, held)


def _full_blocks(term: Term) -> int:
    """Number of whole blocks without a hidden pair, for one head and fold."""
    side = term.block_side
    rows, columns = term.q.num_slots // side, term.k.num_slots // side
    if term.shape == "dense":
        return rows * columns
    lead = term.k.num_slots - term.q.num_slots if term.shape == "strip" else 0
    # All queries of a row of blocks see the keys up to its first query.
    return sum(min((row * side + lead + 1) // side, columns) for row in range(rows))


Rules = tuple[tuple[Pattern, int], ...]  # of one head: (rule, multiplicity) of each distinct branch


@dataclass(frozen=True)
class Group:
    """Heads with equal rules; `heads` counts from 0 on this device."""

    heads: tuple[int, ...]
    rules: Rules


def groups_of(bound: Bound) -> tuple[Group, ...]:
    """Heads grouped by equal rules, in the order of their first heads."""
    groups: dict[Rules, list[int]] = {}
    branches = Counter(bound.pattern.branches()).items()
    for head in range(bound.num_heads):
        here = head + bound.head_offset, bound.num_heads_global
        groups.setdefault(tuple((branch.for_head(*here), times) for branch, times in branches), []).append(head)
    return tuple(Group(tuple(heads), rules) for rules, heads in groups.items())


@dataclass(frozen=True)
class HeadShare:
    """Heads with equal rules, and each head's useful pairs: in total and by branch."""

    heads: tuple[int, ...]
    branch_pairs: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return sum(self.branch_pairs)


@dataclass(frozen=True)
class BranchShare:
    """A distinct branch, its multiplicity, and its useful pairs over all heads, times that multiplicity."""

    pattern: Pattern
    multiplicity: int
    pairs: int


def head_shares(bound: Bound, planned: Mapping[Expression, Sequence[Term]]) -> tuple[HeadShare, ...]:
    """Pairs of each head by branch, times the branch's multiplicity; in the order of the first heads.

    `planned` maps branches to their terms. A branch that is computed together with others is missing there and is
    planned alone.
    """
    of_branches = []
    for branch, times in Counter(bound.pattern.branches()).items():
        found = torch.zeros(bound.num_heads, dtype=torch.int64)
        for term in planned.get(branch) or plan(replace(bound, pattern=branch)).terms:
            found[list(term.heads)] += times * _pairs_of_each_head(term)
        of_branches.append(found.tolist())
    groups = groups_of(bound)
    return tuple(HeadShare(group.heads, tuple(pairs[group.heads[0]] for pairs in of_branches)) for group in groups)


def _pairs_of_each_head(term: Term) -> Int64[Tensor, " H"]:
    """Pairs of each head in a term, counted once; no other term may count them."""
    if isinstance(term, PaddedTerm):
        return term.pairs_of_heads()
    if isinstance(term.weights, CountedPairs):
        return term.weights.counts().sum((1, 2))
    if term.shape != "blocks":  # all heads have equal counts
        each = term.counted_pairs() // (term.multiplicity * len(term.heads))
        return torch.full((len(term.heads),), each)
    blocks, pairs = _listed(term)
    of_tables = torch.zeros(max(blocks.heads) + 1, dtype=torch.int64).index_add_(0, blocks.table.long(), pairs)
    return term.folds * of_tables[torch.tensor(blocks.heads)]


def branch_shares(bound: Bound, heads: tuple[HeadShare, ...]) -> tuple[BranchShare, ...]:
    """Pairs of each distinct branch over all heads, in the order of the pattern."""
    branches = Counter(bound.pattern.branches()).items()
    pairs = (sum(len(share.heads) * share.branch_pairs[index] for share in heads) for index in range(len(branches)))
    return tuple(BranchShare(branch, times, own) for (branch, times), own in zip(branches, pairs, strict=True))


@dataclass(frozen=True)
class Multiplicity:
    """Number of pairs over all heads by the number of branches that allow them; a repeated branch counts repeatedly.

    The keys of `pairs` and `standard_errors` are numbers of branches, ascending; 0 is for pairs that no branch allows.
    `exact`: the pairs are counted. Otherwise they are unbiased estimates from all keys of a sample of `queries`
    queries, one drawn at random from each of as many equal parts of the sequence.
    """

    exact: bool
    queries: int
    pairs: Mapping[int, int] | Mapping[int, float]
    standard_errors: Mapping[int, float]


def multiplicity_of(bound: Bound, shares: tuple[BranchShare, ...]) -> Multiplicity:
    """Multiplicity of the pairs; exact for a single distinct branch, and where all queries can be counted."""
    if len(shares) == 1:
        (share,) = shares
        pairs = share.pairs // share.multiplicity
        counted = {0: bound.num_heads * bound.num_queries * bound.num_keys - pairs}
        counted |= {share.multiplicity: pairs} if pairs else {}
        return Multiplicity(True, bound.num_queries, counted, dict.fromkeys(counted, 0.0))
    groups = groups_of(bound)
    queries = drawn_tokens(bound.num_queries, _most_queries(bound, groups, shares))
    found = torch.stack([_of_query(bound, groups, bound.q_offset + query) for query in queries])
    numbers = [number for number in range(found.shape[1]) if number == 0 or found[:, number].any()]
    if len(queries) == bound.num_queries:
        counted = {number: int(found[:, number].sum()) for number in numbers}
        return Multiplicity(True, len(queries), counted, dict.fromkeys(counted, 0.0))
    pairs, errors = {}, {}
    for number in numbers:
        mean, error = mean_of(found[:, number].tolist(), bound.num_queries)
        pairs[number], errors[number] = mean * bound.num_queries, error * bound.num_queries
    return Multiplicity(False, len(queries), pairs, errors)


def _most_queries(bound: Bound, groups: tuple[Group, ...], shares: tuple[BranchShare, ...]) -> int:
    """Number of queries to sample: all if there are few pairs, otherwise as many as the budget permits."""
    keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
    rules = dict.fromkeys(rule for group in groups for rule, _ in group.rules)
    if len(rules) * bound.num_queries * bound.num_keys <= _MOST_PAIRS:
        return bound.num_queries
    evaluated = sum(rule.row(bound.q_offset, keys) is None for rule in rules)
    seen = sum(share.pairs for share in shares) // bound.num_queries
    return max(2, _MOST_PAIRS // (len(rules) * _COUNT + evaluated * len(keys) + seen))


def _of_query(bound: Bound, groups: tuple[Group, ...], query: int) -> Int64[Tensor, " m"]:
    """Number of keys of one query over all heads, by the number of branches that allow them."""
    keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
    seen = {rule: _keys_of(rule, query, keys) for group in groups for rule, _ in group.rules}
    found = torch.zeros(1 + sum(times for _, times in groups[0].rules), dtype=torch.int64)
    for group in groups:
        several = torch.cat([seen[rule] for rule, times in group.rules for _ in range(times)])
        counts = several.unique(return_counts=True)[1]
        found += len(group.heads) * torch.bincount(counts, minlength=len(found))
        found[0] += len(group.heads) * (len(keys) - len(counts))
    return found


def _keys_of(rule: Pattern, query: int, keys: range) -> Int64[Tensor, " n"]:
    """Key positions that one query sees under a rule for one head."""
    row = rule.row(query, keys)
    if row is not None:
        return positions(row or (range(0),))
    zero, every = torch.tensor(0), torch.arange(keys.start, keys.stop)
    return every[rule.mask_mod(num_heads=1, device=torch.device("cpu"))(zero, zero, torch.tensor(query), every)]


def drawn_tokens(size: int, most: int) -> list[int]:
    """All tokens, or `most`: one drawn at random from each of `most` equal parts, with a fixed seed."""
    if size <= most:
        return list(range(size))
    shares = torch.rand(most, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return ((torch.arange(most) + shares) * size / most).long().tolist()


def mean_of(sample: Sequence[int], size: int) -> tuple[float, float]:
    """(mean, standard error) from a sample of `size` values; the error is 0 if the sample has all."""
    number = len(sample)
    return fmean(sample), stdev(sample) / sqrt(number) if 1 < number < size else 0.0
