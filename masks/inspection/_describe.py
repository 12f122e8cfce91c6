"""describe: what a pattern allows and what computing it costs, in numbers and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..core._ambient import plans
from ..core._bound import Bound
from ..core._check import require_int
from ..core._pattern import Expression, require_expression
from ..planning._planner import Option, Plan, plan
from ._describe_terms import count_term, sum_counts
from ._gaps import Gaps, gaps_of
from ._multiplicity import multiplicity_of
from ._receptive_field import ReceptiveField, receptive_field_of
from ._receptive_field_sample import FollowedTokens, follow_tokens
from ._relations import Relations
from ._sections import groups_of
from ._shares import BranchShare, HeadShare, branch_shares, head_shares
from ._squares import TooManySquaresError

MOST_DESCRIBED = 1 << 27  # tokens: a window's blocks then fill about 3 GB


@dataclass(frozen=True)
class BranchDescription:
    """One distinct branch of a pattern: its pairs over all heads, and the layouts that were weighed for it.

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
    """A pattern bound to sizes. Pairs are (query, key) pairs over all heads, counted once for each branch.

    What the plan tells is counted at once; `heads`, `branch_shares`, `multiplicity`, `gaps` and `receptive_field` when
    they are asked for, from what repeats in the rule, in seconds at a million tokens.
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
        """The pairs of each head, and of each branch in it; heads that follow the same rules are told once."""
        groups = groups_of(self.bound)
        if len(groups) == len(groups[0].rules) == 1:
            return (HeadShare(groups[0].heads, (self.useful_pairs // self.num_heads,)),)
        return head_shares(self._relations.ask())

    @cached_property
    @plans
    def branch_shares(self) -> tuple[BranchShare, ...]:
        """The pairs of each distinct branch as the pattern states them, whichever way they are computed."""
        return branch_shares(self.bound, self.heads)

    @cached_property
    @plans
    def multiplicity(self) -> Mapping[int, int] | None:
        """How many pairs are allowed by exactly so many branches, from 0 on; None where too little repeats to count."""
        if len(self.branch_shares) == 1:
            (share,) = self.branch_shares
            pairs = share.pairs // share.multiplicity
            return {0: self.all_pairs - pairs} | ({share.multiplicity: pairs} if pairs else {})
        try:
            return multiplicity_of(self._relations.ask())
        except TooManySquaresError:
            return None

    @property
    def distinct_pairs(self) -> int | None:
        """Pairs that at least one branch allows, each once; None where that is not known."""
        return None if self.multiplicity is None else self.all_pairs - self.multiplicity[0]

    @cached_property
    @plans
    def gaps(self) -> Gaps | None:
        """Queries without a key and keys that no query sees; None where too little repeats to tell."""
        try:
            return gaps_of(self._relations.ask())
        except TooManySquaresError:
            return None

    def receptive_field(self) -> ReceptiveField | FollowedTokens:
        """After how many layers which tokens can have heard of which.

        Exact for all tokens where enough of the pattern repeats, or where it treats tokens alike by blocks, or shows
        each a run of visible keys; else what a few tokens have heard of, which bounds the number of layers from below:
        a value of another type. Raises ValueError if queries and keys are not the same tokens.
        """
        return self._receptive_field

    @cached_property
    @plans
    def _receptive_field(self) -> ReceptiveField | FollowedTokens:
        try:
            return receptive_field_of(self._relations.ask())
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
        from ._describe_data import data_of

        return data_of(self)

    def to_text(self, *, columns: int = 80) -> str:
        """Tables whose lines have at most so many characters, or 30 if it is fewer."""
        from ._describe_text import text_of

        return text_of(self, columns=columns)

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
    chosen = options[0]
    counted = sum_counts(map(count_term, chosen.terms))
    return BranchDescription(
        chosen.branch,
        chosen.multiplicity,
        counted.useful_pairs,
        counted.computed_pairs,
        counted.full_blocks,
        counted.partial_blocks,
        counted.table_bytes,
        options,
    )
