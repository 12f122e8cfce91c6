"""What is drawn: patterns beside their dense rules, sizes at the edges, and tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from tests import oracle

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
        return self.pattern.text


@dataclass(frozen=True)
class Case:
    """A pattern with sizes: num_heads of all heads, from head_offset on; queries from q_offset on."""

    twin: Twin
    num_heads: int
    num_queries: int
    num_keys: int
    q_offset: int
    head_offset: int
    num_heads_global: int

    @property
    def sizes(self) -> dict[str, int]:
        """The keywords that `bind` and `attend` share."""
        return {
            "q_offset": self.q_offset,
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
        return oracle.counts(self.twin.rule, self.heads, self.num_heads_global, queries, torch.arange(self.num_keys))


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


leaves = st.one_of(dilated(), dilated(), local_windows(), st.just(Twin(masks.causal(), oracle.causal())))


@st.composite
def sets(draw: st.DrawFn, num_heads: int, depth: int = 2) -> Twin:
    """A set pattern for this many heads, composed up to `depth` levels deep."""
    kind = draw(st.sampled_from(["leaf", "leaf", "and", "or", "not", "per_head", "grouped"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves)
    if kind == "grouped":
        return draw(longnets("grouped", max_branches=num_heads))
    number = {"not": 1, "per_head": num_heads}.get(kind, 2)
    parts = [draw(sets(num_heads, depth - 1)) for _ in range(number)]
    patterns, rules = [part.pattern for part in parts], [part.rule for part in parts]
    edges = tuple(edge for part in parts for edge in part.edges)
    if kind == "and":
        return Twin(patterns[0] & patterns[1], oracle.both(*rules), edges)
    if kind == "or":
        return Twin(patterns[0] | patterns[1], oracle.either(*rules), edges)
    if kind == "not":
        return Twin(~patterns[0], oracle.neither(*rules), edges)
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


@st.composite
def lengths(draw: st.DrawFn, edges: tuple[int, ...], largest: int = 48) -> int:
    """1 often; one less and one more than a multiple of an edge; any."""
    around = draw(st.sampled_from(edges)) * draw(st.integers(1, 4)) + draw(st.integers(-1, 1))
    return draw(st.sampled_from([1, min(max(around, 1), largest), draw(st.integers(1, largest))]))


@st.composite
def cases(draw: st.DrawFn, twins=expressions, max_heads: int = 5, largest: int = 48) -> Case:
    """A pattern with sizes: self-attention, or some of the heads and any queries over any keys."""
    H = draw(st.integers(1, max_heads))
    twin = draw(twins(H))
    first = draw(st.integers(0, H - 1)) if draw(st.booleans()) else 0
    here = draw(st.integers(1, H - first))
    M = draw(lengths(twin.edges, largest))
    if draw(st.booleans()):
        return Case(twin, H, M, M, 0, 0, H)
    N = draw(lengths(twin.edges, largest))
    return Case(twin, here, N, M, draw(st.integers(0, largest)), first, H)


@st.composite
def tensors(draw: st.DrawFn, case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v for a case, with gradients wanted: grouped heads and both memory formats drawn."""
    H = case.num_heads
    G = draw(st.sampled_from([heads for heads in range(1, H + 1) if H % heads == 0]))
    B, D = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 8]))
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
    H = draw(st.integers(1, max_heads))
    twin = draw(twins(H))
    N = draw(lengths(twin.edges, largest))
    return Case(twin, H, N, N, 0, 0, H)


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
