"""describe: what a pattern allows and what computing it costs, in numbers and as a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tabulate import tabulate

from ._blocks import LISTED_BYTES, UNKNOWN, count_pairs
from ._cost import computed_pairs
from ._pattern import Expression, require_expression
from ._planner import Option, Plan, plan
from ._term import Term


@dataclass(frozen=True)
class BranchDescription:
    """One distinct branch of a pattern: its pairs over all heads, and the layouts that were weighed for it."""

    pattern: Expression
    multiplicity: int
    useful_pairs: int
    computed_pairs: int
    table_bytes: int
    options: tuple[Option, ...]

    @property
    def waste(self) -> float:
        """Computed over useful pairs; infinite for a branch that allows nothing."""
        return self.computed_pairs / self.useful_pairs if self.useful_pairs else float("inf")


@dataclass(frozen=True)
class Description:
    """A pattern bound to sizes. Pairs are (query, key) pairs over all heads, counted once for each branch."""

    pattern: Expression
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    branches: tuple[BranchDescription, ...]

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
    def table_bytes(self) -> int:
        """Bytes of the block lists behind the plan."""
        return sum(branch.table_bytes for branch in self.branches)

    def __str__(self) -> str:
        tokens = f"{self.num_queries:,} queries x {self.num_keys:,} keys"
        size = f"{tokens} x {self.num_heads} heads, head dim {self.head_dim}"
        facts = [
            ("size", size),
            ("density", f"{self.density:.4%} of pairs, {self.block_density:.4%} in blocks"),
            ("pairs", f"{self.useful_pairs:,} useful, {self.computed_pairs:,} computed: {self.waste:.3f} to 1"),
            ("FLOPs", f"{self.forward_flops:.3e} forward, {self.backward_flops:.3e} backward"),
            ("block lists", f"{self.table_bytes:,} bytes"),
        ]
        rows = [_row(branch, self.all_pairs) for branch in self.branches]
        headers = ("branch", "times", "density", "computed / useful", "layout (predicted ms)", "others (predicted ms)")
        return f"{tabulate(facts, tablefmt='plain')}\n\n{tabulate(rows, headers=headers, disable_numparse=True)}"


def describe(
    pattern: Expression,
    num_queries: int,
    num_keys: int | None = None,
    *,
    num_heads: int,
    head_dim: int = 64,
    q_offset: int = 0,
    k_offset: int = 0,
    device: torch.device | str = "cpu",
) -> Description:
    """Count what the pattern allows and what the planner's choice computes, in closed form where there is one.

    Useful pairs count each (query, key) pair once for each branch that allows it. Predicted times are those
    of the cost model for one forward pass, batch 1, on this kind of device.
    """
    keys = num_queries if num_keys is None else num_keys
    offsets = {"q_offset": q_offset, "k_offset": k_offset}
    bound = require_expression(pattern).bind(num_heads=num_heads, num_queries=num_queries, num_keys=keys, **offsets)
    return describe_plan(plan(bound, device=device), head_dim=head_dim)


def describe_plan(plan: Plan, *, head_dim: int) -> Description:
    """The same of a plan that was made."""
    bound, branches = plan.bound, tuple(_describe_branch(options) for options in plan.options)
    return Description(bound.pattern, bound.num_queries, bound.num_keys, bound.num_heads, head_dim, branches)


def _describe_branch(options: tuple[Option, ...]) -> BranchDescription:
    chosen = options[0]
    counts = [_count(term) for term in chosen.terms]
    return BranchDescription(
        chosen.branch,
        chosen.multiplicity,
        sum(useful for useful, _, _ in counts),
        sum(computed for _, computed, _ in counts),
        sum(held for _, _, held in counts),
        options,
    )


def _count(term: Term) -> tuple[int, int, int]:
    """(useful pairs as often as they count, computed pairs, bytes of block lists) of a term."""
    if term.shape != "blocks":
        return _count_plain(term)
    side = term.block_side
    blocks = term.blocks(side, side)
    unknown = (blocks.pairs == UNKNOWN).nonzero().squeeze(1)
    pairs = blocks.pairs.long()
    pairs[unknown] = count_pairs(term.table_rule(), blocks.places(unknown), blocks.shape)
    users = torch.bincount(torch.tensor(blocks.heads))[blocks.table.long()]
    useful, listed = int((pairs * users).sum()), int(users.sum())
    return term.multiplicity * useful * term.folds, listed * side**2 * term.folds, blocks.nbytes


def _count_plain(term: Term) -> tuple[int, int, int]:
    """The same for what is no list of blocks: nothing has to be listed to be counted."""
    computed = computed_pairs(term)
    listed = computed // (term.block_side**2 * len(term.heads) * term.folds) * (max(term.tables()) + 1)
    return term.counted_pairs(), computed, listed * LISTED_BYTES


def _row(branch: BranchDescription, all_pairs: int) -> tuple[str, ...]:
    chosen, *others = (f"{option.layout} ({option.cost.seconds * 1e3:.3g})" for option in branch.options)
    density = f"{branch.useful_pairs / all_pairs:.4%}"
    return repr(branch.pattern), str(branch.multiplicity), density, f"{branch.waste:.3f}", chosen, ", ".join(others)
