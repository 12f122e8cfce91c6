"""A description as text, in tables that fit a terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ..core import seconds_text, shortened
from ._fitted_table import fitted_facts, fitted_table
from ._gaps import Gap

if TYPE_CHECKING:
    from ._describe import BranchDescription, Description

_MOST_LINES, _LONGEST_PATTERN = 24, 200
_PLUS_MINUS, _ERROR = " +/- ", " +/- standard error"


def description_text(counts: Description, columns: int) -> str:
    """Tables with lines of at most `columns` characters, or 30 if `columns` is smaller."""
    parts = [
        fitted_facts(_facts(counts), columns=columns),
        _how_computed(counts, columns),
        _heads(counts, columns),
        _multiplicity(counts, columns),
        _growth(counts, columns),
    ]
    return "\n\n".join(part for part in parts if part)


def _facts(counts: Description) -> list[tuple[str, str]]:
    tokens = f"{counts.num_queries:,} queries x {counts.num_keys:,} keys"
    blocks = f"{counts.full_blocks:,} full, {counts.partial_blocks:,} partial"
    facts = [
        ("size", f"{tokens} x {counts.num_heads} heads, head dim {counts.head_dim}"),
        ("density", f"{counts.density:.4%} of pairs, {counts.block_density:.4%} in blocks"),
        ("pairs", f"{counts.useful_pairs:,} useful, {counts.computed_pairs:,} computed: {counts.waste:.3f} to 1"),
        ("blocks", blocks),
        ("FLOPs", f"{counts.forward_flops:.3e} forward, {counts.backward_flops:.3e} backward"),
        ("block lists", f"{counts.table_bytes:,} bytes"),
    ]
    if counts.pattern.pads:
        facts.append(("zero keys", f"{counts.zero_keys:,} of padding, in the softmax besides the pairs"))
    return [*facts, *_gap_facts(counts), *_field_facts(counts)]


def _gap_facts(counts: Description) -> list[tuple[str, str]]:
    gaps = counts.gaps
    if gaps is None:
        return [("without keys", "not known: counting would take too long")]
    queries, keys = _gap(gaps.queries, "queries", counts.num_queries), _gap(gaps.keys, "keys", counts.num_keys)
    return [("without keys", queries), ("unused keys", keys)]


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


def _field_facts(counts: Description) -> list[tuple[str, str]]:
    if not counts.is_self_attention:
        return []
    field = counts.receptive_field()
    layers = f"{field.layers_at_least:,} layer{'' if field.layers_at_least == 1 else 's'}"
    if not field.exact:
        sample = f"from a sample of {len(field.tokens):,} of {field.num_tokens:,} tokens"
        return [("layers", f"at least {layers} until the receptive field saturates, {sample}")]
    saturated = f"after {layers} the receptive field saturates"
    return [("layers", saturated if field.layers_at_least else "no token reaches another")]


def _percent(part: float, whole: float) -> str:
    """Share with two decimals; only the whole is 100 %."""
    text = f"{part / max(whole, 1):.2%}"
    return "> 99.99%" if text == "100.00%" and part < whole else text


def _how_computed(counts: Description, columns: int) -> str:
    rows = [_row(branch, counts.all_pairs) for branch in counts.branches]
    headers = ("branch", "times", "density", "computed / useful", "layout (predicted)", "others (predicted)")
    return fitted_table(rows, headers, columns=columns)


def _row(branch: BranchDescription, all_pairs: int) -> tuple[str, ...]:
    chosen, *others = (f"{option.layout} ({seconds_text(option.cost.seconds)})" for option in branch.options)
    density = f"{branch.useful_pairs / all_pairs:.4%}"
    pattern = shortened(repr(branch.pattern), _LONGEST_PATTERN)
    return pattern, str(branch.multiplicity), density, f"{branch.waste:.3f}", chosen, ", ".join(others)


def _heads(counts: Description, columns: int) -> str:
    """Table of pairs by head, with each branch's share; empty for one branch and one kind of head."""
    branches, heads = counts.branch_shares, counts.heads
    if len(branches) == len(heads) == 1:
        return ""
    alike: dict[tuple[int, ...], list[int]] = {}
    for each in heads:
        alike.setdefault(each.branch_pairs, []).extend(each.heads)
    several = len(branches) > 1
    rows = [
        _shares(_listed(sorted(numbers)), sum(pairs), counts.useful_pairs, pairs if several else ())
        for pairs, numbers in list(alike.items())[:_MOST_LINES]
    ]
    if several and len(alike) > 1:
        rows.append(_shares("all", counts.useful_pairs, counts.useful_pairs, [each.pairs for each in branches]))
    names = [f"branch {number}" for number in range(1, len(branches) + 1)] if several else []
    headers = ("heads", "pairs of each", "share of each", *names)
    table = fitted_table(rows, headers, columns=columns, align=_right(len(headers) - 1))
    more = len(alike) - _MOST_LINES
    return table if more <= 0 else f"{table}\n... and {more} more kinds of heads"


def _shares(heads: str, pairs: int, all_pairs: int, of_branches: Sequence[int]) -> tuple[str, ...]:
    return heads, f"{pairs:,}", _percent(pairs, all_pairs), *(_percent(own, pairs) for own in of_branches)


def _multiplicity(counts: Description, columns: int) -> str:
    """Table of pairs by the number of branches that allow them; empty for one branch."""
    if sum(share.multiplicity for share in counts.branch_shares) == 1:
        return ""
    found, some = counts.multiplicity, max(counts.distinct_pairs, 1)
    rows = []
    for number, pairs in found.pairs.items():
        text = f"{pairs:,}" if found.exact else f"{pairs:.4g}{_PLUS_MINUS}{found.standard_errors[number]:.2g}"
        rows.append((str(number), text, _percent(pairs, some) if number else ""))
    headers = ("branches that allow a pair", f"pairs{'' if found.exact else _ERROR}", "share of allowed")
    table = fitted_table(rows, headers, columns=columns, align=_right(2))
    sample = f"Estimated from a sample of {found.queries:,} of {counts.num_queries:,} queries."
    return table if found.exact else f"{table}\n{fill(sample, columns)}"


def _growth(counts: Description, columns: int) -> str:
    """Table of mean receptive field by number of layers; empty without self-attention."""
    field = counts.receptive_field() if counts.is_self_attention else None
    if field is None or not field.growth:
        return ""
    rows = [
        (f"{layers:,}", f"{mean:,.1f}{'' if field.exact else f'{_PLUS_MINUS}{error:,.1f}'}")
        for layers, mean, error in field.growth
    ]
    headers = ("layers", f"mean tokens reached{'' if field.exact else _ERROR}")
    return fitted_table(rows, headers, columns=columns, align=("right",) * 2)


def _listed(numbers: Sequence[int]) -> str:
    """Ascending numbers as text; equally spaced ones by their ends."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1:
        first, second, last = numbers[0], numbers[1], numbers[-1]
        return f"{first} to {last}" if steps == {1} else f"{first}, {second}, ..., {last}"
    shown = [str(number) for number in numbers[:8]]
    return ", ".join(shown + ["..."] * (len(numbers) > 8))


def _right(columns: int) -> tuple[str, ...]:
    """Alignments of one left column and `columns` right ones."""
    return ("left", *("right",) * columns)


_COUNTS = ("useful_pairs", "computed_pairs", "full_blocks", "partial_blocks", "table_bytes")


def description_data(counts: Description) -> dict[str, Any]:
    """All numbers of a description, for JSON; None for unknown or undefined ones."""
    field, multiplicity = counts.receptive_field() if counts.is_self_attention else None, counts.multiplicity
    sizes = ("num_queries", "num_keys", "num_heads", "head_dim", "all_pairs", "zero_keys", "distinct_pairs")
    derived = ("density", "block_density", "forward_flops", "backward_flops")
    return {
        "pattern": repr(counts.pattern),
        **{name: getattr(counts, name) for name in (*sizes, *_COUNTS, *derived)},
        "distinct_pairs_exact": multiplicity.exact,
        "waste": counts.waste if counts.useful_pairs else None,
        "computed": [_computed(branch) for branch in counts.branches],
        "branches": [
            {"pattern": repr(each.pattern), "multiplicity": each.multiplicity, "useful_pairs": each.pairs}
            for each in counts.branch_shares
        ],
        "heads": [
            {"heads": list(each.heads), "pairs_per_head": each.pairs, "branch_pairs": list(each.branch_pairs)}
            for each in counts.heads
        ],
        "multiplicity": {
            "exact": multiplicity.exact,
            "queries": multiplicity.queries,
            "branches": [
                {"branches": number, "pairs": pairs, "standard_error": multiplicity.standard_errors[number]}
                for number, pairs in multiplicity.pairs.items()
            ],
        },
        "gaps": counts.gaps and asdict(counts.gaps),
        "receptive_field": field and field.to_data(),
    }


def _computed(branch: BranchDescription) -> dict[str, Any]:
    chosen, *others = ({"layout": option.layout, "predicted_s": option.cost.seconds} for option in branch.options)
    counts = {name: getattr(branch, name) for name in ("multiplicity", *_COUNTS)}
    return {"pattern": repr(branch.pattern), **counts, "chosen": chosen, "others": others}
