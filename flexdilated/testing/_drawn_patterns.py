"""Patterns that hypothesis draws: sets, LongNets and other mixtures, whole grids."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st

from ..masks import Mixture, Pattern
from ..masks.core._check import require_int
from . import _vocabulary
from ._drawn_leaves import whole_grids
from ._grammar import Grammar


def patterns(
    *, num_heads: int = 1, max_number: int = 24, depth: int = 2, max_positions: int = 128, closures: bool = False
) -> st.SearchStrategy[Pattern | Mixture]:
    """Set patterns and mixtures that can be bound to `num_heads` heads and to any number of tokens up to max_positions.

    All kinds there are, in compositions: windows, dilated and strided sets, chunks, global tokens and landmarks, random
    and listed blocks, neighbourhoods, LongNets. Queries and keys are the same tokens, or there are at least as many
    keys: a list of blocks may name a block beyond fewer, which is an error (`attention_sizes(pattern)` heeds it).

    max_number: the largest segment, stride, count and so on. depth: how many levels of `&`, `|`, `~`, `per_head`,
    `head_groups` and `blockwise` a set may have. max_positions: grids hold at least as many tokens. closures: functions
    too, as `masks.custom` takes them, which cannot be written down. They shrink towards `masks.causal()`.
    """
    return Grammar(num_heads, max_number, max_positions, closures).patterns(depth)


def set_patterns(
    *, num_heads: int = 1, max_number: int = 24, depth: int = 2, max_positions: int = 128, closures: bool = False
) -> st.SearchStrategy[Pattern]:
    """Patterns in which a pair is allowed or not; the arguments are those of `patterns`."""
    return Grammar(num_heads, max_number, max_positions, closures).sets(depth)


def mixtures(
    *, num_heads: int = 1, max_number: int = 24, max_positions: int = 128, closures: bool = False
) -> st.SearchStrategy[Pattern | Mixture]:
    """Multiset sums, in which a pair may count several times: LongNets, causal or cut by a set, and sums of two.

    A LongNet of one branch is a set. The arguments are those of `patterns`.
    """
    return Grammar(num_heads, max_number, max_positions, closures).mixtures()


def longnets(
    *, max_branches: int = 4, max_number: int = 24, heads: Literal["all", "grouped"] = "all"
) -> st.SearchStrategy[Pattern | Mixture]:
    """LongNet's branches of any segment lengths and rates, both rules of offsets; rates need not divide segments.

    heads="grouped" needs at least max_branches heads.
    """
    return Grammar(max_number=max_number).longnets(heads=heads, max_branches=max_branches)


def neighborhoods(*, max_tokens: int = 48) -> st.SearchStrategy[Pattern]:
    """Neighbourhoods on grids of 2 or 3 axes that hold up to max_tokens tokens, to be bound to all: `prod(p.grid)`."""
    return whole_grids(_vocabulary, require_int("max_tokens", max_tokens, minimum=1))
