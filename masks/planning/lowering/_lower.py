"""Shared lowering: a branch as one term for all heads, in the natural order or in residue-major order."""

from __future__ import annotations

from ...core import Bound, Every, Pattern
from ...orders import Layout
from ...patterns import Causal
from ._term import Shape, Term


def shared_terms(branch: Pattern, multiplicity: int, bound: Bound, rate: int) -> list[Term]:
    """One term for all heads, in residue-major order of this rate; rate 1 is the natural order."""
    aligned = rate == 1 and bound.q_offset == bound.k_offset
    shape: Shape = "dense" if branch == Every() else "causal" if branch == Causal() and aligned else "blocks"
    return [
        Term(
            branch,
            shape,
            multiplicity,
            tuple(range(bound.num_heads)),
            bound.head_offset,
            bound.num_heads_global,
            Layout(bound.num_queries, rate),
            Layout(bound.num_keys, rate),
            bound.q_offset,
            bound.k_offset,
        )
    ]
