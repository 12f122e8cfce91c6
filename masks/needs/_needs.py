"""Needs: exactly which keys some queries may attend to, without looking at pairs where the rule has a form."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from ..core import Expression, Pattern, Ranges, require_expression, require_int, union_of
from ._key_query import KeyQuery
from ._rewrites import rewritten
from ._search import searched_keys


def needed_keys(
    pattern: Expression, *, queries: Ranges, keys: Ranges, heads: Iterable[int], num_heads_global: int
) -> Ranges:
    """The positions among `keys` that some position of `queries` may attend to in some of these global heads.

    Exactly these: for a mixture those of any branch, and with run-time tensors those of any batch entry, whose
    values must be in place. The ranges do not overlap; the same arguments give the same ranges, in ascending order
    of their first positions. Raises ValueError for heads outside [0, num_heads_global), heads for which the pattern
    has no rule, and run-time tensors without values.
    """
    require_expression(pattern).check_heads(require_int("num_heads_global", num_heads_global, minimum=1))
    rules = rules_of_heads(pattern, heads, num_heads_global)
    return keys_of_any(
        KeyQuery((rule,), q, k, head, num_heads_global)
        for rule, head in rules.items()
        for q, k in product(queries, keys)
    )


def keys_of_any(questions: Iterable[KeyQuery]) -> Ranges:
    """The keys that answer any of these questions, as `needed_keys` gives them."""
    return union_of(found for wanted in questions for found in keys_seen(wanted))


def rules_of_heads(pattern: Expression, heads: Iterable[int], num_heads: int) -> dict[Pattern, int]:
    """The distinct rules of these heads, of all branches and batch entries, each with a head that follows it."""
    rules: dict[Pattern, int] = {}
    for head in heads:
        require_int("heads", head, minimum=0, maximum=num_heads - 1)
        for batch in range(pattern.num_entries()):
            for branch in pattern.entry(batch).branches():
                rules.setdefault(branch.for_head(head, num_heads), head)
    return rules


def keys_seen(wanted: KeyQuery) -> list[range]:
    """The answer as ranges that may overlap."""
    if wanted.is_empty:
        return []
    if not wanted.factors:
        return [wanted.keys]
    parts = rewritten(wanted)
    if parts is None:
        return searched_keys(wanted)
    return [keys for part, restored in parts for keys in restored(keys_seen(part))]
