"""How drawn patterns are composed: sets of leaves, LongNets and mixtures, in the words of some vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import strategies as st

from ..masks._check import require_bool, require_int
from . import _drawn_leaves, _vocabulary

# The simplest comes first: hypothesis shrinks towards it.
_COMPOSITIONS = ("leaf", "leaf", "and", "or", "not", "blockwise", "per_head", "groups")


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
        limits = {"largest": self.max_number, "max_positions": self.max_positions, "closures": self.closures}
        return _drawn_leaves.leaves(self.words, **limits)

    def sets(self, depth: int = 2) -> st.SearchStrategy:
        """Sets, composed up to `depth` levels deep."""
        return self.leaves() if require_int("depth", depth, minimum=0) == 0 else _composed(self, depth)

    def longnets(self, *, heads: Literal["all", "grouped"] = "all", max_branches: int = 4) -> st.SearchStrategy:
        """LongNet's branches, joined in every head, or one for each group of heads."""
        return _longnets(self, heads, max_branches)

    def mixtures(self) -> st.SearchStrategy:
        """LongNets, sums, and sums of LongNets and sets."""
        return _mixtures(self)

    def patterns(self, depth: int = 2) -> st.SearchStrategy:
        """Sets and mixtures."""
        return st.one_of(self.sets(depth), self.mixtures())


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
    if draw(st.booleans()):
        return draw(grammar.longnets(heads="grouped", max_branches=grammar.num_heads))
    # A pattern without a rule for each head: groups are larger than one head as a rule.
    one = replace(grammar, num_heads=1).sets(depth - 1) if grammar.num_heads > 1 else part
    return words.head_groups([draw(one) for _ in range(draw(st.integers(1, grammar.num_heads)))])


@st.composite
def _longnets(draw: st.DrawFn, grammar: Grammar, heads: str, max_branches: int) -> Any:
    branch = st.tuples(st.integers(1, grammar.max_number), _drawn_leaves.rates_up_to(grammar.max_number))
    branches = draw(st.lists(branch, min_size=1, max_size=require_int("max_branches", max_branches, minimum=1)))
    segments, rates = zip(*branches, strict=True)
    offsets = draw(st.sampled_from(_drawn_leaves.OFFSET_RULES))
    return grammar.words.longnet(segments, rates, offsets=offsets, heads=heads)


@st.composite
def _mixtures(draw: st.DrawFn, grammar: Grammar) -> Any:
    if draw(st.booleans()):
        first = draw(grammar.longnets())
        if draw(st.booleans()):
            mask = draw(st.one_of(st.builds(grammar.words.causal), grammar.sets(1)))
            first = first & mask if draw(st.booleans()) else mask & first
        if draw(st.booleans()):
            return first
    else:
        first = draw(grammar.sets(1))
    return first + (draw(grammar.sets(1)) if draw(st.booleans()) else first)
