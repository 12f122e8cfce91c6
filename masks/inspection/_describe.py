"""describe: the pairs that a pattern allows, what computing them costs, and what they reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..blocks import LISTED_BYTES, UNKNOWN, count_pairs
from ..core import Bound, Expression, plans, require_expression, require_int
from ..planning import Option, Plan, Term, computed_pairs, plan
from ._description_text import description_data, description_text
from ._pair_counts import (
    BranchShare,
    Gaps,
    HeadShare,
    SampledMultiplicity,
    branch_shares,
    gaps_of,
    head_shares,
    multiplicity_of,
    sampled_multiplicity,
)
from ._receptive_field import FollowedTokens, ReceptiveField, follow_tokens, receptive_field_of
from ._relations import Relations, groups_of
from ._squares import TooManySquaresError

MOST_DESCRIBED = 1 << 27  # tokens: a window's blocks then fill about 3 GB


@dataclass(frozen=True)
class BranchDescription:
    """One distinct branch of a pattern: its pairs over all heads, and the layouts that were compared for it.

    Where the planner computes all branches together, there is one for all of them. Blocks are those listed, over all
    heads; the full ones are whole and allow every pair.
    """

    pattern: Expression
    multiplicity: int
    useful_pairs: int
    computed_pairs: int
    full_blocks: int
    partial_blocks: int
    table_bytes: int
    options: tuple[Option, ...]

    @property
    def waste(self) -> float:
        """Computed over useful pairs; infinite for a branch that allows nothing."""
        return self.computed_pairs / self.useful_pairs if self.useful_pairs else float("inf")


@dataclass(frozen=True)
class Description:
    """All counts of a pattern bound to sizes, which print as tables.

    Pairs are (query, key) pairs over all heads, counted once for each branch.
    What follows from the plan is counted at once; `heads`, `branch_shares`, `multiplicity`, `gaps` and
    `receptive_field` on first use, from what repeats in the rule, in seconds at a million tokens. All of it is exact
    but for `sampled_multiplicity` and `FollowedTokens`, which are samples and say so.
    """

    pattern: Expression
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    branches: tuple[BranchDescription, ...]
    bound: Bound = field(repr=False)

    @property
    def all_pairs(self) -> int:
        return self.num_heads * self.num_queries * self.num_keys

    @property
    def useful_pairs(self) -> int:
        return sum(branch.useful_pairs for branch in self.branches)

    @property
    def computed_pairs(self) -> int:
        """Pairs in the listed blocks, in the planner's layouts and block sides."""
        return sum(branch.computed_pairs for branch in self.branches)

    @property
    def density(self) -> float:
        """Useful pairs over all pairs; may exceed 1 where branches overlap."""
        return self.useful_pairs / self.all_pairs

    @property
    def block_density(self) -> float:
        """Computed pairs over all pairs."""
        return self.computed_pairs / self.all_pairs

    @property
    def waste(self) -> float:
        """Computed over useful pairs."""
        return self.computed_pairs / self.useful_pairs if self.useful_pairs else float("inf")

    @property
    def forward_flops(self) -> int:
        """4 * head_dim for each useful pair."""
        return 4 * self.head_dim * self.useful_pairs

    @property
    def backward_flops(self) -> int:
        """10 * head_dim for each useful pair."""
        return 10 * self.head_dim * self.useful_pairs

    @property
    def full_blocks(self) -> int:
        """Listed blocks that are whole and allow every pair, in the planner's layouts, over all heads."""
        return sum(branch.full_blocks for branch in self.branches)

    @property
    def partial_blocks(self) -> int:
        """All other listed blocks."""
        return sum(branch.partial_blocks for branch in self.branches)

    @property
    def table_bytes(self) -> int:
        """Bytes of the block lists behind the plan."""
        return sum(branch.table_bytes for branch in self.branches)

    @cached_property
    @plans
    def heads(self) -> tuple[HeadShare, ...]:
        """The pairs of each head, and of each branch in it; one entry for all heads that follow the same rules."""
        groups = groups_of(self.bound)
        if len(groups) == len(groups[0].rules) == 1:
            return (HeadShare(groups[0].heads, (self.useful_pairs // self.num_heads,)),)
        return head_shares(self._relations.with_allowance())

    @cached_property
    @plans
    def branch_shares(self) -> tuple[BranchShare, ...]:
        """The pairs of each distinct branch as the pattern states them, whichever way they are computed."""
        return branch_shares(self.bound, self.heads)

    @cached_property
    @plans
    def multiplicity(self) -> Mapping[int, int] | None:
        """How many pairs are allowed by exactly so many branches, from 0 on; None where too little repeats to count.

        Then `sampled_multiplicity` estimates it.
        """
        if len(self.branch_shares) == 1:
            (share,) = self.branch_shares
            pairs = share.pairs // share.multiplicity
            return {0: self.all_pairs - pairs} | ({share.multiplicity: pairs} if pairs else {})
        try:
            return multiplicity_of(self._relations.with_allowance())
        except TooManySquaresError:
            return None

    @cached_property
    @plans
    def sampled_multiplicity(self) -> SampledMultiplicity | None:
        """Estimates of the same numbers, with their standard errors; None where `multiplicity` is counted."""
        return sampled_multiplicity(self.bound) if self.multiplicity is None else None

    @property
    def distinct_pairs(self) -> int | None:
        """Pairs that at least one branch allows, each once; None where that is not known."""
        return None if self.multiplicity is None else self.all_pairs - self.multiplicity[0]

    @cached_property
    @plans
    def gaps(self) -> Gaps | None:
        """Queries without a key and keys without a query; None where too little repeats to count them."""
        try:
            return gaps_of(self._relations.with_allowance())
        except TooManySquaresError:
            return None

    def receptive_field(self) -> ReceptiveField | FollowedTokens:
        """Which tokens each token reaches after how many layers.

        A `ReceptiveField`, exact for all tokens, where enough of the pattern repeats; else `FollowedTokens`, a sample:
        exact for a few tokens, with the mean over all tokens and its standard error, and a lower bound on the number
        of layers. Raises ValueError if queries and keys are not the same tokens.
        """
        return self._receptive_field

    @cached_property
    @plans
    def _receptive_field(self) -> ReceptiveField | FollowedTokens:
        try:
            return receptive_field_of(self._relations.with_allowance())
        except TooManySquaresError:
            return follow_tokens(self.bound)

    @cached_property
    @plans
    def _relations(self) -> Relations:
        return Relations(self.bound)

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.bound.is_self_attention

    def to_data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON; what is not known is None."""
        return description_data(self)

    def to_text(self, *, columns: int = 80) -> str:
        """Tables whose lines have at most so many characters, or 30 if it is fewer."""
        return description_text(self, columns)

    def __str__(self) -> str:
        return self.to_text()


@plans
def describe(
    pattern: Expression,
    num_queries: int,
    num_keys: int | None = None,
    *,
    num_heads: int = 1,
    head_dim: int = 64,
    q_offset: int = 0,
    k_offset: int = 0,
    device: torch.device | str = "cpu",
) -> Description:
    """Count what the pattern allows and what the planner's choice computes, in closed form where there is one.

    Of one head, unless `num_heads` says otherwise. Useful pairs count each (query, key) pair once for each branch that
    allows it. Predicted times are those of the cost model for one forward pass, batch 1, on this kind of device. Raises
    ValueError for sizes below 1, for heads that the pattern has no rule for, for run-time tensors that differ by batch
    entry, and for more than 134,217,728 queries or keys where the planner's choice lists blocks.

    >>> masks.describe(masks.local_window(left=127, right=0), 4096).density
    0.030765533447265625
    """
    require_int("head_dim", head_dim, minimum=1)
    keys = num_queries if num_keys is None else num_keys
    offsets = {"q_offset": q_offset, "k_offset": k_offset}
    bound = require_expression(pattern).bind(num_heads=num_heads, num_queries=num_queries, num_keys=keys, **offsets)
    return describe_plan(plan(bound, device=device), head_dim=head_dim)


@plans
def describe_plan(plan: Plan, *, head_dim: int) -> Description:
    """The same of a plan that was made. Raises ValueError where its lists of blocks would fill the memory."""
    _require_countable(plan)
    bound, branches = plan.bound, tuple(_describe_branch(options) for options in plan.options)
    return Description(bound.pattern, bound.num_queries, bound.num_keys, bound.num_heads, head_dim, branches, bound)


def _require_countable(plan: Plan) -> None:
    most = max(plan.bound.num_queries, plan.bound.num_keys)
    listed = any(term.shape == "blocks" for chosen, *_ in plan.options for term in chosen.terms)
    if listed and most > MOST_DESCRIBED:
        raise ValueError(
            f"blocks are counted up to {MOST_DESCRIBED} tokens (128M), as their lists fill the memory beyond; "
            f"got {most}"
        )


def _describe_branch(options: tuple[Option, ...]) -> BranchDescription:
    """Of the option that the planner chose, the first one."""
    chosen = options[0]
    counted = zip(TermCount(0, 0, 0, 0, 0), *map(count_term, chosen.terms), strict=True)
    return BranchDescription(chosen.branch, chosen.multiplicity, *map(sum, counted), options=options)


class TermCount(NamedTuple):
    """Over all heads and folds; useful pairs as often as they count."""

    useful_pairs: int
    computed_pairs: int
    full_blocks: int
    partial_blocks: int
    table_bytes: int


def count_term(term: Term) -> TermCount:
    """A term's lists are built once more for it, as attention builds them."""
    if term.shape != "blocks":
        return _count_plain(term)
    side = term.block_side
    blocks = term.blocks(side, side)
    unknown = (blocks.pairs == UNKNOWN).nonzero().squeeze(1)
    pairs = blocks.pairs.long()
    pairs[unknown] = count_pairs(term.table_rule(), blocks.places(unknown), blocks.shape)
    users = torch.bincount(torch.tensor(blocks.heads))[blocks.table.long()]
    useful, listed = int((pairs * users).sum()), int(users.sum()) * term.folds
    full = int(users[blocks.full].sum()) * term.folds
    return TermCount(term.multiplicity * useful * term.folds, listed * side**2, full, listed - full, blocks.nbytes)


def _count_plain(term: Term) -> TermCount:
    """The same for what is no list of blocks: nothing has to be listed to be counted."""
    computed = computed_pairs(term)
    listed, problems = computed // term.block_side**2, len(term.heads) * term.folds
    full = _full_blocks(term) * problems
    held = listed // problems * (max(term.tables()) + 1) * LISTED_BYTES
    return TermCount(term.counted_pairs(), computed, full, listed - full, held)


def _full_blocks(term: Term) -> int:
    """Whole blocks without a hidden pair, of one head and fold."""
    side = term.block_side
    rows, columns = term.q.num_slots // side, term.k.num_slots // side
    if term.shape == "dense":
        return rows * columns
    lead = term.k.num_slots - term.q.num_slots if term.shape == "strip" else 0
    # The keys up to a row's first query are seen by all of its queries.
    return sum(min((row * side + lead + 1) // side, columns) for row in range(rows))
