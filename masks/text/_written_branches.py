"""How branches are written: runs of them as the `longnet` or the `per_document` that made them."""

from collections.abc import Sequence
from itertools import groupby

from ..core._algebra import And
from ..core._pattern import Pattern
from ..core._spelling import AND, CALL, SUM, Phrase, call, chain
from ..patterns._dilated import Dilated
from ..patterns._longnet import HEAD_RULES, OFFSET_RULES
from ..patterns._per_document import PerDocument


def mixture_phrase(parts: Sequence[Pattern]) -> Phrase:
    """The sum of the branches. `longnet(...) & set` is found again where neighbours share offset rule and set."""
    runs = [(origin, list(run)) for origin, run in groupby(parts, _origin)]
    return chain([term for origin, run in runs for term in _terms(origin, run)], SUM)


def head_groups_phrase(parts: Sequence[Pattern]) -> Phrase:
    """`longnet(..., heads="grouped")` where it made the groups, and the groups one by one otherwise."""
    rules = {part.offset if isinstance(part, Dilated) else None for part in parts}
    rule = rules.pop()
    if rules or not isinstance(rule, str):
        return call("head_groups", tuple(parts))
    return _longnet(rule, parts, heads=HEAD_RULES[1])


# What made a branch: the offset rule of `longnet` or the spans of `per_document`; and what came after by `&`.
_Origin = tuple[str | Pattern, tuple[Pattern, ...]] | None


def _origin(part: Pattern) -> _Origin:
    first, *rest = _factors(part)
    if isinstance(first, PerDocument):
        return first.spans, tuple(rest)
    if isinstance(first, Dilated) and isinstance(first.offset, str):
        return first.offset, tuple(rest)
    return None


def _terms(origin: _Origin, run: list[Pattern]) -> list[Phrase]:
    if origin is None:
        return [part.phrase() for part in run]
    made_by, rest = origin
    firsts = [_factors(part)[0] for part in run]
    if isinstance(made_by, str):
        start = _longnet(made_by, firsts)
    else:
        inner = mixture_phrase([first.part for first in firsts if isinstance(first, PerDocument)])
        start = Phrase(f"{inner.inside(CALL)}.per_document({made_by.phrase().text})")
    return [chain([start, *(factor.phrase() for factor in rest)], AND)]


def _longnet(offsets: str, branches: Sequence[Pattern], *, heads: str = HEAD_RULES[0]) -> Phrase:
    dilated = [branch for branch in branches if isinstance(branch, Dilated)]
    named = {} if offsets == OFFSET_RULES[0] else {"offsets": offsets}
    named |= {} if heads == HEAD_RULES[0] else {"heads": heads}
    return call("longnet", tuple(each.segment for each in dilated), tuple(each.rate for each in dilated), **named)


def _factors(part: Pattern) -> tuple[Pattern, ...]:
    return part.parts if isinstance(part, And) else (part,)
