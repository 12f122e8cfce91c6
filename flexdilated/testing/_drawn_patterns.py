"""Patterns that hypothesis draws: leaves, compositions of them, LongNets and other mixtures."""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st

from .. import masks
from ..masks import Mixture, Pattern
from ..masks._check import require_int

# The simplest comes first: hypothesis shrinks towards it.


def patterns(*, num_heads: int = 1, max_number: int = 24, depth: int = 2) -> st.SearchStrategy[Pattern | Mixture]:
    """Set patterns and mixtures that can be bound to `num_heads` heads and to any number of tokens.

    max_number: the largest segment, stride, count and so on. depth: how many levels of `&`, `|`, `~`, `per_head`
    and `blockwise` a set may have. They shrink towards `masks.causal()`.
    """
    options = {"num_heads": num_heads, "max_number": max_number}
    return st.one_of(set_patterns(**options, depth=depth), mixtures(**options))


def set_patterns(*, num_heads: int = 1, max_number: int = 24, depth: int = 2) -> st.SearchStrategy[Pattern]:
    """Patterns in which a pair is allowed or not."""
    require_int("num_heads", num_heads, minimum=1)
    require_int("max_number", max_number, minimum=1)
    require_int("depth", depth, minimum=0)
    leaves = _leaves(max_number)
    if depth == 0:
        return leaves
    inner = st.deferred(lambda: set_patterns(num_heads=num_heads, max_number=max_number, depth=depth - 1))
    pairs = st.tuples(inner, inner)
    composed = [
        pairs.map(lambda parts: parts[0] & parts[1]),
        pairs.map(lambda parts: parts[0] | parts[1]),
        inner.map(lambda part: ~part),
        st.builds(masks.blockwise, inner, st.integers(1, min(6, max_number))),
        st.lists(inner, min_size=num_heads, max_size=num_heads).map(masks.per_head),
        longnets(max_branches=num_heads, max_number=max_number, heads="grouped"),
    ]
    return st.one_of(leaves, leaves, *composed)


def mixtures(*, num_heads: int = 1, max_number: int = 24) -> st.SearchStrategy[Pattern | Mixture]:
    """Multiset sums, in which a pair may count several times; a LongNet of one branch is a set."""
    sets = partial(set_patterns, num_heads=num_heads, max_number=max_number)
    ladders = longnets(max_number=max_number)
    masked = st.one_of(st.just(masks.causal()), sets(depth=1))
    return st.one_of(
        sets(depth=1).map(lambda pattern: pattern + pattern),
        st.builds(lambda a, b: a + b, sets(depth=1), sets(depth=1)),
        ladders,
        st.builds(lambda ladder, mask: ladder & mask, ladders, masked),
    )


@st.composite
def longnets(draw: st.DrawFn, *, max_branches: int = 4, max_number: int = 24, heads: str = "all") -> Pattern | Mixture:
    """LongNet's branches of any segment lengths and rates, both rules of offsets; rates need not divide segments."""
    branch = st.tuples(st.integers(1, max_number), st.integers(1, min(7, max_number)))
    branches = draw(st.lists(branch, min_size=1, max_size=max_branches))
    segments, rates = zip(*branches, strict=True)
    offsets = draw(st.sampled_from(["interleaved", "contiguous"]))
    return masks.longnet(segments, rates, offsets=offsets, heads=heads)


def _leaves(largest: int) -> st.SearchStrategy[Pattern]:
    number, few = st.integers(1, largest), st.integers(0, min(8, largest))
    rate = st.integers(1, min(7, largest))
    sides = st.sampled_from([{}, {"columns": False}, {"rows": False}])
    return st.one_of(
        st.just(masks.causal()),
        st.builds(_window, few, few),
        st.builds(_dilated_window, few, few, rate),
        _dilated(number, rate),
        st.builds(masks.chunked, number),
        st.builds(masks.strided, number),
        _fixed(largest),
        st.builds(lambda count, options: masks.global_tokens(count, **options), number, sides),
        st.builds(masks.first_tokens, number),
        st.builds(masks.prefix_lm, number),
        st.builds(
            lambda stride, options: masks.landmark_tokens(stride, **options), st.integers(2, max(2, largest)), sides
        ),
    )


def _window(left: int, right: int) -> Pattern:
    return masks.local_window(left=left, right=right)


def _dilated_window(left: int, right: int, rate: int) -> Pattern:
    return masks.dilated_window(left=left, right=right, rate=rate)


@st.composite
def _dilated(draw: st.DrawFn, segments: st.SearchStrategy[int], rates: st.SearchStrategy[int]) -> Pattern:
    segment, rate = draw(segments), draw(rates)
    return masks.dilated(segment, rate, draw(st.integers(0, rate - 1)))


@st.composite
def _fixed(draw: st.DrawFn, largest: int) -> Pattern:
    stride = draw(st.integers(1, largest))
    return masks.fixed(stride, summary=draw(st.integers(1, stride)))
