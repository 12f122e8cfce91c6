"""describe: number of allowed pairs of a pattern, predicted cost of attention, and receptive field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from tabulate import tabulate

from ..core import (
    HEADS,
    LENGTH,
    Bound,
    Expression,
    advises,
    device_kind,
    outside_torch_modes,
    renamed,
    require_expression,
    require_int,
    seconds_text,
    shortened,
)
from ..patterns import tables
from ..planning import OperandSizes, Option, Plan, plan, plan_with_table
from ._order_gain import order_gain
from ._pair_counts import (
    COUNT_FIELDS,
    BranchShare,
    HeadShare,
    PlannedCounts,
    alike_heads,
    count_term,
    head_shares,
    sums_by_field,
)
from ._receptive_field import ReceptiveField, receptive_field_of

MOST_DESCRIBED = 1 << 27  # tokens; the block lists of a window then take about 3 GB
_MOST_LINES, _LONGEST_PATTERN = 24, 200
_LEAST_ORDER_GAIN = 1.25  # least `order_gain` that str() of a Description mentions
_FACT_WIDTH, _PATTERN_WIDTH, _LAYOUT_WIDTH = 66, 34, 20  # characters, beyond which cells of tables wrap


@dataclass(frozen=True, kw_only=True)
class BranchDescription(PlannedCounts):
    """One distinct branch of a pattern: its counts over all heads, and the options the planner compared.

    multiplicity: number of branches equal to this one, itself included. `useful_pairs` is the sum over these branches;
        the other counts are for a single branch.
    options: ways to compute the branch, the chosen one first.

    If the planner computes all branches together, a single BranchDescription covers them all. If the engine reads a
    table of keys or blocks, as in `describe` for CPU, the first BranchDescription is of the table's pairs, and the
    others are of all other pairs.
    """

    pattern: Expression
    multiplicity: int
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True)
class Description(PlannedCounts):
    """Counts of a pattern at given sizes; str() formats them as tables.

    Pairs are counted over `num_heads` heads, and an allowed pair once for each branch that allows it; for the union use
    `describe(pattern.union, ...)`. `receptive_field` is sampled above 256 tokens.

    head_dim: of queries and keys.
    value_dim: of values.
    bound: the pattern with the sizes and offsets at which it was counted.
    """

    pattern: Expression
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    value_dim: int
    branches: tuple[BranchDescription, ...]
    bound: Bound = field(repr=False)

    @property
    def all_pairs(self) -> int:
        return self.num_heads * self.num_queries * self.num_keys

    @property
    def density(self) -> float:
        """Allowed pairs divided by all pairs; may exceed 1, as a pair counts once for each branch that allows it."""
        return self.useful_pairs / self.all_pairs

    @property
    def block_density(self) -> float:
        """Pairs that kernels compute, divided by all pairs."""
        return self.computed_pairs / self.all_pairs

    @property
    def forward_flops(self) -> int:
        """FLOP of the forward pass: 2 * (head_dim + value_dim) for each allowed pair."""
        return 2 * (self.head_dim + self.value_dim) * self.useful_pairs

    @property
    def backward_flops(self) -> int:
        """FLOP of the backward pass: 6 * head_dim + 4 * value_dim for each allowed pair."""
        return (6 * self.head_dim + 4 * self.value_dim) * self.useful_pairs

    @cached_property
    @outside_torch_modes
    def heads(self) -> tuple[HeadShare, ...]:
        """One `HeadShare` for each group of heads with equal rules: the allowed pairs of one head, by branch."""
        if len(alike_heads(self.bound)) == len(set(self.bound.pattern.branches())) == 1:
            return (HeadShare(tuple(range(self.num_heads)), (self.useful_pairs // self.num_heads,)),)
        return head_shares(self.bound, {branch.pattern: branch.options[0].terms for branch in self.branches})

    @cached_property
    @outside_torch_modes
    def branch_shares(self) -> tuple[BranchShare, ...]:
        """One `BranchShare` for each distinct branch: its allowed pairs over all heads, times its multiplicity.

        Counted by branch also if the planner computes branches together.
        """
        branches = Counter(self.bound.pattern.branches()).items()
        pairs = [sum(len(share.heads) * share.branch_pairs[at] for share in self.heads) for at in range(len(branches))]
        return tuple(BranchShare(*each, own) for each, own in zip(branches, pairs, strict=True))

    @cached_property
    @outside_torch_modes
    def zero_keys(self) -> int:
        """Number of zero keys of padding in the softmax, over all queries and heads; 0 without padding='zeros'.

        Pair counts omit these keys.
        """
        if not self.pattern.pads:
            return 0
        bound = self.bound
        queries = torch.arange(bound.q_offset, bound.q_offset + bound.num_queries, device="cpu")
        heads = torch.arange(bound.num_heads, device="cpu")
        sizes = {"num_heads": bound.num_heads_global, "num_tokens": bound.num_positions}
        return sum(int(self.pattern.zero_keys(head, queries, **sizes).sum()) for head in heads)

    @cached_property
    @outside_torch_modes
    def order_gain(self) -> float | None:
        """Number of 128 x 128 blocks with a pair of the pattern's matrix, divided by that number after sorting tokens.

        Tokens are sorted in reverse Cuthill-McKee order. This needs SciPy, self-attention from position 0 on, and a
        pattern with one `sparse` or `mask` of 1 to 2**24 pairs, shared by all heads and batch entries; a `mask` must
        have an element for each pair of tokens. Else the result is None. It is also None if the chosen layouts have no
        block lists, as when keys are gathered.
        """
        listed = any(term.shape == "blocks" for branch in self.branches for term in branch.options[0].terms)
        return order_gain(self.bound) if listed else None

    def receptive_field(self) -> ReceptiveField:
        """Return the `ReceptiveField`: how many tokens influence a token through 1, 2, ... layers.

        Raises ValueError unless `is_self_attention`.
        """
        return self._receptive_field

    @cached_property
    @outside_torch_modes
    def _receptive_field(self) -> ReceptiveField:
        return receptive_field_of(self.bound)

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys have equal positions."""
        return self.bound.is_self_attention

    def to_data(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON; undefined numbers are None."""
        sizes = ("num_queries", "num_keys", "num_heads", "head_dim", "all_pairs", "zero_keys")
        derived = ("density", "block_density", "forward_flops", "backward_flops")
        return {
            "pattern": repr(self.pattern),
            **{name: getattr(self, name) for name in (*sizes, *COUNT_FIELDS, *derived)},
            "waste": self.waste if self.useful_pairs else None,
            "order_gain": self.order_gain,
            "computed": [_branch_data(branch) for branch in self.branches],
            "branches": [
                {"pattern": repr(each.pattern), "multiplicity": each.multiplicity, "useful_pairs": each.pairs}
                for each in self.branch_shares
            ],
            "heads": [
                {"heads": list(each.heads), "pairs_per_head": each.pairs, "branch_pairs": list(each.branch_pairs)}
                for each in self.heads
            ],
            "receptive_field": self.receptive_field().to_data() if self.is_self_attention else None,
        }

    def __str__(self) -> str:
        facts = tabulate(_facts(self), tablefmt="plain", disable_numparse=True, maxcolwidths=[None, _FACT_WIDTH])
        parts = [facts, _branches_table(self), _heads_table(self), _growth_table(self)]
        return "\n\n".join(part for part in parts if part)


@outside_torch_modes
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
    """Return a `Description`: the pairs that a pattern allows, and those that kernels compute in the planner's layouts.

    Useful pairs are allowed pairs, counted once for each branch that allows them; computed pairs include masked ones.

    num_keys: num_queries by default.
    num_heads: number of query heads, over all devices.
    head_dim: of queries, keys and values, for the predicted time and the FLOP.
    q_offset, k_offset: positions of the first query and key.
    device: kind of device for the predicted time of one forward pass, batch 1, in float32 on CPU and half precision
        elsewhere.

    Raises ValueError for sizes below 1, offsets below 0, heads or positions that the pattern has no rule for, run-time
    tensors that are missing, do not fit or differ by batch entry, and more than 134,217,728 queries or keys if the
    planner's choice uses block lists; TypeError for values of other types.

    >>> masks.describe(masks.local_window(left=127, right=0), 4096).density
    0.030765533447265625
    """
    require_int("head_dim", head_dim, minimum=1)
    keys = num_queries if num_keys is None else num_keys
    offsets = {"q_offset": q_offset, "k_offset": k_offset}
    bound = require_expression(pattern).bind(num_heads=num_heads, num_queries=num_queries, num_keys=keys, **offsets)
    for table in tables(bound.pattern):
        table.require_equal_rows()
    kind = torch.device(device).type
    operands = OperandSizes.usual_on(kind)._replace(head_dim=head_dim)
    planned = plan_with_table if device_kind(kind).on_host else plan
    described = describe_plan(planned(bound, device=device, operands=operands), head_dim=head_dim)
    return replace(described, pattern=pattern) if pattern.pads else described


@outside_torch_modes
def describe_plan(plan: Plan, *, head_dim: int, value_dim: int | None = None) -> Description:
    """Return the Description of an existing plan, without the zero keys of padding.

    head_dim: of queries and keys.
    value_dim: of values; None for `head_dim`.

    Raises ValueError for block lists over more than 134,217,728 queries or keys.
    """
    bound, most = plan.bound, max(plan.bound.num_queries, plan.bound.num_keys)
    listed = any(term.shape == "blocks" for option in plan.chosen for term in option.terms)
    if listed and most > MOST_DESCRIBED:
        raise ValueError(
            f"blocks are counted for at most {MOST_DESCRIBED} tokens (128M), as longer lists of blocks exceed the "
            f"memory; got {most}"
        )
    branches = tuple(
        BranchDescription(
            **sums_by_field([count_term(term) for term in options[0].terms]),
            pattern=options[0].branch,
            multiplicity=options[0].multiplicity,
            options=options,
        )
        for options in plan.options
    )
    sizes = {name: getattr(bound, name) for name in ("pattern", "num_queries", "num_keys", "num_heads")}
    sizes |= {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
    return Description(**sums_by_field(branches), **sizes, branches=branches, bound=bound)


def _branch_data(branch: BranchDescription) -> dict[str, Any]:
    chosen, *others = ({"layout": option.layout, "predicted_s": option.cost.seconds} for option in branch.options)
    counts = {name: getattr(branch, name) for name in ("multiplicity", *COUNT_FIELDS)}
    return {"pattern": repr(branch.pattern), **counts, "chosen": chosen, "others": others}


def _facts(counts: Description) -> list[tuple[str, str]]:
    tokens = f"{counts.num_queries:,} queries x {counts.num_keys:,} keys"
    facts = [
        ("size", f"{tokens} x {counts.num_heads} heads, head dim {counts.head_dim}"),
        ("density", f"{counts.density:.4%} of pairs, {counts.block_density:.4%} in blocks"),
        ("pairs", f"{counts.useful_pairs:,} useful, {counts.computed_pairs:,} computed: {counts.waste:.3f} to 1"),
        ("blocks", f"{counts.full_blocks:,} full, {counts.partial_blocks:,} partial"),
        ("FLOPs", f"{counts.forward_flops:.3e} forward, {counts.backward_flops:.3e} backward"),
        ("block lists", f"{counts.table_bytes:,} bytes"),
    ]
    if counts.order_gain is not None and counts.order_gain >= _LEAST_ORDER_GAIN:
        facts.append(("order", f"{counts.order_gain:.1f} times fewer blocks if sorted by reverse Cuthill-McKee order"))
    if counts.pattern.pads:
        facts.append(("zero keys", f"{counts.zero_keys:,} of padding, in the softmax besides the pairs"))
    if counts.is_self_attention:
        facts.append(("layers", _layers_text(counts.receptive_field())))
    return facts


def _layers_text(field: ReceptiveField) -> str:
    layers = f"{field.layers_at_least:,} layer{'' if field.layers_at_least == 1 else 's'}"
    if not field.exact:
        sample = f"from a sample of {len(field.tokens):,} of {field.num_tokens:,} tokens"
        return f"at least {layers} until the receptive field saturates, {sample}"
    return f"after {layers} the receptive field saturates" if field.layers_at_least else "no token reaches another"


def _branches_table(counts: Description) -> str:
    rows = [
        (
            shortened(repr(branch.pattern), _LONGEST_PATTERN),
            str(branch.multiplicity),
            f"{branch.useful_pairs / counts.all_pairs:.4%}",
            f"{branch.waste:.3f}",
            f"{branch.options[0].layout} ({seconds_text(branch.options[0].cost.seconds)})",
        )
        for branch in counts.branches
    ]
    headers = ("branch", "times", "density", "waste", "layout (predicted)")
    return tabulate(
        rows, headers, disable_numparse=True, maxcolwidths=[_PATTERN_WIDTH, None, None, None, _LAYOUT_WIDTH]
    )


def _heads_table(counts: Description) -> str:
    """Return a table of allowed pairs by head, with each branch's share if there are several branches.

    Heads with equal numbers for every branch share a line; the table has up to 24 such lines. "" if there is one
    distinct branch and all heads have equal rules.
    """
    branches, heads = counts.branch_shares, counts.heads
    if len(branches) == len(heads) == 1:
        return ""
    alike: dict[tuple[int, ...], list[int]] = {}
    for each in heads:
        alike.setdefault(each.branch_pairs, []).extend(each.heads)

    def row(name: str, pairs: Sequence[int]) -> tuple[str, ...]:
        of_branches = [_percent(own, sum(pairs)) for own in pairs] if len(branches) > 1 else []
        return name, f"{sum(pairs):,}", _percent(sum(pairs), counts.useful_pairs), *of_branches

    rows = [row(_numbers_text(sorted(numbers)), pairs) for pairs, numbers in list(alike.items())[:_MOST_LINES]]
    if len(branches) > 1 and len(alike) > 1:
        rows.append(row("all", [each.pairs for each in branches]))
    names = [f"branch {number}" for number in range(1, len(branches) + 1)] if len(branches) > 1 else []
    headers = ("heads", "pairs of each", "share of each", *names)
    table = tabulate(rows, headers, disable_numparse=True, colalign=("left", *("right",) * (len(headers) - 1)))
    more = len(alike) - _MOST_LINES
    return table if more <= 0 else f"{table}\n... and {more} more kinds of heads"


def _percent(part: float, whole: float) -> str:
    """Return part / whole in percent with two decimals; "> 99.99%" if a part below the whole would round to 100 %."""
    text = f"{part / max(whole, 1):.2%}"
    return "> 99.99%" if text == "100.00%" and part < whole else text


def _growth_table(counts: Description) -> str:
    """Return a table of the mean receptive field by layers; "" without self-attention or if the field never grows."""
    field = counts.receptive_field() if counts.is_self_attention else None
    if field is None or not field.growth:
        return ""
    rows = [
        (f"{layers:,}", f"{mean:,.1f}{'' if field.exact else f' +/- {error:,.1f}'}")
        for layers, mean, error in field.growth
    ]
    headers = ("layers", f"mean tokens reached{'' if field.exact else ' +/- standard error'}")
    return tabulate(rows, headers, disable_numparse=True, colalign=("right", "right"))


def _numbers_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, shortened, such as "0 to 7" or "0, 2, ..., 14"."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1 and len(numbers) > (2 if steps == {1} else 3):
        first, second, last = numbers[0], numbers[1], numbers[-1]
        return f"{first} to {last}" if steps == {1} else f"{first}, {second}, ..., {last}"
    shown = [str(number) for number in numbers[:8]]
    return ", ".join(shown + ["..."] * (len(numbers) > 8))
