"""A pattern with selected blocks as two rules that share no pair: what the table may add, and what is there without."""

from __future__ import annotations

from dataclasses import dataclass

from ...core import And, Every, Expression, Mixture, Or, Pattern
from ._selected_blocks import SelectedBlocks


@dataclass(frozen=True)
class Selection:
    """Pairs of `others`, with their multiplicity, and pairs that both the table and `rest` allow; a pair is in one."""

    leaf: SelectedBlocks
    rest: Pattern
    others: Expression | None


def selection_of(pattern: Expression) -> Selection | None:
    """How the pattern is parted, where one table of selected blocks takes part by `|`, `&` and `+` alone."""
    branches = pattern.branches()
    chosen = [index for index, branch in enumerate(branches) if _uses(branch)]
    if len(chosen) != 1:
        return None
    own = _parted(branches[chosen[0]])
    if own is None:
        return None
    beside = [
        *branches[: chosen[0]],
        *([] if own.others is None else own.others.branches()),
        *branches[chosen[0] + 1 :],
    ]
    return Selection(own.leaf, own.rest, Mixture.of(*beside) if beside else None)


def _uses(pattern: Pattern) -> int:
    return sum(isinstance(leaf, SelectedBlocks) for leaf in pattern.leaves())


def _parted(pattern: Pattern) -> Selection | None:
    if isinstance(pattern, SelectedBlocks):
        return Selection(pattern, Every(), None)
    if not isinstance(pattern, And | Or):
        return None
    own = [part for part in pattern.direct_parts() if _uses(part)]
    if len(own) != 1 or (inner := _parted(own[0])) is None:
        return None
    beside = type(pattern).of(*(part for part in pattern.direct_parts() if part is not own[0]))
    rest, others = inner.rest, inner.others
    assert others is None or isinstance(others, Pattern)
    if isinstance(pattern, Or):
        return Selection(inner.leaf, _both(rest, ~beside), beside if others is None else Or.of(others, beside))
    return Selection(inner.leaf, _both(rest, beside), None if others is None else And.of(others, beside))


def _both(first: Pattern, second: Pattern) -> Pattern:
    return second if first == Every() else And.of(first, second)
