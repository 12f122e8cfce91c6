"""Causal terms whose queries come after keys: the keys before all queries are seen whole, the others as a triangle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core import Every
from ...orders import Compact, Layout, Listed, Permutation
from ...patterns import Causal
from ._term import Term


def split_causal(terms: Sequence[Term]) -> tuple[Term, ...] | None:
    """The same pairs without block lists where the rule is causal; None if no term is of that kind."""
    parts = [_parts(term) for term in terms]
    if all(found is None for found in parts):
        return None
    return tuple(part for term, found in zip(terms, parts, strict=True) for part in (found or (term,)))


def _parts(term: Term) -> tuple[Term, ...] | None:
    if term.shape != "blocks" or term.rule != Causal() or term.weights is not None:
        return None
    q, k = _compact(term.q, term), _compact(term.k, term)
    if q is None or k is None or q.step != k.step or (q.folds > 1 and q.fold_stride != k.fold_stride):
        return None
    gaps = {
        q_start + term.q_offset - k_start - term.k_offset for q_start, k_start in zip(q.starts, k.starts, strict=True)
    }
    (gap, *others), seen = gaps, min(gaps) // q.step
    if others or gap % q.step or seen <= 0:
        return None
    before = replace(term, rule=Every(), shape="dense", q=q, k=replace(k, num_slots=min(seen, k.num_slots)))
    if seen >= k.num_slots:
        return (before,)
    # Keys after the last query are seen by none, and a triangle has as many keys as queries.
    if k.num_slots - seen < q.num_slots:
        return None
    starts = tuple(start + seen * k.step for start in k.starts)
    triangle = replace(term, shape="causal", q=q, k=replace(k, starts=starts, num_slots=q.num_slots))
    return before, triangle


def _compact(side: Permutation | Compact | Listed, term: Term) -> Compact | None:
    if isinstance(side, Layout) and side.is_natural:
        return Compact(term.heads, (0,) * len(term.heads), 1, side.num_slots, 1, side.num_slots)
    return side if isinstance(side, Compact) else None
