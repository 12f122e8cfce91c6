"""What our tests draw: the public strategies' patterns as twins, with the sizes and tensors of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.testing import strategies as fst
from flexdilated.testing._drawn_patterns import Grammar, leaf
from flexdilated.testing._drawn_patterns import whole_grids as whole_neighborhoods
from tests.support import oracle, twins
from tests.support.twins import Twin

LARGEST = 24  # of the numbers that patterns are written with
POSITIONS = 120  # no test draws more

# H query heads, N queries, M keys


class Sizes(Protocol):
    """What tensors are drawn for."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_queries(self) -> int: ...
    @property
    def num_keys(self) -> int: ...


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

    @classmethod
    def of(cls, twin: Twin, sizes: fst.AttentionSizes) -> Case:
        return cls(twin, sizes.num_heads, sizes.num_queries, sizes.num_keys, **sizes.places)

    @classmethod
    def whole(cls, twin: Twin, H: int, N: int) -> Case:
        """Self-attention of all heads, from position 0."""
        return cls(twin, H, N, N, 0, 0, 0, H)

    @property
    def sizes(self) -> dict[str, int]:
        """The keywords that `bind` and `attend` share."""
        return {
            "q_offset": self.q_offset,
            "k_offset": self.k_offset,
            "head_offset": self.head_offset,
            "num_heads_global": self.num_heads_global,
        }

    def from_zero(self) -> Case:
        """The same of all heads over positions from 0 on."""
        return replace(self, num_heads=self.num_heads_global, q_offset=0, k_offset=0, head_offset=0)

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


block_sides = st.sampled_from([1, 2, 3, 4, 5, 8, 16])


def grammar(num_heads: int = 1, *, closures: bool = True) -> Grammar:
    return Grammar(num_heads, LARGEST, POSITIONS, closures, words=twins)


leaves: st.SearchStrategy[Twin] = grammar().leaves()
dilated = partial(leaf, twins, LARGEST, "dilated")
local_windows = partial(leaf, twins, LARGEST, "window")
dilated_windows = partial(leaf, twins, LARGEST, "dilated window")
strided_kinds = partial(leaf, twins, LARGEST, "strided")
global_kinds = partial(leaf, twins, LARGEST, "global")
random_blocks = partial(leaf, twins, LARGEST, "random blocks")
block_lists = partial(leaf, twins, LARGEST, "block list")
neighborhoods = partial(leaf, twins, POSITIONS, "grid")
functions = partial(leaf, twins, LARGEST, "function")


def longnets() -> st.SearchStrategy[Twin]:
    return grammar().longnets()


def sets(num_heads: int, depth: int = 2) -> st.SearchStrategy[Twin]:
    """A set pattern for this many heads, composed up to `depth` levels deep."""
    return grammar(num_heads).sets(depth)


def mixtures(num_heads: int) -> st.SearchStrategy[Twin]:
    """A LongNet, causal or not, or a set; half of the time plus one more set or itself."""
    return grammar(num_heads).mixtures()


def expressions(num_heads: int) -> st.SearchStrategy[Twin]:
    """Sets and mixtures."""
    return grammar(num_heads).patterns()


def written_expressions(num_heads: int) -> st.SearchStrategy[Twin]:
    """Those that can be written down: without custom functions."""
    return grammar(num_heads, closures=False).patterns()


@st.composite
def causal_twins(draw: st.DrawFn, num_heads: int) -> Twin:
    """Any expression, with causal order."""
    return draw(expressions(num_heads)) & twins.causal()


@st.composite
def whole_grids(draw: st.DrawFn, max_heads: int = 4) -> Case:
    """Self-attention of every token of a small grid: a neighbourhood, in half of the cases beside another set."""
    twin = draw(whole_neighborhoods(twins, 48))
    N = prod(twin.pattern.grid)
    if draw(st.booleans()):
        other = draw(local_windows())
        twin = twin + other if draw(st.booleans()) else twin | other
    return Case.whole(twin, draw(st.integers(1, max_heads)), N)


@st.composite
def cases(
    draw: st.DrawFn, patterns: Any = expressions, max_heads: int = 5, largest: int = 48, *, whole: bool = False
) -> Case:
    """A pattern with sizes: self-attention, or, unless `whole`, some of the heads and any queries over any keys."""
    if patterns is expressions and draw(st.integers(0, 9)) == 5:
        return draw(whole_grids(max_heads))
    H = draw(st.integers(1, max_heads))
    twin = draw(patterns(H))
    kinds = {"self_attention": whole, "all_heads": whole}
    options = {"num_heads": H, "max_tokens": largest, "blocks": twin.edges}
    return Case.of(twin, draw(fst.attention_sizes(twin.pattern, **options, **kinds)))


whole_cases = partial(cases, max_heads=4, whole=True)


@st.composite
def tensors(
    draw: st.DrawFn,
    case: Sizes,
    dtype: torch.dtype = torch.float64,
    batch: int | None = None,
    *,
    one_width: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v for a case, with gradients wanted: grouped heads, a memory layout of each and the width of v drawn."""
    sizes = draw(fst.attention_sizes(num_heads=case.num_heads, max_tokens=1))
    sizes = replace(sizes, batch=batch or sizes.batch, num_queries=case.num_queries, num_keys=case.num_keys)
    how = {"dtype": dtype, "values": ["ordinary"], "requires_grad": True}
    q, k, v = draw(fst.attention_inputs(sizes, **how))
    if not one_width and draw(st.booleans()):
        _, _, v = draw(fst.attention_inputs(replace(sizes, head_dim=draw(st.integers(1, 12))), **how))
    return q, k, v


def sinks(num_heads: int) -> st.SearchStrategy[Tensor]:
    """Of each head none at all, one that takes next to nothing, an ordinary one, or one that takes all."""
    logit = st.one_of(st.sampled_from([-torch.inf, -50.0, 0.0, 50.0]), st.floats(-3, 3))
    logits = st.lists(logit, min_size=num_heads, max_size=num_heads)
    return logits.map(lambda values: torch.tensor(values, dtype=torch.float64, requires_grad=True))


@st.composite
def inputs(draw: st.DrawFn, case: Sizes) -> tuple[Tensor, ...]:
    """q, k, v and, half of the time, sinks."""
    qkv = draw(tensors(case))
    return (*qkv, draw(sinks(case.num_heads))) if draw(st.booleans()) else qkv
