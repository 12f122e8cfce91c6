"""describe: the allowed pairs of a pattern, the cost to compute them, and the receptive field."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..core import HEADS, LENGTH, Bound, Expression, advises, plans, renamed, require_expression, require_int
from ..planning import Operands, Option, Plan, plan
from ._description_text import description_data, description_text
from ._gaps import Gaps, gaps_of
from ._pair_counts import (
    BranchShare,
    HeadShare,
    Multiplicity,
    TermCount,
    branch_shares,
    count_term,
    groups_of,
    head_shares,
    multiplicity_of,
)
from ._receptive_field import ReceptiveField, receptive_field_of

MOST_DESCRIBED = 1 << 27  # tokens; the block lists of a window then take about 3 GB


@dataclass(frozen=True)
class BranchDescription:
    """One distinct branch of a pattern: its pairs over all heads, and the layouts that the planner compared.

    If the planner computes all branches together, one BranchDescription covers them all. Block counts are of listed
    blocks, over all heads; full blocks are whole and allow every pair.
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
    """All counts of a pattern bound to sizes; prints as tables.

    Pairs are (query, key) pairs over all heads, counted once for each branch.
    Counts that follow from the plan are computed at once; `heads`, `branch_shares`, `multiplicity`, `gaps` and
    `receptive_field` on first use, in seconds at a million tokens. All are exact except `multiplicity` of several
    branches and `receptive_field`: unless there are few tokens, these are sampled, and their `exact` is False.
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
        """Listed blocks that are not full."""
        return sum(branch.partial_blocks for branch in self.branches)

    @property
    def table_bytes(self) -> int:
        """Bytes of the plan's block lists."""
        return sum(branch.table_bytes for branch in self.branches)

    @cached_property
    @plans
    def heads(self) -> tuple[HeadShare, ...]:
        """Pairs of each head, in total and by branch; one entry for all heads with equal rules."""
        groups = groups_of(self.bound)
        if len(groups) == len(groups[0].rules) == 1:
            return (HeadShare(groups[0].heads, (self.useful_pairs // self.num_heads,)),)
        return head_shares(self.bound, {branch.pattern: branch.options[0].terms for branch in self.branches})

    @cached_property
    @plans
    def branch_shares(self) -> tuple[BranchShare, ...]:
        """Pairs of each distinct branch of the pattern, also if branches are computed together."""
        return branch_shares(self.bound, self.heads)

    @cached_property
    @plans
    def multiplicity(self) -> Multiplicity:
        """Number of pairs by the number of branches that allow them: exact, or estimated with standard errors."""
        return multiplicity_of(self.bound, self.branch_shares)

    @property
    def distinct_pairs(self) -> int | float:
        """Pairs that at least one branch allows, counted once; an estimate unless `multiplicity.exact`.

        Its standard error is `multiplicity.standard_errors[0]`.
        """
        return self.all_pairs - self.multiplicity.pairs[0]

    @cached_property
    @plans
    def gaps(self) -> Gaps | None:
        """Queries without a key and keys without a query; None if counting them would take too long."""
        return gaps_of(self.bound)

    @cached_property
    @plans
    def zero_keys(self) -> int:
        """Zero keys of padding over all rows and heads; `attend` has them in its softmax, pair counts omit them."""
        if not self.pattern.pads:
            return 0
        bound = self.bound
        queries = torch.arange(bound.q_offset, bound.q_offset + bound.num_queries, device="cpu")
        sizes = {"num_heads": bound.num_heads_global, "num_tokens": bound.num_positions}
        heads = torch.arange(bound.num_heads, device="cpu")
        return sum(int(self.pattern.zero_keys(head, queries, **sizes).sum()) for head in heads)

    def receptive_field(self) -> ReceptiveField:
        """Number of tokens that a token reaches by number of layers, over all tokens or a sample.

        Raises ValueError unless `is_self_attention`.
        """
        return self._receptive_field

    @cached_property
    @plans
    def _receptive_field(self) -> ReceptiveField:
        return receptive_field_of(self.bound)

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys have equal positions."""
        return self.bound.is_self_attention

    def to_data(self) -> dict[str, Any]:
        """All numbers as plain data, for JSON; unknown numbers are None."""
        return description_data(self)

    def to_text(self, *, columns: int = 80) -> str:
        """Tables with lines of at most `columns` characters, or 30 if `columns` is smaller."""
        return description_text(self, columns)

    def __str__(self) -> str:
        return self.to_text()


@plans
@advises(keywords=renamed(num_queries=LENGTH, num_heads=HEADS))
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
    """Count the pairs that the pattern allows and the pairs that the planner's choice computes.

    Counts are in closed form where there is one. Useful pairs count each (query, key) pair once for each branch that
    allows it. The cost model predicts the time of one forward pass, batch 1, on this kind of device: in float32 on CPU,
    in half precision elsewhere. Raises ValueError for sizes below 1, for heads that the pattern has no rule for, for
    run-time tensors that differ by batch entry, and for more than 134,217,728 queries or keys where the planner's
    choice lists blocks.

    >>> masks.describe(masks.local_window(left=127, right=0), 4096).density
    0.030765533447265625
    """
    require_int("head_dim", head_dim, minimum=1)
    keys = num_queries if num_keys is None else num_keys
    offsets = {"q_offset": q_offset, "k_offset": k_offset}
    bound = require_expression(pattern).bind(num_heads=num_heads, num_queries=num_queries, num_keys=keys, **offsets)
    operands = Operands.usual_on(torch.device(device).type)._replace(head_dim=head_dim)
    described = describe_plan(plan(bound, device=device, operands=operands), head_dim=head_dim)
    return replace(described, pattern=pattern) if pattern.pads else described


@plans
def describe_plan(plan: Plan, *, head_dim: int) -> Description:
    """Describe an existing plan. Raises ValueError for block lists of more than MOST_DESCRIBED queries or keys."""
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
    """Counts of the first option, which the planner chose."""
    chosen = options[0]
    counted = zip(TermCount(0, 0, 0, 0, 0), *map(count_term, chosen.terms), strict=True)
    return BranchDescription(chosen.branch, chosen.multiplicity, *map(sum, counted), options=options)
