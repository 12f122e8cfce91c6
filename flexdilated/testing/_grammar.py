"""How drawn patterns are composed: sets of leaves, LongNets and mixtures, in the words of some vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from hypothesis import strategies as st

from ..masks.core._check import require_bool, require_int
from . import _drawn_leaves, _vocabulary
from ._any_of import any_of

# The simplest comes first: hypothesis shrinks towards it.
_COMPOSITIONS = ("leaf", "and", "or", "not", "blockwise", "per_head", "LongNet", "groups", "and", "not")


@dataclass(frozen=True)
class Grammar:
    """What may be drawn: patterns for so many heads, of numbers up to `max_number`, bound up to `max_positions`.

    words: what has the constructors; `_vocabulary` says what else it may be.
    """

    num_heads: int = 1
    max_number: int = 24
    max_positions: int = 128
    closures: bool = False
    words: Any = _vocabulary

    def __post_init__(self) -> None:
        for name in ("num_heads", "max_number", "max_positions"):
            require_int(name, getattr(self, name), minimum=1)
        require_bool("closures", self.closures)

    def leaves(self) -> st.SearchStrategy:
        """Sets without parts."""
        return _sets(self, 0)

    def sets(self, depth: int = 2) -> st.SearchStrategy:
        """Sets, composed up to `depth` levels deep."""
        return _sets(self, require_int("depth", depth, minimum=0))

    def longnets(self, *, heads: Literal["all", "grouped"] = "all", max_branches: int = 4) -> st.SearchStrategy:
        """LongNet's branches, joined in every head, or one for each group of heads."""
        return _longnets(self, heads, require_int("max_branches", max_branches, minimum=1))

    def mixtures(self) -> st.SearchStrategy:
        """LongNets, sums, and sums of LongNets and sets."""
        return _mixtures(self)

    def patterns(self, depth: int = 2) -> st.SearchStrategy:
        """Sets, and somewhat less often mixtures."""
        sets, mixtures = self.sets(depth), self.mixtures()
        return any_of(sets, mixtures, sets, mixtures, sets)


# Hypothesis looks through a strategy when it is first drawn from: one is made, not one a draw.
@lru_cache(maxsize=64)
def _sets(grammar: Grammar, depth: int) -> st.SearchStrategy:
    if depth:
        return _composed(grammar, depth)
    limits = {"largest": grammar.max_number, "max_positions": grammar.max_positions, "closures": grammar.closures}
    return _drawn_leaves.leaves(grammar.words, **limits)


@st.composite
def _composed(draw: st.DrawFn, grammar: Grammar, depth: int) -> Any:
    words, part = grammar.words, grammar.sets(depth - 1)
    kind = draw(st.sampled_from(_COMPOSITIONS))
    if kind == "leaf":
        return draw(grammar.leaves())
    if kind == "and":
        return draw(part) & draw(part)
    if kind == "or":
        return draw(part) | draw(part)
    if kind == "not":
        return ~draw(part)
    if kind == "blockwise":
        return words.blockwise(draw(part), draw(st.integers(1, min(6, grammar.max_number))))
    if kind == "per_head":
        return words.per_head([draw(part) for _ in range(grammar.num_heads)])
    if kind == "LongNet":
        return draw(grammar.longnets(heads="grouped", max_branches=grammar.num_heads))
    return words.head_groups([draw(part) for _ in range(draw(st.integers(1, grammar.num_heads)))])


@st.composite
def _longnets(draw: st.DrawFn, grammar: Grammar, heads: str, max_branches: int) -> Any:
    branch = st.tuples(st.integers(1, grammar.max_number), _drawn_leaves.rates_up_to(grammar.max_number))
    branches = draw(st.lists(branch, min_size=1, max_size=max_branches))
    segments, rates = zip(*branches, strict=True)
    offsets = draw(st.sampled_from(_drawn_leaves.OFFSET_RULES))
    return grammar.words.longnet(segments, rates, offsets=offsets, heads=heads)


@st.composite
def _mixtures(draw: st.DrawFn, grammar: Grammar) -> Any:
    kind = draw(st.sampled_from(["set", "LongNet", "LongNet", "masked LongNet"]))
    first = draw(grammar.sets(1) if kind == "set" else grammar.longnets())
    if kind == "masked LongNet":
        mask = draw(any_of(st.builds(grammar.words.causal), grammar.sets(1)))
        first = first & mask if draw(st.booleans()) else mask & first
    if kind != "set" and draw(st.booleans()):
        return first
    return first + (draw(grammar.sets(1)) if draw(st.booleans()) else first)
