"""A description as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..core._spelling import shortened
from ._fitted_table import fitted_facts, fitted_table
from ._gaps import Gap
from ._receptive_field import ReceptiveField
from ._receptive_field_sample import FollowedTokens

if TYPE_CHECKING:
    from ._describe import BranchDescription, Description

_MOST_LINES, _LONGEST_PATTERN = 24, 200


def text_of(told: Description, *, columns: int) -> str:
    """Facts, how it is computed, and heads, multiplicities and the receptive field where they say more.

    Lines have at most so many characters.
    """
    parts = [
        fitted_facts(_facts(told), columns=columns),
        _how_computed(told, columns),
        _heads(told, columns),
        _multiplicity(told, columns),
        _growth(told, columns),
    ]
    return "\n\n".join(part for part in parts if part)


def _facts(told: Description) -> list[tuple[str, str]]:
    tokens = f"{told.num_queries:,} queries x {told.num_keys:,} keys"
    blocks = f"{told.full_blocks:,} full, {told.partial_blocks:,} partial"
    facts = [
        ("size", f"{tokens} x {told.num_heads} heads, head dim {told.head_dim}"),
        ("density", f"{told.density:.4%} of pairs, {told.block_density:.4%} in blocks"),
        ("pairs", f"{told.useful_pairs:,} useful, {told.computed_pairs:,} computed: {told.waste:.3f} to 1"),
        ("blocks", blocks),
        ("FLOPs", f"{told.forward_flops:.3e} forward, {told.backward_flops:.3e} backward"),
        ("block lists", f"{told.table_bytes:,} bytes"),
    ]
    return [*facts, *_gap_facts(told), *_field_facts(told)]


def _gap_facts(told: Description) -> list[tuple[str, str]]:
    gaps = told.gaps
    if gaps is None:
        return [("without keys", "not known: too little of the pattern repeats")]
    queries, keys = _gap(gaps.queries, "queries", told.num_queries), _gap(gaps.keys, "keys", told.num_keys)
    return [("without keys", queries), ("never seen", keys)]


def _gap(gap: Gap, tokens: str, number: int) -> str:
    if not gap.in_some_head:
        return f"no {tokens}"
    some = f"{gap.in_some_head:,} of {number:,} {tokens} in some head, such as {gap.first_in_some_head:,}"
    if not gap.in_every_head:
        return f"{some}; none in all heads"
    every = f"{gap.in_every_head:,} in all heads, such as {gap.first_in_every_head:,}"
    if gap.in_every_head == gap.in_some_head:
        return f"{gap.in_every_head:,} of {number:,} {tokens}, such as {gap.first_in_every_head:,}"
    return f"{some}; {every}"


def _field_facts(told: Description) -> list[tuple[str, str]]:
    if not told.is_self_attention:
        return []
    field = told.receptive_field()
    if isinstance(field, FollowedTokens):
        return [("layers", _followed(field))]
    facts = [("layers", _layers(field))]
    for tokens, never, first in (
        ("an earlier", field.never_earlier, field.first_never_earlier),
        ("a later", field.never_later, field.first_never_later),
    ):
        if first is not None:
            some = f"{_percent(never, field.earlier_pairs)} of pairs with {tokens} token"
            pair = f"{some}, such as {first[0]:,} with {first[1]:,}"
            facts.append(("never meet", f"all pairs with {tokens} token" if never == field.earlier_pairs else pair))
    return facts


def _percent(part: int, whole: int) -> str:
    """Two decimals, and nothing that is not all as 100 %."""
    text = f"{part / max(whole, 1):.2%}"
    return "> 99.99%" if text == "100.00%" and part < whole else text


def _layers(field: ReceptiveField) -> str:
    if field.slowest is None:
        return "no token hears of another"
    reached = "every earlier token" if not field.never_earlier else "all that they ever will"
    if not field.never_earlier and not field.never_later:
        reached = "every other token"
    token, other = field.slowest
    needs = f"token {token:,} needs them for token {other:,}" if field.layers > 1 else "more bring nothing"
    return f"after {_count(field.layers)} tokens have heard of {reached}; {needs}"


def _followed(field: FollowedTokens) -> str:
    tokens = ", ".join(f"{token:,}" for token in field.tokens)
    return f"at least {field.layers_at_least:,}, by what tokens {tokens} hear of; the others were not followed"


def _count(layers: int) -> str:
    return f"{layers:,} layer{'s' if layers != 1 else ''}"


def _how_computed(told: Description, columns: int) -> str:
    rows = [_row(branch, told.all_pairs) for branch in told.branches]
    headers = ("branch", "times", "density", "computed / useful", "layout (predicted ms)", "others (predicted ms)")
    return fitted_table(rows, headers, columns=columns)


def _row(branch: BranchDescription, all_pairs: int) -> tuple[str, ...]:
    chosen, *others = (f"{option.layout} ({option.cost.seconds * 1e3:.3g})" for option in branch.options)
    density = f"{branch.useful_pairs / all_pairs:.4%}"
    pattern = shortened(repr(branch.pattern), _LONGEST_PATTERN)
    return pattern, str(branch.multiplicity), density, f"{branch.waste:.3f}", chosen, ", ".join(others)


def _heads(told: Description, columns: int) -> str:
    """The pairs of each head, and the share of each branch in them; nothing where all heads and branches are one."""
    branches, heads = told.branch_shares, told.heads
    if len(branches) == len(heads) == 1:
        return ""
    alike: dict[tuple[int, ...], list[int]] = {}
    for each in heads:
        alike.setdefault(each.branch_pairs, []).extend(each.heads)
    several = len(branches) > 1
    rows = [
        _shares(_listed(sorted(numbers)), sum(pairs), told.useful_pairs, pairs if several else ())
        for pairs, numbers in list(alike.items())[:_MOST_LINES]
    ]
    if several and len(alike) > 1:
        rows.append(_shares("all", told.useful_pairs, told.useful_pairs, [each.pairs for each in branches]))
    names = [f"branch {number}" for number in range(1, len(branches) + 1)] if several else []
    headers = ("heads", "pairs of each", "share of each", *names)
    table = fitted_table(rows, headers, columns=columns, align=_right(len(headers) - 1))
    more = len(alike) - _MOST_LINES
    return table if more <= 0 else f"{table}\n... and {more} more kinds of heads"


def _shares(heads: str, pairs: int, all_pairs: int, of_branches: Sequence[int]) -> tuple[str, ...]:
    return heads, f"{pairs:,}", _percent(pairs, all_pairs), *(_percent(own, pairs) for own in of_branches)


def _multiplicity(told: Description, columns: int) -> str:
    """How many pairs how many branches allow, where there is more than one."""
    if sum(share.multiplicity for share in told.branch_shares) == 1:
        return ""
    if told.multiplicity is None:
        return "how many branches allow a pair is not known: too little of the pattern repeats"
    seen = max(told.distinct_pairs or 0, 1)
    rows = [
        (str(number), f"{pairs:,}", _percent(pairs, seen) if number else "")
        for number, pairs in told.multiplicity.items()
    ]
    headers = ("branches that allow a pair", "pairs", "share of allowed")
    return fitted_table(rows, headers, columns=columns, align=_right(2))


def _growth(told: Description, columns: int) -> str:
    field = told.receptive_field() if told.is_self_attention else None
    if not isinstance(field, ReceptiveField) or field.layers == 0:
        return ""
    rows = [
        (f"{layers:,}", f"{pairs / field.num_tokens:,.1f}", _percent(pairs, field.pairs))
        for layers, pairs in field.growth
    ]
    headers = ("layers", "tokens that one has heard of", "share of all it ever will")
    return fitted_table(rows, headers, columns=columns, align=("right",) * 3)


def _listed(numbers: Sequence[int]) -> str:
    """Ascending numbers: runs of one step as their ends."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1:
        first, second, last = numbers[0], numbers[1], numbers[-1]
        return f"{first} to {last}" if steps == {1} else f"{first}, {second}, ..., {last}"
    shown = [str(number) for number in numbers[:8]]
    return ", ".join(shown + ["..."] * (len(numbers) > 8))


def _right(columns: int) -> tuple[str, ...]:
    """The first column to the left, and so many others to the right."""
    return ("left", *("right",) * columns)
