"""Rates of any size: orders, plans and blocks of large and coprime ones, in work that tokens bound, and exact."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import multiplicity
from flexdilated.masks import recipes
from flexdilated.masks.blocks._pair_search import exact_pairs, pairs_of_queries
from flexdilated.masks.core._algebra import And
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.core._check import LARGEST
from flexdilated.masks.core._pattern import Pattern
from flexdilated.masks.inspection._cells import count_cells
from flexdilated.masks.planning._planner import plan
from flexdilated.masks.planning.lowering._layouts import shared_terms
from tests.masks.blocks.test_blocks import in_blocks
from tests.support.twins import Twin

# N tokens

MILLION = 1 << 20
_MOST_LOOKS = 32  # boxes for each pair of tokens that all faces of a pattern together ask about


@st.composite
def numbers(draw: st.DrawFn, least: int = 1) -> int:
    """From 1 to 2**31 - 1, every number of bits as often."""
    bits = draw(st.integers(1, 31))
    return max(least, draw(st.integers(1 << (bits - 1), (1 << bits) - 1)))


def plain(pattern: Pattern, rule: Callable[[Tensor, Tensor], Tensor]) -> Twin:
    """A pattern with its rule in plain arithmetic: the oracles walk over as many tokens as their numbers name."""
    return Twin(pattern, lambda h, H, q, k: rule(q[:, None], k[None]).long())


@st.composite
def leaves(draw: st.DrawFn) -> Twin:
    a, b = draw(numbers()), draw(numbers())
    low, high = min(a, b), max(a, b)
    kinds = [
        plain(masks.causal(), lambda q, k: k <= q),
        plain(masks.strided(a), lambda q, k: (q - k) % a == 0),
        plain(masks.chunked(a), lambda q, k: q // a == k // a),
        plain(masks.fixed(high, summary=low), lambda q, k: (k % high >= high - low) & (q == q)),
        plain(masks.landmark_tokens(a), lambda q, k: (q % a == 0) | (k % a == 0)),
        plain(masks.global_tokens(a), lambda q, k: (q < a) | (k < a)),
        plain(masks.local_window(left=a, right=b), lambda q, k: (k - q >= -a) & (k - q <= b)),
        plain(
            masks.dilated(a, high, low - 1),
            lambda q, k: (q // a == k // a) & (q % a % high == low - 1) & (k % a % high == low - 1),
        ),
        plain(
            masks.dilated_window(left=low, right=b, rate=a),
            lambda q, k: ((k - q) % a == 0) & (k - q >= -low * a) & (k - q <= b * a),
        ),
        plain(masks.blockwise(masks.causal(), a), lambda q, k: k // a <= q // a),
    ]
    return draw(st.sampled_from(kinds))


def ruled() -> st.SearchStrategy[Twin]:
    joins = st.sampled_from([operator.and_, operator.or_, lambda a, b: a & ~b])
    pairs = st.builds(lambda join, a, b: join(a, b), joins, leaves(), leaves())
    return st.one_of(leaves(), pairs, st.builds(lambda join, a, b: join(a, b), joins, pairs, leaves()))


def table_of(case: Twin, num_tokens: int) -> Tensor:
    return case.rule(0, 1, torch.arange(num_tokens), torch.arange(num_tokens)).bool()


def _tensors(num_tokens: int) -> Tensor:
    return torch.randn(3, 1, 1, num_tokens, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _dense(table: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~table, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


def _box_of(num_tokens: int) -> Box:
    return Box(torch.tensor([0]), *[Progression(torch.tensor([0]), 1, torch.tensor([num_tokens]))] * 2)


@settings(max_examples=14)
@given(ruled(), st.integers(1, 96), st.sampled_from([1, 7, 16, 128]))
def test_the_dense_rule_for_any_numbers(case, N, side):
    """Each face of the pattern; boxes that bounds are asked about are few, whatever the numbers."""
    pattern, table = case.pattern, table_of(case, N)
    with pytest.MonkeyPatch.context() as patch:
        masks.cache().clear()
        asked = _boxes_of(patch, type(pattern))
        order = masks.layout(pattern, N)
        assert 1 <= order.rate <= N
        mod = pattern.bind(num_heads=1, num_queries=N, num_keys=N).mask_mod()
        zero, position = torch.tensor(0), torch.arange(N)
        assert torch.equal(mod(zero, zero, position[:, None], position), table)
        for layout in (None, order):
            mask = masks.block_mask(pattern, N, num_heads=1, layout=layout, block_size=side)
            place = position if layout is None else layout.positions()
            pairs = in_blocks(table[place][:, place].long()[None], side, side)
            assert torch.equal(mask.to_dense()[0, 0].bool(), pairs[0] > 0)
        assert int(count_cells(pattern, N, shape=(1, 1)).low.sum()) == int(table.sum())
        assert int(exact_pairs(pattern, _box_of(N))) == int(table.sum())
        q, k, v = _tensors(N)
        expected = _dense(table, q, k, v)
        for layout in (None, order):
            x = [each if layout is None else layout.apply(each) for each in (q, k, v)]
            out = fd.attend(*x, pattern, layout=layout, engine="aten")
            torch.testing.assert_close(out if layout is None else layout.invert(out), expected, rtol=1e-9, atol=1e-9)
        assert sum(asked) < _MOST_LOOKS * (N + 8) ** 2


COPRIME = [
    masks.strided(65537) | masks.strided(65539),
    masks.longnet([64 * r for r in range(6, 60, 4)], list(range(6, 60, 4))),
    masks.strided(LARGEST) | masks.strided(LARGEST - 1) | masks.strided(LARGEST - 2),  # their product is beyond int64
]


@settings(max_examples=10)
@given(ruled().map(lambda case: case.pattern) | st.sampled_from(COPRIME), st.integers(1, 64))
@example(COPRIME[0], 60)
@example(COPRIME[1], 60)
@example(COPRIME[2], 60)
def test_told_and_decoded_for_any_numbers(pattern, N):
    pattern = pattern & masks.causal()
    table = multiplicity(pattern.bind(num_heads=1, num_queries=N, num_keys=N), torch.device("cpu"))[0, 0]
    assert masks.layout(pattern, N).rate <= N
    assert masks.describe(pattern, N, num_heads=1).useful_pairs == int(table.sum())
    assert masks.explain(pattern, query=N - 1, key=0, num_tokens=N).allowed == bool(table[N - 1, 0])
    q, k, v = _tensors(N)
    cache = fd.KVCache(pattern, num_heads=1)
    with torch.no_grad():
        out = torch.cat([cache.attend(*each) for each in zip(*(x.split(1, 2) for x in (q, k, v)), strict=True)], 2)
    expected = fd.attend(q, k, v, pattern, engine="reference")
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def _boxes_of(patch: pytest.MonkeyPatch, kind: type[Pattern]) -> list[int]:
    asked, count = [], kind.count

    def counted(self, box, *, num_heads):
        asked.append(len(box.head))
        return count(self, box, num_heads=num_heads)

    patch.setattr(kind, "count", counted)
    return asked


LARGE_ORDERS = {
    "fixed": (recipes.sparse_transformer_fixed(4096), 1 << 13, 4096),
    "strided": ((masks.strided(4093) | masks.local_window(left=64, right=0)) & masks.causal(), 1 << 13, 4093),
    "summaries": (masks.fixed(1021) & masks.causal(), 1 << 16, 1021),
    "classes alone": (masks.strided(8191) & masks.causal(), 1 << 17, 8191),
}


@pytest.mark.parametrize(("pattern", "N", "rate"), LARGE_ORDERS.values(), ids=LARGE_ORDERS)
def test_classes_of_few_tokens_cost_no_box_a_pair(pattern, N, rate, monkeypatch):
    """Boxes asked about grow with the blocks that are listed, not with pairs of residue classes."""
    bound = pattern.bind(num_heads=1, num_queries=N, num_keys=N)
    (term,) = shared_terms(bound.union, 1, bound, rate)
    asked = _boxes_of(monkeypatch, And)
    blocks = term.blocks(128, 128)
    assert sum(asked) < 32 * len(blocks.row) + 8 * rate
    assert sum(asked) < rate**2 / 16


# At most so many pairs are computed for each that is wanted, over a million tokens; in natural order 64 to 126.
PLANNED = {
    "strided": (masks.strided(9973), 2),
    "strided, causal": (masks.strided(9973) & masks.causal(), 4),
    "strided, composite": (masks.strided(8192) & masks.causal(), 4),
    "fixed": (masks.fixed(9973), 2),
    "fixed, causal": (masks.fixed(9973) & masks.causal(), 4),
    "few tokens in a class": (masks.strided(100_003), 20),
    "window": (masks.dilated_window(left=3, right=3, rate=9973), 32),
}


@pytest.mark.parametrize(("pattern", "most"), PLANNED.values(), ids=PLANNED)
def test_large_strides_compute_little_that_is_not_wanted(pattern, most):
    bound = pattern.bind(num_heads=1, num_queries=MILLION, num_keys=MILLION)
    wanted = int(pairs_of_queries(pattern, torch.tensor([0]), torch.tensor([MILLION]), MILLION))
    assert wanted <= plan(bound).cost.computed_pairs <= most * wanted


def test_draws_beyond_memory_are_refused():
    pattern = masks.random_blocks(LARGEST, block=1, count=10**6)
    with pytest.raises(ValueError, match=r"33554432 in all at most; got count=1000000 for 4 heads and 64 blocks"):
        masks.block_mask(pattern, 64, num_heads=4)
    with pytest.raises(ValueError, match=r"got count=3 for 1 heads and 2147483647 blocks"):
        masks.random_blocks(LARGEST, block=1).mask_mod(num_heads=1, device=torch.device("cpu"))
