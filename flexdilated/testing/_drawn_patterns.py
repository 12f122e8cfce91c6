"""Hypothesis strategies for patterns: leaves of each kind, compositions, LongNets and mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

from hypothesis import strategies as st

from ..masks import Mixture, Pattern
from ..masks.core import require_bool, require_int
from . import _vocabulary
from ._drawn_inputs import any_of

# words: object with the constructors, such as `_vocabulary`. largest: largest number in a pattern's arguments.
# The simplest choice comes first: hypothesis shrinks towards it.

OFFSET_RULES = ("interleaved", "contiguous")
_SIDES = ((True, True), (True, False), (False, True))  # rows, columns


def rates_up_to(largest: int) -> st.SearchStrategy[int]:
    """Dilation rates up to 7; a rate above the number of tokens tests nothing."""
    return st.integers(1, min(7, largest))


def windows(words: Any, largest: int) -> st.SearchStrategy:
    """Local windows, also one-sided or with empty sides."""
    reach = st.integers(0, min(8, largest))
    return st.builds(words.local_window, left=reach, right=reach)


def dilated_windows(words: Any, largest: int) -> st.SearchStrategy:
    """Dilated windows."""
    reach = st.integers(0, min(5, largest))
    return st.builds(words.dilated_window, left=reach, right=reach, rate=rates_up_to(largest))


@st.composite
def dilated(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """One dilated set, with a fixed offset or one of the two offset rules for heads."""
    segment, rate = draw(st.integers(1, largest)), draw(rates_up_to(largest))
    offset = draw(st.sampled_from(["fixed", *OFFSET_RULES, "interleaved"]))
    if offset == "fixed":
        return words.dilated(segment, rate, draw(st.integers(0, rate - 1)))
    return words.longnet([segment], [rate], offsets=offset, heads="grouped")


@st.composite
def strided_kinds(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Strided and fixed patterns of the Sparse Transformer, and chunks."""
    kind, stride = draw(st.sampled_from(["strided", "chunked", "fixed"])), draw(st.integers(1, largest))
    if kind == "fixed":
        return words.fixed(stride, summary=draw(st.integers(1, stride)))
    return words.strided(stride) if kind == "strided" else words.chunked(stride)


@st.composite
def global_kinds(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Global tokens in rows, columns or both, first tokens, and prefixes."""
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
    """Landmarks in rows, columns or both; stride 1 in both gives `every()`."""
    stride, (rows, columns) = draw(st.integers(1, largest)), draw(st.sampled_from(_SIDES))
    if stride == 1 and rows and columns:
        return words.every()
    return words.landmark_tokens(stride, rows=rows, columns=columns)


@st.composite
def random_blocks(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Random blocks over fewer or more tokens than the call has."""
    num_tokens, block = draw(st.integers(1, 4 * largest)), draw(st.integers(1, min(9, largest)))
    count = draw(st.integers(1, min(4, -(-num_tokens // block))))
    seed = draw(st.sampled_from([0, 1, (1 << 63) - 1]))
    return words.random_blocks(num_tokens, block=block, count=count, seed=seed)


@st.composite
def block_lists(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Block lists whose rows contain only blocks up to the diagonal, so in range for self-attention."""
    block, height = draw(st.integers(1, min(7, largest))), draw(st.integers(1, min(12, largest)))
    return words.block_list(
        [sorted(draw(st.sets(st.integers(0, row), max_size=6))) for row in range(height)], block=block
    )


@st.composite
def large_grids(draw: st.DrawFn, words: Any, min_tokens: int) -> Any:
    """Neighborhoods on grids of 1 to 3 axes with at least `min_tokens` tokens; a grid binds to no more than it has."""
    inner = draw(st.lists(st.integers(1, 8), max_size=2))
    grid = (-(-min_tokens // prod(inner)) + draw(st.integers(0, 3)), *inner)
    return draw(_neighborhoods_on(words, grid, most=4, max_rate=3))


@st.composite
def whole_grids(draw: st.DrawFn, words: Any, max_tokens: int) -> Any:
    """Neighborhoods on small grids of 2 or 3 axes, to be bound to all tokens; windows may exceed an axis."""
    sides = st.lists(st.integers(1, 7), min_size=2, max_size=3)
    grid = draw(sides.filter(lambda grid: prod(grid) <= max_tokens))
    return draw(_neighborhoods_on(words, grid, most=max(grid), max_rate=2))


@st.composite
def _neighborhoods_on(draw: st.DrawFn, words: Any, grid: list[int] | tuple[int, ...], most: int, max_rate: int) -> Any:
    centred = not draw(st.booleans())
    sizes, rates, strides, causal = zip(
        *(draw(_windows_along(each, most, max_rate, centred)) for each in grid), strict=True
    )
    return words.neighborhood(grid, kernel_size=sizes, rate=rates, stride=strides, causal=causal)


@st.composite
def _windows_along(draw: st.DrawFn, length: int, most: int, max_rate: int, centred: bool) -> tuple[int, int, int, bool]:
    """(kernel size, rate, stride, causal) of one axis; if `centred`, each query is in the middle of its window."""
    rate = draw(st.integers(1, min(max_rate, length)))
    longest = min(2 * most + 1, length // rate)
    if centred:
        return 2 * draw(st.integers(0, (longest - 1) // 2)) + 1, rate, 1, False
    size = draw(st.integers(1, longest))
    return size, rate, draw(st.integers(1, size)), draw(st.booleans())


@st.composite
def functions(draw: st.DrawFn, words: Any, largest: int) -> Any:
    """Patterns of `masks.custom` with closures."""
    kind = draw(st.sampled_from(["lattice", "windows", "classified windows", "kinds"]))
    if kind == "lattice":
        factors = rates_up_to(largest)
        return words.custom_lattice(draw(factors), draw(factors), draw(st.integers(2, 9)))
    if kind == "kinds":
        return words.custom_kinds(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    widths = draw(st.lists(st.integers(1, min(20, largest)), min_size=1, max_size=3))
    return words.custom_windows(widths, classified=kind == "classified windows")


# The simplest choice comes first: hypothesis shrinks towards it.
_COMPOSITIONS = ("leaf", "and", "or", "not", "blockwise", "after", "per_head", "LongNet", "groups", "and", "not")


@dataclass(frozen=True)
class Grammar:
    """Limits of drawn patterns: heads, numbers up to `max_number`, bound to at most `max_positions` positions.

    closures: also draw custom functions. words: object with the constructors; see `_vocabulary`.
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
        """Set patterns of every kind, without compositions."""
        return _sets(self, 0)

    def sets(self, depth: int = 2) -> st.SearchStrategy:
        """Set patterns, composed up to `depth` levels deep."""
        return _sets(self, require_int("depth", depth, minimum=0))

    def longnets(
        self, *, heads: Literal["all", "grouped"] = "all", max_branches: int = 4, padding: bool = False
    ) -> st.SearchStrategy:
        """LongNets: all branches in every head, or one for each group of heads; `padding`: with zero padding."""
        return _longnets(self, heads, require_int("max_branches", max_branches, minimum=1), padding)

    def mixtures(self) -> st.SearchStrategy:
        """LongNets, sums of sets, and sums of LongNets and sets."""
        return _mixtures(self)

    def patterns(self, depth: int = 2) -> st.SearchStrategy:
        """Set patterns, and with lower probability mixtures."""
        sets, mixtures = self.sets(depth), self.mixtures()
        return any_of(sets, mixtures, sets, mixtures, sets)


# Hypothesis validates each new strategy on its first draw, so strategies are cached.
@lru_cache(maxsize=64)
def _sets(grammar: Grammar, depth: int) -> st.SearchStrategy:
    """Set patterns; at depth 0 leaves: dilated sets, the library's main subject, most often, causal order least."""
    if depth:
        return _composed(grammar, depth)
    words, largest = grammar.words, grammar.max_number
    makers = (windows, strided_kinds, dilated_windows, landmarks, dilated, global_kinds, random_blocks, block_lists)
    kinds = [*(make(words, largest) for make in makers), large_grids(words, grammar.max_positions)]
    kinds += [functions(words, largest)] * grammar.closures
    return any_of(st.builds(words.causal), *kinds, *kinds, *[dilated(words, largest)] * 6)


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
    if kind == "after":
        return draw(part).after(draw(st.integers(0, grammar.max_number)))
    if kind == "per_head":
        return words.per_head([draw(part) for _ in range(grammar.num_heads)])
    if kind == "LongNet":
        return draw(grammar.longnets(heads="grouped", max_branches=grammar.num_heads))
    return words.head_groups([draw(part) for _ in range(draw(st.integers(1, grammar.num_heads)))])


@st.composite
def _longnets(draw: st.DrawFn, grammar: Grammar, heads: str, max_branches: int, padding: bool) -> Any:
    branch = st.tuples(st.integers(1, grammar.max_number), rates_up_to(grammar.max_number))
    branches = draw(st.lists(branch, min_size=1, max_size=max_branches))
    segments, rates = zip(*branches, strict=True)
    offsets = draw(st.sampled_from(OFFSET_RULES))
    named = {"padding": "zeros"} if padding else {}
    return grammar.words.longnet(segments, rates, offsets=offsets, heads=heads, **named)


@st.composite
def _mixtures(draw: st.DrawFn, grammar: Grammar) -> Any:
    kind = draw(st.sampled_from(["set", "LongNet", "LongNet", "masked LongNet", "later LongNet"]))
    first = draw(grammar.sets(1) if kind == "set" else grammar.longnets())
    if kind == "later LongNet":
        first = first.after(draw(st.integers(1, grammar.max_number)))
    if kind == "masked LongNet":
        mask = draw(any_of(st.builds(grammar.words.causal), grammar.sets(1)))
        first = first & mask if draw(st.booleans()) else mask & first
    if kind != "set" and draw(st.booleans()):
        return first
    return first + (draw(grammar.sets(1)) if draw(st.booleans()) else first)


def patterns(
    *, num_heads: int = 1, max_number: int = 24, depth: int = 2, max_positions: int = 128, closures: bool = False
) -> st.SearchStrategy[Pattern | Mixture]:
    """Set patterns and mixtures that can be bound to `num_heads` heads and to any number of tokens up to max_positions.

    All kinds and their compositions: windows, dilated and strided sets, chunks, global tokens and landmarks, random and
    listed blocks, neighbourhoods, LongNets. Bind them to at least as many keys as queries: with fewer keys a listed
    block may be out of range, which is an error (`attention_sizes(pattern)` avoids it).

    max_number: largest segment, stride, count and so on. depth: maximum number of nested `&`, `|`, `~`, `per_head`,
    `head_groups`, `blockwise` and `after` in a set. max_positions: grids have at least this number of tokens.
    closures: also draw functions for `masks.custom`, which have no JSON. Patterns shrink towards `masks.causal()`.
    """
    return Grammar(num_heads, max_number, max_positions, closures).patterns(depth)


def set_patterns(
    *, num_heads: int = 1, max_number: int = 24, depth: int = 2, max_positions: int = 128, closures: bool = False
) -> st.SearchStrategy[Pattern]:
    """Set patterns, without mixtures; arguments as for `patterns`."""
    return Grammar(num_heads, max_number, max_positions, closures).sets(depth)


def mixtures(
    *, num_heads: int = 1, max_number: int = 24, max_positions: int = 128, closures: bool = False
) -> st.SearchStrategy[Pattern | Mixture]:
    """Mixtures, in which a pair may count several times: LongNets, also intersected with sets, and sums.

    A LongNet of one branch is a set. Arguments as for `patterns`.
    """
    return Grammar(num_heads, max_number, max_positions, closures).mixtures()


def longnets(
    *,
    max_branches: int = 4,
    max_number: int = 24,
    heads: Literal["all", "grouped"] = "all",
    padding: bool = False,
) -> st.SearchStrategy[Pattern | Mixture]:
    """LongNets with any segment lengths and rates and both offset rules; rates need not divide segment lengths.

    heads="grouped" needs at least max_branches heads. padding: with zero padding, which needs heads="all" and whole
    sequences; `patterns` draws no padding.
    """
    return Grammar(max_number=max_number).longnets(heads=heads, max_branches=max_branches, padding=padding)


def neighborhoods(*, max_tokens: int = 48) -> st.SearchStrategy[Pattern]:
    """Neighbourhoods on grids of 2 or 3 axes with up to max_tokens tokens; bind them to all `prod(p.grid)` tokens."""
    return whole_grids(_vocabulary, require_int("max_tokens", max_tokens, minimum=1))
