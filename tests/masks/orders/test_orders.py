"""Orders of tokens: layouts and tiles, their inverses and what they cost; rates of any size, exact."""

import operator
from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import multiplicity
from flexdilated.masks.blocks import UNKNOWN
from flexdilated.masks.blocks._pair_search import exact_pairs
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.core._check import LARGEST
from flexdilated.masks.core._pattern import Pattern
from flexdilated.masks.inspection._cells import count_cells
from flexdilated.masks.orders import _tiling
from flexdilated.masks.orders._tiling import Tiled, Tiling
from flexdilated.masks.patterns._neighborhood import Neighborhood
from flexdilated.masks.planning._planner import plan
from flexdilated.masks.planning.lowering._layouts import shared_terms
from tests.masks.blocks.test_blocks import assert_alike, assert_lists, in_blocks
from tests.support import oracle
from tests.support.agreement import assert_agrees
from tests.support.strategies import Case, block_sides, whole_grids
from tests.support.twins import Twin

# N tokens


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    """Small grids of 1 to 3 axes with tiles that need not divide them, or reach beyond them."""
    grid = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    return Tiling(tuple(grid), tuple(draw(st.integers(1, 8)) for _ in grid))


@st.composite
def tiled_cases(draw: st.DrawFn) -> tuple[Case, Tiling]:
    """A neighbourhood in any tiles at all, not only those that the planner would take."""
    case = draw(whole_grids().filter(lambda case: isinstance(case.twin.pattern, Neighborhood)))
    grid = case.twin.pattern.grid
    return case, Tiling(grid, tuple(draw(st.integers(1, length + 1)) for length in grid))


@given(tilings())
def test_order_is_tile_by_tile(order):
    def key(token: int) -> list[int]:
        sides = list(zip(places[token], order.tile, strict=True))
        return [at // side for at, side in sides] + [at % side for at, side in sides]

    places, tokens = list(product(*map(range, order.grid))), list(range(order.num_slots))
    assert order.positions().tolist() == sorted(tokens, key=key)
    assert order.slots()[order.positions()].tolist() == tokens
    assert order.is_natural == (order.positions().tolist() == tokens)


@settings(max_examples=10)
@given(tiled_cases(), block_sides, block_sides, st.sampled_from([7, 1 << 14]))
def test_blocks_and_their_rule_are_the_neighbourhood_at_its_positions(drawn, q_block, k_block, at_once):
    """Also where boxes are counted a few at a time; counts are exact, so no pair is looked at."""
    case, order = drawn
    (term,) = shared_terms(case.twin.pattern, 1, case.bind(), 1)
    term, positions = replace(term, q=order, k=order), order.positions()
    table = oracle.neighborhood([astuple(axis) for axis in term.rule.axes])(0, 1, positions, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tiling, "_RUNS_AT_ONCE", at_once)
        blocks = term.blocks(q_block, k_block, settle=False)
        assert_lists(blocks, in_blocks(table.expand(case.num_heads, -1, -1), q_block, k_block))
        assert (blocks.pairs != UNKNOWN).all()
    assert_alike(term, q_block, k_block)
    slot, zero = torch.arange(order.num_slots), torch.tensor(0)
    of_builder = Tiled(term.rule, order).mask_mod(num_heads=1, device=torch.device("cpu"))
    for mask_mod in (of_builder, term.mask_mod(torch.device("cpu"))):
        assert torch.equal(mask_mod(zero, zero, slot[:, None], slot[None]), table.bool())


@pytest.mark.parametrize(
    ("pattern", "most", "in_rows"),
    [
        (masks.neighborhood((250, 262), 15), 2.4, 8.4),  # no tile of 128 tokens divides it
        (masks.neighborhood((9, 40, 45), (3, 7, 7)), 2.2, 4),
        (masks.neighborhood((15, 16, 17), 2, wrap=True), 5.5, 12),  # without wrap 4.6
    ],
)
def test_less_is_computed_in_vain(pattern, most, in_rows):
    """Pairs in blocks of 128, over pairs allowed, 4 K to 64 K tokens: in tiles, and in row-major order."""
    tokens = prod(pattern.grid)
    bound = pattern.bind(num_heads=1, num_queries=tokens, num_keys=tokens)
    found = masks.describe(pattern, tokens, num_heads=1)
    (term,) = plan(bound).terms
    assert isinstance(term.q, Tiling)
    assert found.waste < most
    rows = masks.Layout(tokens)
    natural = replace(term, q=rows, k=rows)
    assert len(natural.blocks(128, 128, settle=False).row) * 128**2 / found.useful_pairs > in_rows


@pytest.fixture
def pairs_decide():
    """One rate for all lists: then the order that computes the fewest pairs is chosen."""
    masks.set_machine(replace(masks.machine(), blocks=(masks.BlockRates(128, 1e9, 1e9, 1e9),)))
    yield
    masks.set_machine(None)


def test_attend_in_tiles_is_the_oracle(pairs_decide):
    """Chosen by the planner: tokens go in and come out in row-major order, and so do gradients."""
    bound = masks.neighborhood((6, 14, 18), 2).bind(num_heads=2, num_queries=1512, num_keys=1512)
    assert plan(bound).chosen[0].layout == "tiled 4x2x16"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 1512, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (2, 2, 2)
    )

    def attend(*tensors):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)  # tokens are outermost
        return fd.attend(q, k, v, bound.pattern, scale=0.5, enable_gqa=True, engine="aten", return_lse=True)

    token, zero = torch.arange(1512), torch.tensor(0)
    table = bound.mask_mod()(zero, zero, token[:, None], token[None]).long()  # held to its definition elsewhere
    assert_agrees(attend, (q, k, v), table.expand(2, -1, -1), scale=0.5)


tokens, layout_rates = st.integers(1, 70), st.integers(1, 12)


@given(tokens, layout_rates)
def test_order_is_residue_major(N, rate):
    expected = sorted(range(N), key=lambda token: (token % rate, token // rate))
    assert masks.Layout(N, rate).positions().tolist() == expected


@given(st.one_of(st.builds(masks.Layout, tokens, layout_rates), tilings()), st.sampled_from([0, 1, 2, -1, -2, -3]))
def test_invert_undoes_apply(layout, dim):
    N, shape = layout.num_slots, [2, 3, 4]
    shape[dim] = N
    assert layout.slots()[layout.positions()].tolist() == list(range(N))
    x = torch.randn(shape)
    assert torch.equal(layout.invert(layout.apply(x, dim=dim), dim=dim), x)
    assert torch.equal(layout.apply(layout.invert(x, dim=dim), dim=dim), x)
    assert torch.equal(layout.apply(x, dim=dim), x.index_select(dim, layout.positions()))


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
