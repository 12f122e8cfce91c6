"""Number of allowed and computed pairs and of blocks of a plan; allowed pairs by head and branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from ..blocks import LISTED_BYTES, UNKNOWN, Blocks, count_pairs
from ..core import Bound, Expression, Pattern
from ..planning import CountedPairs, PaddedTerm, TableTerm, Term, computed_pairs, plan_with_table

# H heads, n queries or blocks


COUNT_FIELDS = ("useful_pairs", "computed_pairs", "full_blocks", "partial_blocks", "table_bytes")


@dataclass(frozen=True)
class PlannedCounts:
    """Number of pairs and blocks over all heads, in the layouts and block sizes that the planner chose.

    useful_pairs: allowed pairs, once for each branch that allows them.
    computed_pairs: pairs that kernels compute, masked ones included.
    full_blocks: whole blocks that allow every pair; of a table, also those cut short along the queries.
    partial_blocks: other computed blocks; a dense mask counts as one for each head.
    table_bytes: bytes of the block lists; of dense, causal and strip terms, the bytes that lists of them would take; 0
        for a dense mask or a table of keys or blocks.
    """

    useful_pairs: int
    computed_pairs: int
    full_blocks: int
    partial_blocks: int
    table_bytes: int

    @property
    def waste(self) -> float:
        """Computed pairs divided by allowed pairs; infinite if no pair is allowed."""
        return self.computed_pairs / self.useful_pairs if self.useful_pairs else float("inf")


def sums_by_field(counts: Sequence[PlannedCounts]) -> dict[str, int]:
    """Return {name: sum over `counts`} for each field of PlannedCounts."""
    return {name: sum(getattr(each, name) for each in counts) for name in COUNT_FIELDS}


def count_term(term: Term) -> PlannedCounts:
    """Return the counts of a term, which may build its block lists."""
    if isinstance(term, PaddedTerm):
        full, partial = (round(number) for number in term.listed_blocks[1:])
        lists = (full + partial) // len(term.heads) * LISTED_BYTES
        return PlannedCounts(term.counted_pairs(), computed_pairs(term), full, partial, lists)
    if isinstance(term.weights, CountedPairs):
        return PlannedCounts(term.counted_pairs(), computed_pairs(term), 0, len(term.heads), 0)
    if isinstance(term, TableTerm):
        return PlannedCounts(term.counted_pairs(), computed_pairs(term), *term.block_counts(), 0)
    if term.shape != "blocks":
        return _count_plain_term(term)
    blocks, pairs = _counted_blocks(term)
    users = torch.bincount(torch.tensor(blocks.heads))[blocks.table.long()]
    useful, listed = int((pairs * users).sum()), int(users.sum()) * term.folds
    full = int(users[blocks.full].sum()) * term.folds
    computed = listed * term.block_side**2
    return PlannedCounts(term.multiplicity * useful * term.folds, computed, full, listed - full, blocks.nbytes)


def _counted_blocks(term: Term) -> tuple[Blocks, Int64[Tensor, " n"]]:
    """Return (block list of a term, number of allowed pairs of each block), for one fold."""
    blocks = term.blocks(term.block_side, term.block_side)
    unknown, pairs = (blocks.pairs == UNKNOWN).nonzero().squeeze(1), blocks.pairs.long()
    pairs[unknown] = count_pairs(term.table_rule(), blocks.places(unknown), blocks.shape)
    return blocks, pairs


def _count_plain_term(term: Term) -> PlannedCounts:
    """Return the counts of a term of a plain shape (dense, causal or strip), in closed form."""
    computed = computed_pairs(term)
    listed, problems = computed // term.block_side**2, len(term.heads) * term.folds
    full = _num_full_blocks(term) * problems
    held = listed // problems * (max(term.tables()) + 1) * LISTED_BYTES
    return PlannedCounts(term.counted_pairs(), computed, full, listed - full, held)


def _num_full_blocks(term: Term) -> int:
    """Return how many blocks of one head and fold of a dense, causal or strip term are whole and allow all pairs."""
    side = term.block_side
    rows, columns = term.q.num_slots // side, term.k.num_slots // side
    if term.shape == "dense":
        return rows * columns
    lead = term.k.num_slots - term.q.num_slots if term.shape == "strip" else 0
    # All queries of a query block attend to the keys up to its first query.
    return sum(min((row * side + lead + 1) // side, columns) for row in range(rows))


def alike_heads(bound: Bound) -> tuple[tuple[int, ...], ...]:
    """Return tuples of heads with equal rules, in the order of their first heads, as indices from 0 on this device."""
    groups: dict[tuple[Pattern, ...], list[int]] = {}
    for head in range(bound.num_heads):
        here = head + bound.head_offset, bound.num_heads_global
        groups.setdefault(tuple(branch.for_head(*here) for branch in bound.pattern.branches()), []).append(head)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True)
class HeadShare:
    """Group of heads with equal rules, and the allowed pairs of each single head of the group.

    heads: indices of the heads, from 0 on this device.
    branch_pairs: for each distinct branch, allowed pairs of one head, times the number of branches equal to it.
    """

    heads: tuple[int, ...]
    branch_pairs: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return sum(self.branch_pairs)


@dataclass(frozen=True)
class BranchShare:
    """A distinct branch of a pattern, and its allowed pairs.

    multiplicity: number of branches equal to this one, itself included.
    pairs: allowed pairs over all heads, times `multiplicity`.
    """

    pattern: Pattern
    multiplicity: int
    pairs: int


def head_shares(bound: Bound, planned: Mapping[Expression, Sequence[Term]]) -> tuple[HeadShare, ...]:
    """Return one `HeadShare` for each group of heads with equal rules.

    planned: map from a branch to its terms. Branches that it lacks are planned here, each alone.
    """
    of_branches = []
    for branch, times in Counter(bound.pattern.branches()).items():
        found = torch.zeros(bound.num_heads, dtype=torch.int64)
        for term in planned.get(branch) or plan_with_table(replace(bound, pattern=branch)).terms:
            found[list(term.heads)] += times * _pairs_of_each_head(term)
        of_branches.append(found.tolist())
    return tuple(HeadShare(heads, tuple(pairs[heads[0]] for pairs in of_branches)) for heads in alike_heads(bound))


def _pairs_of_each_head(term: Term) -> Int64[Tensor, " H"]:
    """Return the number of allowed pairs of each head in a term, without the term's multiplicity."""
    if isinstance(term, PaddedTerm | TableTerm):
        return term.pairs_of_heads()
    if isinstance(term.weights, CountedPairs):
        return term.weights.counts().sum((1, 2)).expand(len(term.heads))
    if term.shape != "blocks":  # all heads have equal counts
        each = term.counted_pairs() // (term.multiplicity * len(term.heads))
        return torch.full((len(term.heads),), each)
    blocks, pairs = _counted_blocks(term)
    of_tables = torch.zeros(max(blocks.heads) + 1, dtype=torch.int64).index_add_(0, blocks.table.long(), pairs)
    return term.folds * of_tables[torch.tensor(blocks.heads)]
