"""Hypothesis strategies for patterns: single ones of each kind, compositions, LongNets, mixtures, run-time tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from .. import masks
from ..masks import EMPTY, FULL, PARTIAL, Pattern, custom
from ..masks.core import require_bool, require_int
from ._drawn_inputs import AttentionSizes, any_of, document_ids

# In this file, words is the object whose methods construct patterns, such as WORDS, and largest bounds most numbers in
# a pattern's arguments.
# The simplest choice comes first: hypothesis shrinks towards it.

OFFSET_RULES = ("interleaved", "contiguous")
_SIDES = ((True, True), (True, False), (False, True))  # rows, columns


class Words:
    """Constructors that the strategies call to make patterns: every function of `masks`, and three custom patterns.

    A test may give the strategies another object with the same methods, to draw each pattern together with an
    independent dense rule: each method then returns an object that holds both and has the operators of a pattern.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(masks, name)

    @staticmethod
    def custom_lattice(a: int, b: int, modulus: int) -> Pattern:
        return custom(lattice(a, b, modulus))

    @staticmethod
    def custom_windows(widths: Sequence[int], *, classified: bool) -> Pattern:
        """Return a custom pattern: a query of head h sees the last widths[h % len(widths)] keys up to its own position.

        classified: also give `custom` the function `classify`, which marks blocks as full or empty, and the period.
        """
        table = torch.tensor(widths)
        claims: dict[str, Any] = {"classify": classify_window(table), "period": 1} if classified else {}
        return custom(window_by_head(table), **claims)

    @staticmethod
    def custom_kinds(kinds: Sequence[int]) -> Pattern:
        """Return a custom pattern: query q sees key k if kinds[q % n] == kinds[k % n], where n = len(kinds)."""
        return custom(same_kind(torch.tensor(kinds)), period=len(kinds))


WORDS = Words()


def lattice(a: int, b: int, modulus: int):
    def mask_mod(b_, h, q, k):
        return (q * a + k * b) % modulus == 0

    return mask_mod


def window_by_head(widths: Tensor):
    def mask_mod(b, h, q, k):
        distance = q - k
        return (distance >= 0) & (distance < widths[h % len(widths)])

    return mask_mod


def classify_window(widths: Tensor):
    def classify(head, q_first, q_last, k_first, k_last):
        width = widths[head % len(widths)]
        empty = (q_last < k_first) | (q_first - k_last >= width)
        full = (q_first >= k_last) & (q_last - k_first < width)
        return torch.where(full, FULL, torch.where(empty, EMPTY, PARTIAL))

    return classify


def same_kind(kinds: Tensor):
    size = len(kinds)

    def mask_mod(b, h, q, k):
        return kinds[q % size] == kinds[k % size]

    return mask_mod


LEAVES = ("window", "strided", "dilated window", "landmarks", "dilated", "global", "random blocks", "block list")


@st.composite
def leaf(draw: st.DrawFn, words: Any, largest: int, kind: str) -> Any:
    """Draw one pattern of this kind, made by the constructors of `words`.

    kind: a name in LEAVES; or "function", a `custom` pattern; or "grid", a neighborhood or
        grid_window on a grid of 1 to 3 axes with at least `largest` tokens.
    largest: upper bound of segments, strides, rates and counts in the other kinds.
    """

    def number(most: int = largest, least: int = 1) -> int:
        return draw(st.integers(least, most))

    def one_of(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    most_rate = min(7, largest)  # a rate above the number of tokens tests nothing
    match kind:
        case "window":
            return words.local_window(left=number(min(8, largest), 0), right=number(min(8, largest), 0))
        case "dilated window":
            reach = min(5, largest)
            return words.dilated_window(left=number(reach, 0), right=number(reach, 0), rate=number(most_rate))
        case "strided":
            shape, stride = one_of("strided", "chunked", "fixed"), number()
            return words.fixed(stride, summary=number(stride)) if shape == "fixed" else getattr(words, shape)(stride)
        case "landmarks":
            stride, (rows, columns) = number(), one_of(*_SIDES)
            if stride == 1 and rows and columns:
                return words.every()
            return words.landmark_tokens(stride, rows=rows, columns=columns)
        case "dilated":
            segment, rate, offset = number(), number(most_rate), one_of("fixed", *OFFSET_RULES, "interleaved")
            if offset == "fixed":
                return words.dilated(segment, rate, number(rate - 1, 0))
            return words.longnet([segment], [rate], offsets=offset, heads="grouped")
        case "global":
            shape, count = one_of("global", "first", "prefix"), number()
            if shape != "global":
                return words.first_tokens(count) if shape == "first" else words.prefix_lm(count)
            rows, columns = one_of(*_SIDES)
            return words.global_tokens(count, rows=rows, columns=columns)
        case "random blocks":  # over fewer or more tokens than the call has
            num_tokens, block = number(4 * largest), number(min(9, largest))
            count = number(min(4, -(-num_tokens // block)))
            return words.random_blocks(num_tokens, block=block, count=count, seed=one_of(0, 1, (1 << 63) - 1))
        case "block list":  # blocks up to the diagonal, so in range for self-attention
            block, height = number(min(7, largest)), number(min(12, largest))
            rows = [sorted(draw(st.sets(st.integers(0, row), max_size=6))) for row in range(height)]
            return words.block_list(rows, block=block)
        case "grid":  # of 1 to 3 axes; it binds to no more tokens than it has
            inner = draw(st.lists(st.integers(1, 8), max_size=2))
            grid = (-(-largest // prod(inner)) + number(3, 0), *inner)
            if draw(st.booleans()):
                return words.grid_window(grid, draw(_windows_on(grid)))
            return draw(_neighborhoods_on(words, grid, most=4, max_rate=3))
    shape = one_of("lattice", "windows", "classified windows", "kinds")
    if shape == "lattice":
        return words.custom_lattice(number(most_rate), number(most_rate), number(9, 2))
    if shape == "kinds":
        return words.custom_kinds(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    widths = draw(st.lists(st.integers(1, min(20, largest)), min_size=1, max_size=3))
    return words.custom_windows(widths, classified=shape == "classified windows")


@st.composite
def _windows_on(draw: st.DrawFn, grid: Sequence[int]) -> Any:
    """Draw the `radius` of `masks.grid_window` on this grid: 1 to 3 tuples, in the order that it requires."""
    firsts = draw(st.sets(st.integers(0, grid[0] - 1), min_size=1, max_size=3))
    rest = [sorted(draw(st.lists(st.integers(0, 4), min_size=len(firsts), max_size=len(firsts)))) for _ in grid[1:]]
    return list(zip(sorted(firsts), *(each[::-1] for each in rest), strict=True))


@st.composite
def whole_grids(draw: st.DrawFn, words: Any, max_tokens: int) -> Any:
    """Draw a neighborhood on a grid of 2 or 3 axes of length 1 to 7, with up to max_tokens tokens.

    Its windows may fill an axis. It binds to no more tokens than the grid has. words: see `Words`.
    """
    sides = st.lists(st.integers(1, 7), min_size=2, max_size=3)
    grid = draw(sides.filter(lambda grid: prod(grid) <= max_tokens))
    return draw(_neighborhoods_on(words, grid, most=max(grid), max_rate=2))


@st.composite
def _neighborhoods_on(draw: st.DrawFn, words: Any, grid: list[int] | tuple[int, ...], most: int, max_rate: int) -> Any:
    centred = not draw(st.booleans())
    wraps = draw(st.sampled_from([False, False, True]))  # if True, axes may wrap
    sizes, rates, strides, causal, wrap = zip(
        *(draw(_windows_along(each, most, max_rate, centred, wraps)) for each in grid), strict=True
    )
    return words.neighborhood(grid, kernel_size=sizes, rate=rates, stride=strides, causal=causal, wrap=wrap)


@st.composite
def _windows_along(
    draw: st.DrawFn, length: int, most: int, max_rate: int, centred: bool, may_wrap: bool
) -> tuple[int, int, int, bool, bool]:
    """Draw (kernel size, rate, stride, causal, wrap) for one axis of this length.

    The kernel size is at most 2 * most + 1; on an axis that wraps it may exceed the axis. centred: windows have the
    query in their middle: odd kernel size, stride 1, not causal.
    """
    wrap = may_wrap and draw(st.booleans())
    rates = [rate for rate in range(1, min(max_rate, length) + 1) if not (wrap and length % rate)]
    rate = draw(st.sampled_from(rates))
    longest = 2 * most + 1 if wrap else min(2 * most + 1, length // rate)
    if centred:
        return 2 * draw(st.integers(0, (longest - 1) // 2)) + 1, rate, 1, False, wrap
    size = draw(st.integers(1, longest))
    if not wrap:
        return size, rate, draw(st.integers(1, size)), draw(st.booleans()), False
    strides = [stride for stride in range(1, size + 1) if length % (rate * stride) == 0]
    return size, rate, draw(st.sampled_from(strides)), False, True


# The simplest choice comes first: hypothesis shrinks towards it.
_COMPOSITIONS = (
    *("leaf", "and", "or", "not", "blockwise", "after", "per_head", "LongNet", "groups"),
    *("before", "and", "not"),
)


@dataclass(frozen=True)
class Grammar:
    """Limits of drawn patterns, and methods that return strategies within these limits.

    num_heads, max_positions: patterns can be bound to this number of heads and, in self-attention, to up to this number
        of positions.
    max_number: largest segment, stride, count and so on.
    closures: also draw `custom` patterns.
    words: object with the constructors of patterns; see `Words`.
    """

    num_heads: int = 1
    max_number: int = 24
    max_positions: int = 128
    closures: bool = False
    words: Any = WORDS

    def __post_init__(self) -> None:
        for name in ("num_heads", "max_number", "max_positions"):
            require_int(name, getattr(self, name), minimum=1)
        require_bool("closures", self.closures)

    def leaves(self) -> st.SearchStrategy:
        return _sets(self, 0)

    def sets(self, depth: int = 2) -> st.SearchStrategy:
        return _sets(self, require_int("depth", depth, minimum=0))

    def longnets(
        self, *, heads: Literal["all", "grouped"] = "all", max_branches: int = 4, padding: bool = False
    ) -> st.SearchStrategy:
        return _longnets(self, heads, require_int("max_branches", max_branches, minimum=1), padding)

    def mixtures(self) -> st.SearchStrategy:
        return _mixtures(self)

    def patterns(self, depth: int = 2) -> st.SearchStrategy:
        sets, mixtures = self.sets(depth), self.mixtures()
        return any_of(sets, mixtures, sets, mixtures, sets)


# Hypothesis validates each new strategy on its first draw, so strategies are cached.
@lru_cache(maxsize=64)
def _sets(grammar: Grammar, depth: int) -> st.SearchStrategy:
    """Strategy for set patterns with at most `depth` nested compositions.

    At depth 0 they are single patterns, dilated ones most often, `causal()` least often.
    """
    if depth:
        return _composed_sets(grammar, depth)
    words, largest = grammar.words, grammar.max_number
    kinds = [leaf(words, largest, kind) for kind in LEAVES] + [leaf(words, grammar.max_positions, "grid")]
    kinds += [leaf(words, largest, "function")] * grammar.closures
    return any_of(st.builds(words.causal), *kinds, *kinds, *[leaf(words, largest, "dilated")] * 6)


@st.composite
def _composed_sets(draw: st.DrawFn, grammar: Grammar, depth: int) -> Any:
    words, part, number = grammar.words, grammar.sets(depth - 1), grammar.max_number
    compose = {
        "leaf": lambda: draw(grammar.leaves()),
        "and": lambda: draw(part) & draw(part),
        "or": lambda: draw(part) | draw(part),
        "not": lambda: ~draw(part),
        "blockwise": lambda: words.blockwise(draw(part), draw(st.integers(1, min(6, number)))),
        "after": lambda: draw(part).after(draw(st.integers(0, number))),
        "before": lambda: draw(part).before(draw(st.integers(1, 2 * number))),
        "per_head": lambda: words.per_head([draw(part) for _ in range(grammar.num_heads)]),
        "LongNet": lambda: draw(grammar.longnets(heads="grouped", max_branches=grammar.num_heads)),
        "groups": lambda: words.head_groups([draw(part) for _ in range(draw(st.integers(1, grammar.num_heads)))]),
    }
    return compose[draw(st.sampled_from(_COMPOSITIONS))]()


@st.composite
def _longnets(draw: st.DrawFn, grammar: Grammar, heads: str, max_branches: int, padding: bool) -> Any:
    branch = st.tuples(st.integers(1, grammar.max_number), st.integers(1, min(7, grammar.max_number)))
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


_RUN_TIME_COMPOSITIONS = (
    *("and", "per_document", "or", "without", "both", "and", "per_document", "per_document"),
    *("selected", "selected beside", "selected in documents", "mask", "sparse", "same_document", "per_sample"),
    "queries_from",
)


def _has_tokens_from(part: Any, starts: Tensor, sizes: AttentionSizes) -> bool:
    """Return False if a grid or a listed block is out of range in a call of `sizes` with queries moved by `starts`."""
    queries = range(sizes.q_offset + int(starts.min()), sizes.q_offset + sizes.num_queries + int(starts.max()))
    try:
        for branch in getattr(part, "pattern", part).branches():  # `words` may draw objects that hold a pattern
            branch.check_tokens(queries, range(sizes.k_offset, sizes.k_offset + sizes.num_keys))
    except ValueError:
        return False
    return True


@st.composite
def run_time_compositions(
    draw: st.DrawFn,
    grammar: Grammar,
    sizes: AttentionSizes,
    words: Any,
    kinds: Sequence[str] = _RUN_TIME_COMPOSITIONS,
) -> Any:
    """Draw a run-time pattern with tensors for `sizes`, alone or combined with patterns within the limits of `grammar`.

    words: object with the constructors of the run-time patterns: documents, same_document, lengths, visible_keys, mask,
        sparse, per_sample and selected_blocks. The constructors of other patterns are in `grammar.words`.
    kinds: the compositions to choose from.
    """
    positions = max(sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys)
    keys = sizes.k_offset + sizes.num_keys
    spans = [_documents(words, sizes.batch, positions), _lengths(words, sizes.batch, positions)]
    seen = _visible_keys(words, sizes.batch, keys)
    kind = draw(st.sampled_from(kinds))
    pattern = draw(grammar.patterns() if kind in ("and", "per_document") else grammar.sets())
    if kind.startswith("selected"):
        chosen = draw(_selected_blocks(words, sizes))
        if kind == "selected":
            return draw(st.sampled_from([chosen, pattern & chosen, pattern | chosen, pattern & ~chosen]))
        beside = pattern | chosen
        return draw(grammar.sets()) & beside if kind == "selected beside" else beside & draw(spans[0])
    if kind in ("mask", "sparse", "same_document"):
        leaf = draw({"mask": _mask, "sparse": _sparse, "same_document": _same_document}[kind](words, sizes))
        return draw(st.sampled_from([leaf, pattern & leaf, pattern | leaf, pattern & ~leaf]))
    if kind == "per_sample":
        patterns = [pattern, *draw(st.lists(grammar.sets(), max_size=2))]
        which = draw(_entry_numbers(sizes.batch, len(patterns) - 1))
        chosen = words.per_sample(patterns, which)
        return chosen & draw(any_of(seen, *spans)) if draw(st.booleans()) else chosen
    if kind == "queries_from":
        starts = draw(_entry_numbers(sizes.batch, draw(st.sampled_from([0, 9, 300]))))
        part = draw(grammar.patterns())
        if not _has_tokens_from(part, starts, sizes):
            return pattern & draw(seen)
        moved = part.queries_from(starts)
        return draw(st.sampled_from([moved, moved & draw(any_of(seen, *spans)), pattern & moved]))
    if kind == "both":
        one, other = draw(st.sampled_from([(spans[0], seen), (spans[1], seen), (spans[0], spans[1])]))
        return pattern & draw(one) & draw(other)
    if kind == "per_document":
        return pattern.per_document(draw(any_of(*spans)))
    given = draw(any_of(spans[0], seen, seen, spans[1], spans[1]))
    if kind == "and":
        return pattern & given
    return pattern | given if kind == "or" else pattern & ~given


@st.composite
def _documents(draw: st.DrawFn, words: Any, batch: int, positions: int) -> Any:
    """Draw a `documents` pattern of ascending ids, for each batch entry or common to all.

    There may be padding at the end of a sequence and in place of document 0 or 1. positions: length of a sequence.
    """
    rows = draw(st.sampled_from([1, batch]))
    ids = draw(document_ids(positions, batch=rows, max_documents=draw(st.sampled_from([5, 40]))))
    hidden = draw(st.sampled_from([-1, -1, -1, 0, 1]))
    ids = torch.where((ids < 0) | (ids == hidden), -1, draw(st.integers(1, 3)) * ids + draw(st.integers(0, 1)))
    longest = draw(st.sampled_from([None, _longest_document_length(ids), positions]))
    return words.documents(ids[0] if rows == 1 and draw(st.booleans()) else ids, longest=longest)


def _longest_document_length(ids: Tensor) -> int:
    return max([1, *(int((row == number).sum()) for row in ids for number in row[row >= 0].unique())])


@st.composite
def _lengths(draw: st.DrawFn, words: Any, batch: int, positions: int) -> Any:
    numbers = st.lists(st.integers(0, positions), min_size=batch, max_size=batch)
    return words.lengths(torch.tensor(draw(numbers)), padding=draw(st.sampled_from(["right", "left"])))


@st.composite
def _visible_keys(draw: st.DrawFn, words: Any, batch: int, keys: int) -> Any:
    rows = draw(st.sampled_from([1, batch]))
    seen = st.lists(st.booleans(), min_size=keys, max_size=keys)
    return words.visible_keys(torch.tensor([draw(seen) for _ in range(rows)]))


def _entry_numbers(batch: int, largest: int) -> st.SearchStrategy[Tensor]:
    return st.lists(st.integers(0, largest), min_size=batch, max_size=batch).map(torch.tensor)


@st.composite
def _same_document(draw: st.DrawFn, words: Any, sizes: AttentionSizes) -> Any:
    """Draw a `same_document` pattern of ids for each batch entry or common to all.

    There may be padding, and documents that have only queries or only keys.
    """
    sides = []
    for positions in (sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys):
        rows = draw(st.sampled_from([1, sizes.batch]))
        ids = draw(document_ids(positions, batch=rows, max_documents=draw(st.sampled_from([5, 40]))))
        ids = ids.masked_fill(ids == draw(st.sampled_from([-1, -1, 0, 1])), -1)
        sides.append(ids[0] if rows == 1 and draw(st.booleans()) else ids.expand(sizes.batch, -1))
    return words.same_document(*sides)


@st.composite
def _mask(draw: st.DrawFn, words: Any, sizes: AttentionSizes) -> Any:
    """Draw a `mask` pattern in which each dim has size 1, so that it broadcasts, or its full size."""
    stops = sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys
    shape = tuple(draw(st.sampled_from([size, 1, size])) for size in (sizes.batch, sizes.num_heads_global, *stops))
    share, seed = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), draw(st.integers(0, 99))
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    allowed[..., : draw(st.integers(0, stops[1]))] = True  # so that whole blocks occur
    return words.mask(allowed[0, 0] if shape[:2] == (1, 1) and draw(st.booleans()) else allowed)


@st.composite
def _sparse(draw: st.DrawFn, words: Any, sizes: AttentionSizes) -> Any:
    """Draw a `sparse` pattern, of one matrix, or of one for each batch entry or group of heads."""
    stops, heads = (sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys), sizes.num_heads_global
    tables = draw(st.sampled_from([1, *(number for number in range(2, heads + 1) if heads % number == 0)]))
    shape = draw(st.sampled_from([1, sizes.batch])), tables, *stops
    share, generator = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), torch.Generator()
    allowed = torch.rand(shape, generator=generator.manual_seed(draw(st.integers(0, 99)))) < share
    allowed[:, :, draw(st.integers(0, stops[0] - 1))] |= draw(st.booleans())  # a row with every key
    forms = [allowed.to_sparse()]
    if tables == 1:
        forms.append(allowed[:, 0].to_sparse())
    if shape[:2] == (1, 1):
        forms.append(allowed[0, 0].to_sparse())
    return words.sparse(draw(st.sampled_from(forms)))


@st.composite
def _selected_blocks(draw: st.DrawFn, words: Any, sizes: AttentionSizes) -> Any:
    """Draw a `selected_blocks` pattern with block sizes of 1 to 20 and one table for each group of heads.

    Row 0 of a table is for query block 0, or for the block of the first query.
    """
    block = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    stop, heads = sizes.q_offset + sizes.num_queries, sizes.num_heads_global
    first = draw(st.sampled_from([0, sizes.q_offset // block[0]]))
    columns = -(-(sizes.k_offset + sizes.num_keys) // block[1])
    most = draw(st.integers(1, min(columns, 5) + 1))
    tables = draw(st.sampled_from([number for number in range(1, heads + 1) if heads % number == 0]))
    shape = draw(st.sampled_from([1, sizes.batch])), tables, -(-stop // block[0]) - first, most
    entries = st.lists(st.integers(-1, columns - 1), min_size=shape[2] * most, max_size=shape[2] * most)
    rows = torch.tensor([draw(entries) for _ in range(shape[0] * tables)]).view(shape)
    is_clear = shape[0] == 1 and not 1 < sizes.batch == tables  # without the dim of the batch
    return words.selected_blocks(rows[0] if is_clear and draw(st.booleans()) else rows, block=block, most=most)
