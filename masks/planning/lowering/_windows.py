"""Lowering by run-time tensors: a branch as terms inside each document, padded sequence or run of consecutive keys.

Such windows with equal rules are folds of the same terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Literal

import torch

from ...core import And, Bound, Every, Expression, HeadGroups, Mixture, Or, Pattern, PerHead
from ...patterns import PADDING, Causal, KeySet, LocalWindow, PerDocument, Spans, Table, Windows, tables
from ._layouts import compact_terms, shared_terms
from ._term import Term

_ENOUGH_SLOTS = 4096  # of all heads: larger windows are read in place, as a call costs less than their copies
_WORTH_WEIGHING = 1024  # tokens of a window: in smaller ones options differ by less than the cost of comparing them
_MOST_LISTS = 32  # block lists, each planned separately: more than this cost more than one over all tokens

CheapestTerms = Callable[[Pattern, Bound], Sequence[Term]]  # terms of a rule over a part, by its cheapest option


def split_into_windows(branch: Pattern, bound: Bound) -> tuple[Pattern, Windows] | None:
    """Return (rule, windows): a branch as a rule inside the disjoint windows, such as documents, of a run-time tensor.

    The windows are clipped to the queries and keys of `bound`. None if `_factorizations` splits off no run-time tensor
    with a list of windows.
    """
    for split in _factorizations(branch):
        windows = split.table.windows(bound.num_positions)
        if windows is not None:
            windows = windows.from_start() if split.origin == "document" else windows
            queries = range(bound.q_offset, bound.q_offset + bound.num_queries)
            keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
            return split.rest, windows.within(queries, keys)
    return None


def rule_over_all_tokens(rest: Pattern, windows: Windows, bound: Bound) -> Pattern | None:
    """Return `rest`, the rule inside windows, as a rule over all tokens, simplified for the positions of `bound`.

    None unless there is a single window, its origin is position 0, and it contains all queries and keys. If the rule is
    periodic, the first query or key must be in its first period, too.
    """
    if len(windows) != 1:
        return None
    rest, part = _rule_of_first_window(rest, bound, windows)
    return rest if part == replace(bound, pattern=rest) else None


def window_terms(
    rest: Pattern,
    windows: Windows,
    multiplicity: int,
    bound: Bound,
    cheapest_terms: CheapestTerms,
    *,
    any_number: bool = False,
) -> list[Term] | None:
    """Return terms that compute the rule `rest` inside each window; None if there are too many kinds of windows.

    The windows of a kind have equal sizes and equal masks (see `Windows.kinds`), and so the same terms, as folds.

    multiplicity: number of times that each pair counts.
    cheapest_terms: function that returns the terms of a rule in a window of over 1024 tokens, chosen by cost.
    any_number: True for no limits. Otherwise at most `_MOST_LISTS` kinds may need block lists, and the number of all
        kinds may be at most `_MOST_LISTS` plus the largest possible number of distinct window lengths.
    """
    kinds = windows.kinds(rest.period())
    if len(kinds) > _MOST_LISTS + isqrt(2 * max(bound.num_queries, bound.num_keys)) and not any_number:
        return None
    terms: list[Term] = []
    lists = 0
    for index in kinds:
        alike = windows.select(index)
        plainest, part = _rule_of_first_window(rest, bound, alike)
        if max(part.num_queries, part.num_keys) > _WORTH_WEIGHING:
            lowered = cheapest_terms(plainest, part)
        else:
            lowered = _terms_of_small_window(plainest, multiplicity, part, cheapest_terms, any_number=any_number)
        lists += any(term.shape == "blocks" for term in lowered)
        if lists > _MOST_LISTS and not any_number:
            return None
        for some in _fold_groups(alike, bound.num_heads):
            moves = some.q_start - bound.q_offset, some.k_start - bound.k_offset
            terms += [term.repeated(*moves) for term in lowered]
    return terms


_Origin = Literal["document", "sequence", "any"]


@dataclass(frozen=True)
class _Factorization:
    """A rule as the intersection of `rest` and the pairs that a run-time tensor `table` allows.

    origin: where `rest` counts positions from: the start of a document, or that of the sequence; "any" if both give
        equal masks.
    """

    rest: Pattern
    table: Table
    origin: _Origin

    def intersected_with(self, others: Sequence[Pattern]) -> _Factorization | None:
        """Return the intersection with `others`, rules that count positions from 0.

        None if `rest` counts positions from the start of a document and a rule in `others` may depend on more than
        the distance of query and key.
        """
        origin: _Origin = self.origin
        if any(each.period() != 1 for each in others):
            if origin == "document":
                return None
            origin = "sequence"
        parts = (each for each in (self.rest, *others) if each != Every())
        return replace(self, rest=And.of(*parts), origin=origin)


def _factorizations(rule: Pattern) -> Iterator[_Factorization]:
    """Yield ways to write a rule as the intersection of a run-time tensor's rule and a rest.

    A tensor that is a factor of every part of a union, or of every head's rule, can be split off, too.
    """
    if isinstance(rule, Table):
        yield _Factorization(Every(), rule, "any")
    elif isinstance(rule, PerDocument) and isinstance(rule.spans, Spans):
        yield _Factorization(rule.part, rule.spans, "any" if rule.part.period() == 1 else "document")
    elif isinstance(rule, And):
        for part in rule.parts:
            others = [each for each in rule.parts if each != part]
            yield from (
                found for split in _factorizations(part) if (found := split.intersected_with(others)) is not None
            )
    elif isinstance(rule, Or | PerHead | HeadGroups):
        of_parts = [{split.table: split for split in _factorizations(part)} for part in rule.parts]
        for table in of_parts[0]:
            splits = [of_part[table] for of_part in of_parts if table in of_part]
            origins: set[_Origin] = {split.origin for split in splits if split.origin != "any"}
            if len(splits) == len(of_parts) and len(origins) <= 1:
                rest = _with_parts(rule, tuple(split.rest for split in splits))
                yield _Factorization(rest, table, next(iter(origins)) if origins else "any")


def _with_parts(rule: Or | PerHead | HeadGroups, parts: tuple[Pattern, ...]) -> Pattern:
    if not isinstance(rule, Or):
        return type(rule)(parts)
    return Every() if Every() in parts else Or.of(*parts)


def _rule_of_first_window(rest: Pattern, bound: Bound, windows: Windows) -> tuple[Pattern, Bound]:
    """Return (rule, bound): `rest` simplified for the positions of the first window, and this rule bound to the window.

    The bound has the window's numbers of queries and keys. Its offsets are counted from the window's origin, less the
    whole periods of `rest` between the origin and the window.
    """
    first = windows.select(slice(1))
    origin = int(first.counted_from(rest.period()))
    q, k = (range(int(a), int(b)) for a, b in ((first.q_start, first.q_stop), (first.k_start, first.k_stop)))
    sizes = {"num_queries": len(q), "num_keys": len(k), "q_offset": q.start - origin, "k_offset": k.start - origin}
    plainest = _simplify_local_windows(rest, q, k)
    return plainest, replace(bound, pattern=plainest, **sizes)


def _simplify_local_windows(rest: Pattern, q: range, k: range) -> Pattern:
    """Return the rule with its `LocalWindow` factors, which would need block lists, simplified for these positions.

    Factors that allow all pairs are dropped; those that forbid only keys after the query become causal order.

    q, k: positions of the queries and keys.
    """
    kept = []
    for factor in rest.factors():
        if isinstance(factor, LocalWindow) and factor.left >= q.stop - 1 - k.start:
            if factor.right >= k.stop - 1 - q.start:
                continue
            if factor.right == 0:
                factor = Causal()
        kept.append(factor)
    return And.of(*kept)


def _terms_of_small_window(
    rest: Pattern, multiplicity: int, part: Bound, cheapest_terms: CheapestTerms, *, any_number: bool
) -> Sequence[Term]:
    """Return the terms of the rule `rest` in a small window, chosen without comparing costs.

    They are the terms of windows inside this window, if `window_terms` returns them; else `compact_terms`, if the rule
    has them; else one term over all tokens in natural order.
    """
    split = split_into_windows(rest, part)
    terms = None if split is None else window_terms(*split, multiplicity, part, cheapest_terms, any_number=any_number)
    if terms is None:
        terms = compact_terms(rest, multiplicity, part)
    return shared_terms(rest, multiplicity, part, 1) if terms is None else terms


def _fold_groups(alike: Windows, num_heads: int) -> Iterator[Windows]:
    """Yield groups of these equal windows; the windows of a group are folds of the same terms.

    There is a single group, or, for large windows at uneven distances, one group for each window.
    """
    if len(alike) == 1:
        yield alike
        return
    starts = alike.q_start
    uneven = bool((starts.diff() != starts.diff()[:1]).any())
    length = max(int(alike.q_stop[0] - starts[0]), int(alike.k_stop[0] - alike.k_start[0]))
    if uneven and length * num_heads >= _ENOUGH_SLOTS:
        yield from (alike.select(slice(index, index + 1)) for index in range(len(alike)))
    else:
        yield alike


def rule_of_joined_entries(pattern: Expression, num_tokens: int, batch: int) -> Any:
    """Return one rule for all batch entries joined to a single sequence, in which run-time documents separate them.

    None if a branch has no run-time documents, or has a factor, other than documents and a `KeySet`, that does not
    repeat from entry to entry.

    num_tokens: tokens of each entry.
    batch: number of entries.
    """
    if not all(_can_be_joined(branch, num_tokens) for branch in pattern.branches()):
        return None

    def joined(leaf: Pattern) -> Pattern:
        if not isinstance(leaf, Table):
            return leaf
        rows = leaf.rows.expand(batch, -1)
        if isinstance(leaf, Spans):
            rows = torch.where(rows == PADDING, PADDING, rows + torch.arange(batch)[:, None] * num_tokens)
        return type(leaf).of(rows.reshape(1, -1), leaf.reach)

    return pattern.map_leaves(joined)


def without_scattered_keys(pattern: Expression) -> tuple[Expression, KeySet] | None:
    """Return (the pattern without a run-time set of scattered allowed keys, this set); None if there is no such set.

    The set is a factor of all branches, and has the rows of all batch entries.
    """
    of_branches = [{split.table: split.rest for split in _factorizations(branch)} for branch in pattern.branches()]
    for table in of_branches[0]:
        if isinstance(table, KeySet) and all(table in found for found in of_branches) and table.are_scattered:
            return Mixture.of(*(found[table] for found in of_branches)), table
    return None


def _can_be_joined(branch: Pattern, num_tokens: int) -> bool:
    spans = [factor for factor in branch.factors() if isinstance(factor, Spans | PerDocument)]
    rest = [factor for factor in branch.factors() if not isinstance(factor, Spans | KeySet | PerDocument)]
    return bool(spans) and all(_repeats(factor, num_tokens) for factor in rest)


def _repeats(factor: Pattern, num_tokens: int) -> bool:
    period = None if tables(factor) else factor.period()
    return period is not None and num_tokens % period == 0
