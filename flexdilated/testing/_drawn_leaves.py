"""Patterns without parts that hypothesis draws, kind by kind, in the words of some vocabulary."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import strategies as st

from ._any_of import any_of

# words: what has the constructors, such as `_vocabulary`. largest: of the numbers that a pattern is written with.
# The simplest comes first: hypothesis shrinks towards it.

OFFSET_RULES = ("interleaved", "contiguous")
_SIDES = ((True, True), (True, False), (False, True))  # rows, columns


def leaves(words: Any, *, largest: int, max_positions: int, closures: bool) -> st.SearchStrategy:
    """Of every kind: dilated sets, which most of the library is about, most often, causal order least."""
    kinds = [
        windows(words, largest),
        strided_kinds(words, largest),
        dilated_windows(words, largest),
        landmarks(words, largest),
        dilated(words, largest),
        global_kinds(words, largest),
        random_blocks(words, largest),
        block_lists(words, largest),
        neighborhoods(words, max_positions),
        *[functions(words, largest)] * closures,
    ]
    return any_of(st.builds(words.causal), *kinds, *kinds, *[dilated(words, largest)] * 6)


def rates_up_to(largest: int) -> st.SearchStrategy[int]:
    """Dilation rates, kept small: with one above the tokens nothing happens."""
    return st.integers(1, min(7, largest))


def windows(words: Any, largest: int) -> st.SearchStrategy:
    """Local windows, one-sided and empty sides too."""
    reach = st.integers(0, min(8, largest))
    return st.builds(lambda left, right: words.local_window(left=left, right=right), reach, reach)


def dilated_windows(words: Any, largest: int) -> st.SearchStrategy:
    """Windows with steps."""
    reach = st.integers(0, min(5, largest))
    return st.builds(
        lambda left, right, rate: words.dilated_window(left=left, right=right, rate=rate),
        *(reach, reach, rates_up_to(largest)),
    )


@st.composite
def dilated(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """One dilated set, with a fixed offset or one of the two rules of heads."""
    segment, rate = draw(st.integers(1, largest)), draw(rates_up_to(largest))
    offset = draw(st.sampled_from(["fixed", *OFFSET_RULES, "interleaved"]))
    if offset == "fixed":
        return words.dilated(segment, rate, draw(st.integers(0, rate - 1)))
    return words.longnet([segment], [rate], offsets=offset, heads="grouped")


@st.composite
def strided_kinds(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """The Sparse Transformer's two kinds, and chunks."""
    kind, stride = draw(st.sampled_from(["strided", "chunked", "fixed"])), draw(st.integers(1, largest))
    if kind == "fixed":
        return words.fixed(stride, summary=draw(st.integers(1, stride)))
    return words.strided(stride) if kind == "strided" else words.chunked(stride)


@st.composite
def global_kinds(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Global tokens in rows, columns or both, and prefixes."""
    kind = draw(st.sampled_from(["global", "first", "prefix"]))
    count = draw(st.integers(1, largest))
    if kind == "first":
        return words.first_tokens(count)
    if kind == "prefix":
        return words.prefix_lm(count)
    rows, columns = draw(st.sampled_from(_SIDES))
    return words.global_tokens(count, rows=rows, columns=columns)


@st.composite
def landmarks(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Landmarks in rows, columns or both; one at every position makes all pairs."""
    stride, (rows, columns) = draw(st.integers(1, largest)), draw(st.sampled_from(_SIDES))
    if stride == 1 and rows and columns:
        return words.every()
    return words.landmark_tokens(stride, rows=rows, columns=columns)


@st.composite
def random_blocks(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Over fewer or more tokens than will be there."""
    num_tokens, block = draw(st.integers(1, 4 * largest)), draw(st.integers(1, min(9, largest)))
    count = draw(st.integers(1, min(4, -(-num_tokens // block))))
    seed = draw(st.sampled_from([0, 1, (1 << 63) - 1]))
    return words.random_blocks(num_tokens, block=block, count=count, seed=seed)


@st.composite
def block_lists(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Rows name blocks up to their own: in range wherever queries and keys are the same tokens."""
    block, height = draw(st.integers(1, min(7, largest))), draw(st.integers(1, min(12, largest)))
    return words.block_list(
        [sorted(draw(st.sets(st.integers(0, row), max_size=6))) for row in range(height)], block=block
    )


@st.composite
def neighborhoods(draw: st.DrawFn, words: Any, min_tokens: int) -> Any:
    """Grids of 1 to 3 axes with at least so many tokens: beyond a grid's tokens it cannot be bound."""
    inner = draw(st.lists(st.integers(1, 8), max_size=2))
    grid = (-(-min_tokens // prod(inner)) + draw(st.integers(0, 3)), *inner)
    return draw(_neighborhoods_on(words, grid, most=4, max_rate=3))


@st.composite
def whole_grids(draw: st.DrawFn, words: Any, max_tokens: int) -> Any:
    """Small grids of 2 or 3 axes, for which as many tokens as they hold are meant: windows may reach over an axis."""
    sides = st.lists(st.integers(1, 7), min_size=2, max_size=3)
    grid = draw(sides.filter(lambda grid: prod(grid) <= max_tokens))
    return draw(_neighborhoods_on(words, grid, most=max(grid), max_rate=2))


@st.composite
def _neighborhoods_on(draw: st.DrawFn, words: Any, grid: list[int] | tuple[int, ...], most: int, max_rate: int) -> Any:
    rate = [draw(st.integers(1, min(max_rate, length))) for length in grid]
    longest = [min(most, (length // each - 1) // 2) for length, each in zip(grid, rate, strict=True)]
    return words.neighborhood(grid, [draw(st.integers(0, reach)) for reach in longest], rate=rate)


@st.composite
def functions(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Closures, as `masks.custom` takes them."""
    kind = draw(st.sampled_from(["lattice", "windows", "classified windows", "kinds"]))
    if kind == "lattice":
        factors = rates_up_to(largest)
        return words.custom_lattice(draw(factors), draw(factors), draw(st.integers(2, 9)))
    if kind == "kinds":
        return words.custom_kinds(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    widths = draw(st.lists(st.integers(1, min(20, largest)), min_size=1, max_size=3))
    return words.custom_windows(widths, classified=kind == "classified windows")
