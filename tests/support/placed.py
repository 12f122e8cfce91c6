"""Patterns over parts of a sequence: which queries and keys are held, drawn."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.engines._placed_call import PlacedCall
from flexdilated.masks.core import Bound
from flexdilated.masks.core._ranges import Ranges
from flexdilated.masks.orders._placement import Placement
from tests.support import oracle
from tests.support.strategies import longnets, written_expressions
from tests.support.twins import Twin

# H query heads, N positions


@dataclass(frozen=True)
class Part:
    """A pattern over N positions for all heads, where some queries and keys are, and how often each pair counts."""

    twin: Twin
    placement: Placement
    queries: Tensor
    keys: tuple[Tensor, ...]  # positions, once or for each key/value head
    num_kv_heads: int
    num_heads: int

    @property
    def counts(self) -> Tensor:
        """(H, queries, key slots): 0 for room to spare."""
        heads = range(self.num_heads)
        slots = max(map(len, self.keys))
        found = torch.zeros(self.num_heads, len(self.queries), slots, dtype=torch.int64)
        for head in heads:
            keys = self.keys[head // (self.num_heads // self.num_kv_heads) if len(self.keys) > 1 else 0]
            if len(keys) and len(self.queries):
                one = range(head, head + 1)
                found[head, :, : len(keys)] = oracle.counts(self.twin.rule, one, self.num_heads, self.queries, keys)[0]
        return found

    def bind(self) -> Bound:
        numbers = len(self.queries), max(1, *map(len, self.keys)), self.num_heads, 0, self.num_heads
        return Bound(self.twin.pattern, *numbers, 0, 0, batch=1)

    def branches(self) -> tuple[masks.Pattern, ...]:
        return self.twin.pattern.branches()

    def call(self, engine: str = "aten") -> PlacedCall:
        return PlacedCall(self.twin.pattern.text, self.placement, 0.5, 0, self.num_heads, engine)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = [(self.num_heads, len(self.queries)), *[(self.num_kv_heads, max(map(len, self.keys)))] * 2]
        q, k, v = (torch.randn(2, *size, 4, generator=generator, dtype=torch.float64) for size in sizes)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@st.composite
def runs(draw: st.DrawFn, N: int) -> Ranges:
    """One or two runs of step 1 in ascending order."""
    cuts = sorted(draw(st.lists(st.integers(0, N), min_size=2, max_size=4, unique=True)))
    return tuple(range(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False))


def tokens(side: Ranges) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(r.start, r.stop, r.step) for r in side)])


@st.composite
def parts(draw: st.DrawFn, *, complete: bool) -> Part:
    num_heads = draw(st.integers(1, 4))
    twin: Twin = draw(st.one_of(written_expressions(num_heads), longnets()))
    N = draw(st.integers(2, 48))
    G = draw(st.sampled_from([heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]))
    queries = draw(runs(N))
    if not complete:
        keys = (draw(runs(N)),)
        placement = Placement(queries, keys, complete=False, num_tokens=N)
    else:
        own = queries if draw(st.booleans()) else ()
        groups = [range(g * (num_heads // G), (g + 1) * (num_heads // G)) for g in range(G)]
        keys = tuple((*own, *_needed_of_others(draw, twin, queries, N, num_heads, group)) for group in groups)
        assume(any(keys))
        placement = Placement(queries, keys, complete=True, num_tokens=N)
    return Part(twin, placement, tokens(queries), tuple(map(tokens, keys)), G, num_heads)


def _needed_of_others(
    draw: st.DrawFn, twin: Twin, queries: Ranges, N: int, num_heads: int, heads: range
) -> Iterator[range]:
    """In any order, all positions but the queries' own that some query needs, and some that none needs."""
    seen = oracle.counts(twin.rule, heads, num_heads, tokens(queries), torch.arange(N)).bool().any(0).any(0)
    own = set(tokens(queries).tolist())
    extra = draw(st.sets(st.integers(0, N - 1), max_size=3))
    others = sorted((set(seen.nonzero().flatten().tolist()) | extra) - own)
    if draw(st.booleans()):
        others = others[1::2] + others[::2]
    return (range(position, position + 1) for position in others)
