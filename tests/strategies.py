"""What is drawn: patterns beside their dense rules, sizes at the edges, and tensors."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from tests import custom_rules, oracle

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


@dataclass(frozen=True)
class Twin:
    """A pattern or mixture of the library, and the same rule written independently.

    `edges` are lengths at which the rule changes: drawn token numbers lie around their multiples.
    """

    pattern: masks.Pattern | masks.Mixture
    rule: oracle.Rule
    edges: tuple[int, ...] = (1,)

    def __repr__(self) -> str:
        return repr(self.pattern)


class Sizes(Protocol):
    """What tensors are drawn for."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_queries(self) -> int: ...
    @property
    def num_keys(self) -> int: ...


class Binds(Protocol):
    """What can be bound to its sizes."""

    def bind(self) -> masks.Bound: ...


@dataclass(frozen=True)
class Case:
    """A pattern with sizes: num_heads of all heads, from head_offset on; queries from q_offset on."""

    twin: Twin
    num_heads: int
    num_queries: int
    num_keys: int
    q_offset: int
    k_offset: int
    head_offset: int
    num_heads_global: int

    @property
    def sizes(self) -> dict[str, int]:
        """The keywords that `bind` and `attend` share."""
        return {
            "q_offset": self.q_offset,
            "k_offset": self.k_offset,
            "head_offset": self.head_offset,
            "num_heads_global": self.num_heads_global,
        }

    @property
    def heads(self) -> range:
        return range(self.head_offset, self.head_offset + self.num_heads)

    def bind(self) -> masks.Bound:
        tensors = {"num_heads": self.num_heads, "num_queries": self.num_queries, "num_keys": self.num_keys}
        return self.twin.pattern.bind(**tensors, **self.sizes)

    def counts(self) -> Tensor:
        """(H, N, M) from the dense rule."""
        queries = torch.arange(self.q_offset, self.q_offset + self.num_queries)
        keys = torch.arange(self.k_offset, self.k_offset + self.num_keys)
        return oracle.counts(self.twin.rule, self.heads, self.num_heads_global, queries, keys)


segments = st.integers(1, 24)
rates = st.integers(1, 7)
offset_rules = st.sampled_from(["interleaved", "contiguous"])
block_sides = st.sampled_from([1, 2, 3, 4, 5, 8, 16])


@st.composite
def dilated(draw: st.DrawFn) -> Twin:
    """One dilated set, with a fixed offset or one of the two rules."""
    w, r = draw(segments), draw(rates)
    if draw(st.booleans()):
        o = draw(st.integers(0, r - 1))
        return Twin(masks.dilated(w, r, o), oracle.dilated(w, r, o), (w, r))
    o = draw(offset_rules)
    return Twin(masks.longnet([w], [r], offsets=o, heads="grouped"), oracle.dilated(w, r, o), (w, r))


@st.composite
def local_windows(draw: st.DrawFn) -> Twin:
    left, right = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    return Twin(masks.local_window(left=left, right=right), oracle.local_window(left, right), (left + right + 1,))


@st.composite
def dilated_windows(draw: st.DrawFn) -> Twin:
    left, right, rate = draw(st.integers(0, 5)), draw(st.integers(0, 5)), draw(rates)
    pattern = masks.dilated_window(left=left, right=right, rate=rate)
    return Twin(pattern, oracle.dilated_window(left, right, rate), (rate, (left + right) * rate + 1))


@st.composite
def strided_rules(draw: st.DrawFn) -> Twin:
    """The Sparse Transformer's two kinds, and chunks."""
    kind, stride = draw(st.sampled_from(["strided", "fixed", "chunked"])), draw(segments)
    if kind == "strided":
        return Twin(masks.strided(stride), oracle.strided(stride), (stride,))
    if kind == "chunked":
        return Twin(masks.chunked(stride), oracle.dilated(stride, 1, 0), (stride,))
    summary = draw(st.integers(1, stride))
    return Twin(masks.fixed(stride, summary=summary), oracle.fixed(stride, summary), (stride,))


@st.composite
def global_tokens(draw: st.DrawFn) -> Twin:
    """Global tokens in rows, columns or both, and prefixes."""
    count, kind = draw(st.integers(1, 24)), draw(st.sampled_from(["both", "rows", "columns", "first", "prefix"]))
    if kind == "prefix":
        rule = oracle.either(oracle.causal(), oracle.global_tokens(count, False, True))
        return Twin(masks.prefix_lm(count), rule, (count,))
    if kind == "first":
        return Twin(masks.first_tokens(count), oracle.global_tokens(count, False, True), (count,))
    rows, columns = kind != "columns", kind != "rows"
    pattern = masks.global_tokens(count, rows=rows, columns=columns)
    return Twin(pattern, oracle.global_tokens(count, rows, columns), (count,))


@st.composite
def landmark_tokens(draw: st.DrawFn) -> Twin:
    """Landmarks in rows, columns or both; one at every position makes all pairs."""
    stride, (rows, columns) = draw(segments), draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    if stride == 1 and rows and columns:
        return Twin(masks.every(), oracle.every())
    pattern = masks.landmark_tokens(stride, rows=rows, columns=columns)
    return Twin(pattern, oracle.landmark_tokens(stride, rows, columns), (stride,))


@st.composite
def random_blocks(draw: st.DrawFn) -> Twin:
    """Over fewer or more tokens than will be drawn."""
    num_tokens, block = draw(st.integers(1, 100)), draw(st.integers(1, 9))
    count = draw(st.integers(1, min(4, -(-num_tokens // block))))
    seed = draw(st.sampled_from([0, 1, (1 << 63) - 1]))
    pattern = masks.random_blocks(num_tokens, block=block, count=count, seed=seed)
    return Twin(pattern, oracle.random_blocks(num_tokens, block, count, seed), (block, num_tokens))


@st.composite
def block_lists(draw: st.DrawFn) -> Twin:
    """Rows name blocks up to their own: in range wherever queries and keys are the same tokens."""
    block, height = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    rows = [sorted(draw(st.sets(st.integers(0, row), max_size=6))) for row in range(height)]
    return Twin(masks.block_list(rows, block=block), oracle.block_list([rows], block), (block, block * height))


@st.composite
def neighborhoods(draw: st.DrawFn) -> Twin:
    """Grids of 1 to 3 axes with no fewer tokens than are ever drawn."""
    inner = draw(st.lists(st.integers(1, 8), max_size=2))
    grid = (-(-120 // prod(inner)) + draw(st.integers(0, 3)), *inner)
    rate = [draw(st.integers(1, min(3, length))) for length in grid]
    radius = [draw(st.integers(0, min(4, (length // each - 1) // 2))) for length, each in zip(grid, rate, strict=True)]
    pattern = masks.neighborhood(grid, radius, rate=rate)
    return Twin(pattern, oracle.neighborhood(grid, radius, rate), (1, *inner, prod(inner)))


@st.composite
def customs(draw: st.DrawFn) -> Twin:
    """Functions of positions, of heads and of a table; with classify and a period, and without."""
    kind = draw(st.sampled_from(["lattice", "window", "classified", "kinds"]))
    if kind == "lattice":
        return Twin(*custom_rules.lattices(draw(rates), draw(rates), draw(st.integers(2, 9))))
    if kind == "kinds":
        return Twin(*custom_rules.kinds(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))))
    widths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    return Twin(*custom_rules.windows(widths, classified=kind == "classified"))


leaves = st.one_of(
    *(dilated(), dilated(), local_windows(), st.just(Twin(masks.causal(), oracle.causal()))),
    *(dilated_windows(), strided_rules(), global_tokens(), landmark_tokens()),
    *(random_blocks(), block_lists(), neighborhoods(), customs()),
)


@st.composite
def sets(draw: st.DrawFn, num_heads: int, depth: int = 2) -> Twin:
    """A set pattern for this many heads, composed up to `depth` levels deep."""
    kinds = ["leaf", "leaf", "and", "or", "not", "per_head", "grouped", "blockwise"]
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves)
    if kind == "grouped":
        return draw(longnets("grouped", max_branches=num_heads))
    number = {"not": 1, "blockwise": 1, "per_head": num_heads}.get(kind, 2)
    parts = [draw(sets(num_heads, depth - 1)) for _ in range(number)]
    patterns, rules = [part.pattern for part in parts], [part.rule for part in parts]
    edges = tuple(edge for part in parts for edge in part.edges)
    if kind == "and":
        return Twin(patterns[0] & patterns[1], oracle.both(*rules), edges)
    if kind == "or":
        return Twin(patterns[0] | patterns[1], oracle.either(*rules), edges)
    if kind == "not":
        return Twin(~patterns[0], oracle.neither(*rules), edges)
    if kind == "blockwise":
        block = draw(st.integers(1, 6))
        edges = (block, *(block * edge for edge in edges))
        return Twin(masks.blockwise(patterns[0], block), oracle.blockwise(rules[0], block), edges)
    return Twin(masks.per_head(patterns), oracle.per_head(*rules), edges)


@st.composite
def longnets(draw: st.DrawFn, heads: str = "all", max_branches: int = 4) -> Twin:
    branches = draw(st.lists(st.tuples(segments, rates), min_size=1, max_size=max_branches))
    widths, steps = zip(*branches, strict=True)
    rules = {"offsets": draw(offset_rules), "heads": heads}
    return Twin(masks.longnet(widths, steps, **rules), oracle.longnet(widths, steps, **rules), (*widths, *steps))


@st.composite
def mixtures(draw: st.DrawFn, num_heads: int) -> Twin:
    """A LongNet, causal or not, or a set; half of the time plus one more set or itself."""
    if draw(st.booleans()):
        twin = draw(longnets())
        if draw(st.booleans()):
            mask = draw(st.one_of(st.just(Twin(masks.causal(), oracle.causal())), sets(num_heads, 1)))
            pattern = twin.pattern & mask.pattern if draw(st.booleans()) else mask.pattern & twin.pattern
            twin = Twin(pattern, oracle.both(twin.rule, mask.rule), twin.edges + mask.edges)
    else:
        twin = draw(sets(num_heads, 1))
    if draw(st.booleans()):
        other = draw(st.one_of(sets(num_heads, 1), st.just(twin)))
        twin = Twin(twin.pattern + other.pattern, oracle.total(twin.rule, other.rule), twin.edges + other.edges)
    return twin


def expressions(num_heads: int) -> st.SearchStrategy[Twin]:
    """Sets and mixtures."""
    return st.one_of(sets(num_heads), mixtures(num_heads))


def written_expressions(num_heads: int) -> st.SearchStrategy[Twin]:
    """Those that can be written down: without custom functions."""
    return expressions(num_heads).filter(lambda twin: '"custom"' not in twin.pattern.text)


@st.composite
def lengths(draw: st.DrawFn, edges: tuple[int, ...], largest: int = 48) -> int:
    """1 often; one less and one more than a multiple of an edge; any."""
    around = draw(st.sampled_from(edges)) * draw(st.integers(1, 4)) + draw(st.integers(-1, 1))
    return draw(st.sampled_from([1, min(max(around, 1), largest), draw(st.integers(1, largest))]))


@st.composite
def cases(draw: st.DrawFn, twins=expressions, max_heads: int = 5, largest: int = 48) -> Case:
    """A pattern with sizes: self-attention, or some of the heads and any queries over any keys."""
    if twins is expressions and draw(st.integers(0, 9)) == 5:
        return draw(whole_grids(max_heads))
    H = draw(st.integers(1, max_heads))
    twin = draw(twins(H))
    first = draw(st.integers(0, H - 1)) if draw(st.booleans()) else 0
    here = draw(st.integers(1, H - first))
    M = draw(lengths(twin.edges, largest))
    if draw(st.booleans()):
        return Case(twin, H, M, M, 0, 0, 0, H)
    N = draw(lengths(twin.edges, largest))
    q_offset, k_offset = draw(st.integers(0, largest)), draw(st.sampled_from([0, 0, 5, draw(st.integers(0, largest))]))
    case = Case(twin, here, N, M, q_offset, k_offset, first, H)
    # Rows of a block list may name blocks beyond these keys, never beyond as many keys as queries.
    return case if in_range(case) else Case(twin, H, M, M, 0, 0, 0, H)


def in_range(case: Binds) -> bool:
    """Whether the keys hold every block that a block list names."""
    try:
        case.bind()
    except ValueError as error:
        if "block_list is out of range" not in str(error):
            raise
        return False
    return True


@st.composite
def whole_grids(draw: st.DrawFn, max_heads: int = 4) -> Case:
    """Self-attention of every token of a small grid: a neighbourhood, in half of the cases beside another set."""
    grid = draw(st.lists(st.integers(1, 7), min_size=2, max_size=3).filter(lambda grid: prod(grid) <= 48))
    rate = [draw(st.integers(1, min(2, length))) for length in grid]
    radius = [draw(st.integers(0, (length // each - 1) // 2)) for length, each in zip(grid, rate, strict=True)]
    twin = Twin(masks.neighborhood(grid, radius, rate=rate), oracle.neighborhood(grid, radius, rate))
    if draw(st.booleans()):
        other = draw(local_windows())
        joined, rule = draw(st.sampled_from([(operator.add, oracle.total), (operator.or_, oracle.either)]))
        twin = Twin(joined(twin.pattern, other.pattern), rule(twin.rule, other.rule))
    H, N = draw(st.integers(1, max_heads)), prod(grid)
    return Case(twin, H, N, N, 0, 0, 0, H)


@st.composite
def tensors(
    draw: st.DrawFn, case: Sizes, dtype: torch.dtype = torch.float64, batch: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v for a case, with gradients wanted: grouped heads and both memory formats drawn."""
    H = case.num_heads
    G = draw(st.sampled_from([heads for heads in range(1, H + 1) if H % heads == 0]))
    B, D = batch or draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 8]))
    tokens_outermost = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))

    def tensor(heads: int, tokens: int) -> Tensor:
        shape = (B, tokens, heads, D) if tokens_outermost else (B, heads, tokens, D)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return (x.transpose(1, 2) if tokens_outermost else x).requires_grad_()

    return tensor(H, case.num_queries), tensor(G, case.num_keys), tensor(G, case.num_keys)


@st.composite
def whole_cases(draw: st.DrawFn, twins=expressions, max_heads: int = 4, largest: int = 48) -> Case:
    """Self-attention: all heads, as many queries as keys, from position 0."""
    if twins is expressions and draw(st.integers(0, 9)) == 5:
        return draw(whole_grids(max_heads))
    H = draw(st.integers(1, max_heads))
    twin = draw(twins(H))
    N = draw(lengths(twin.edges, largest))
    return Case(twin, H, N, N, 0, 0, 0, H)


# LongNet's own ladder (arXiv 2307.02486), where rates do not divide segments, and Prov-GigaPath's, whose last
# segments exceed any slide.
PAPER_5 = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
GIGAPATH_5 = ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))
LONGNET_4 = ((2048, 4096, 8192, 16384), (1, 2, 4, 8))
LONGNET_5 = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
LADDERS = {"longnet-4": LONGNET_4, "longnet-5": LONGNET_5, "paper-5": PAPER_5, "gigapath-5": GIGAPATH_5}


def scaled(ladder: tuple[tuple[int, ...], tuple[int, ...]], divisor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A ladder with shorter segments and the same rates."""
    return tuple(-(-w // divisor) for w in ladder[0]), ladder[1]
