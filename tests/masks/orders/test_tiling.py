"""Tiled order: a permutation of a grid's tokens, over which neighbourhoods are counted exactly and compute less."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._call import Call
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.orders._tiling import Tiled, Tiling
from flexdilated.masks.patterns._neighborhood import Neighborhood
from flexdilated.masks.planning._planner import plan
from flexdilated.masks.planning.lowering._layouts import best_tiles, shared_terms, tiled_terms
from flexdilated.masks.planning.lowering._term import Term
from tests.engines.test_flex import attend_by
from tests.support import oracle
from tests.support.agreement import assert_agrees
from tests.support.strategies import Case, block_sides, whole_grids

RUNS = 40


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


def in_tiles(case: Case, order: Tiling) -> Term:
    (term,) = shared_terms(case.twin.pattern, 1, case.bind(), 1)
    return replace(term, q=order, k=order)


def runs(draw: st.DrawFn, slots: int) -> Progression:
    """Runs of slots, some of them empty."""
    ends = st.lists(st.integers(0, slots), min_size=2, max_size=2).map(sorted)
    first, stop = torch.tensor(draw(st.lists(ends, min_size=RUNS, max_size=RUNS))).unbind(1)
    return Progression(first, 1, stop - first)


def places(order: Tiling) -> list[tuple[int, ...]]:
    """The coordinates of each token."""
    return list(product(*map(range, order.grid)))


def dense(term: Term) -> Tensor:
    """The rule over slots, from its definition."""
    assert isinstance(term.q, Tiling)
    rule, positions = term.rule, term.q.positions()
    assert isinstance(rule, Neighborhood)
    return oracle.neighborhood([astuple(axis) for axis in rule.axes])(0, 1, positions, positions)


def natural(term: Term) -> Term:
    tokens = masks.Layout(term.q.num_slots)
    return replace(term, q=tokens, k=tokens)


def whole(grid: tuple[int, ...], radius: int | tuple[int, ...], num_heads: int = 1) -> masks.Bound:
    tokens = prod(grid)
    return masks.neighborhood(grid, radius).bind(num_heads=num_heads, num_queries=tokens, num_keys=tokens)


def chosen(bound: masks.Bound) -> str:
    return plan(bound).options[0][0].layout


# --- the permutation ---


@given(tilings())
def test_order_is_tile_by_tile(order):
    def key(token: int) -> list[int]:
        place = places(order)[token]
        sides = list(zip(place, order.tile, strict=True))
        return [at // side for at, side in sides] + [at % side for at, side in sides]

    tokens = list(range(order.num_slots))
    assert order.positions().tolist() == sorted(tokens, key=key)
    assert order.slots()[order.positions()].tolist() == tokens
    assert order.is_natural == (order.positions().tolist() == tokens)


# --- the rule over slots ---


@settings(max_examples=10)
@given(tiled_cases(), st.data())
def test_counts_are_exact(drawn, data):
    case, order = drawn
    table = dense(in_tiles(case, order))
    box = Box(torch.zeros(RUNS, dtype=torch.int64), *(runs(data.draw, order.num_slots) for _ in range(2)))
    sides = [(side.first.tolist(), (side.first + side.count).tolist()) for side in (box.q, box.k)]
    truth = [int(table[a:b, c:d].sum()) for a, b, c, d in zip(*sides[0], *sides[1], strict=True)]
    found = Tiled(case.twin.pattern, order).count(box, num_heads=1)
    assert found.low.tolist() == found.high.tolist() == truth


@settings(max_examples=12)
@given(tiled_cases())
def test_the_rule_is_the_neighbourhood_at_its_positions(drawn):
    term = in_tiles(*drawn)
    slot, zero, table = torch.arange(term.q.num_slots), torch.tensor(0), dense(term).bool()
    of_builder = Tiled(term.rule, term.q).mask_mod(num_heads=1, device=torch.device("cpu"))
    for mask_mod in (of_builder, term.mask_mod(torch.device("cpu"))):
        assert torch.equal(mask_mod(zero, zero, slot[:, None], slot[None]), table)


@settings(max_examples=12)
@given(tiled_cases(), block_sides, block_sides)
def test_blocks_are_those_of_the_dense_rule(drawn, q_block, k_block):
    term = in_tiles(*drawn)
    blocks, table = term.blocks(q_block, k_block), dense(term)
    rows, columns = (table.split(side, dim) for side, dim in ((q_block, 0), (k_block, 1)))
    held = {
        (row, column): (int(part.sum()), part.shape == (q_block, k_block) and bool(part.all()))
        for row in range(len(rows))
        for column in range(len(columns))
        if (part := rows[row][:, column * k_block : (column + 1) * k_block]).any()
    }
    listed = zip(*(x.tolist() for x in (blocks.row, blocks.column, blocks.pairs, blocks.full)), strict=True)
    assert {(row, column): (pairs, full) for row, column, pairs, full in listed} == held
    assert set(blocks.heads) == {0}


def test_many_boxes_are_counted_a_part_at_a_time(monkeypatch):
    (term,) = tiled_terms(whole((8, 12), 2).pattern, 1, whole((8, 12), 2)).popitem()[1]
    expected = term.blocks(8, 8)
    monkeypatch.setattr("flexdilated.masks.orders._tiling._RUNS_AT_ONCE", 7)
    found = term.blocks(8, 8)
    assert torch.equal(found.pairs, expected.pairs)
    assert torch.equal(found.column, expected.column)


# --- what it is for ---


@pytest.mark.parametrize(
    ("grid", "radius", "most", "in_rows"),
    [
        ((256, 256), 3, 21.4, 36),
        ((250, 262), 15, 2.4, 8.4),  # no tile of 128 tokens divides it
        ((9, 40, 45), (3, 7, 7), 2.2, 4),
    ],
)
def test_less_is_computed_in_vain(grid, radius, most, in_rows):
    """Pairs in blocks of 128, over pairs allowed, 16 K to 64 K tokens: in tiles, and in row-major order."""
    bound = whole(grid, radius)
    found = masks.describe(bound.pattern, prod(grid), num_heads=1)
    (term,) = plan(bound).terms
    assert isinstance(term.q, Tiling)
    assert found.waste < most
    assert len(natural(term).blocks(128, 128, settle=False).row) * 128**2 / found.useful_pairs > in_rows


def test_a_torus_costs_little_more_than_a_box():
    """Windows of 5 x 5 x 5 tokens that wrap meet only few more blocks than windows that are shifted at the ends."""
    grid = (15, 16, 17)
    box, torus = (masks.neighborhood(grid, 2, wrap=wrap) for wrap in (False, True))
    found = [masks.describe(each, prod(grid), num_heads=2).waste for each in (box, torus)]
    assert found[0] < found[1] < 1.25 * found[0]
    (term,) = plan(torus.bind(num_heads=2, num_queries=prod(grid), num_keys=prod(grid))).terms
    assert isinstance(term.q, Tiling)


@pytest.mark.parametrize(
    "pattern",
    [
        masks.neighborhood((64, 32), (1, 9)),
        masks.neighborhood((64, 32), kernel_size=(12, 8), stride=(3, 8)),
        masks.neighborhood((64, 64), kernel_size=(17, 6), stride=(1, 6), causal=(True, True)),
        masks.neighborhood((8, 16, 32), kernel_size=(4, 8, 8), stride=(1, 4, 8), causal=(True, False, False)),
        masks.neighborhood((64, 32), (9, 2), wrap=True),
        masks.neighborhood((8, 16, 32), kernel_size=(4, 7, 8), stride=(1, 1, 8), wrap=(False, True, True)),
    ],
)
def test_the_best_tile_is_found_by_counting(pattern):
    """Of all tiles of 128 tokens that divide the grid, none lists fewer blocks."""
    grid = pattern.grid
    bound = pattern.bind(num_heads=1, num_queries=prod(grid), num_keys=prod(grid))
    (term,) = shared_terms(bound.pattern, 1, bound, 1)

    def listed(tile: tuple[int, ...]) -> int:
        order = Tiling(grid, tile)
        return len(replace(term, q=order, k=order).blocks(128, 128).row)

    sides = [[1 << power for power in range(8) if 1 << power <= length] for length in grid]
    every = [tile for tile in product(*sides) if prod(tile) == 128]
    (best,) = best_tiles(bound.pattern)
    assert listed(best) == min(map(listed, every)) < max(map(listed, every))


def test_only_whole_grids_are_tiled():
    pattern = masks.neighborhood((60, 70), 2)

    def tiles_of(expression: masks.Pattern | masks.Mixture, tokens: int = 4200, **offsets: int) -> list[str]:
        bound = expression.bind(num_heads=2, num_queries=tokens, num_keys=tokens)
        options = plan(replace(bound, **offsets)).options
        return [option.layout for each in options for option in each if option.layout.startswith("tiled")]

    assert sorted(tiles_of(pattern)) == ["tiled 2x64", "tiled 32x4"]
    assert tiles_of(pattern, 4199) == []
    assert tiles_of(pattern, 4200, q_offset=1) == tiles_of(pattern, 4200, k_offset=1) == []
    assert tiles_of(pattern, 4200, num_keys=4100) == []
    assert tiles_of(pattern & masks.causal()) == []
    assert tiles_of(pattern + masks.causal()) == tiles_of(pattern)
    # In one line, and where a row of the grid is the best tile, the natural order is tiled already.
    assert tiles_of(masks.neighborhood((4200,), 9)) == []
    assert tiles_of(masks.neighborhood((35, 128), (0, 5)), 35 * 128) == []


# --- attention ---

GRID, RADIUS = (6, 14, 18), 2


@pytest.fixture
def pairs_decide():
    """One rate for all lists: then the order that computes the fewest pairs is chosen."""
    masks.set_machine(replace(masks.machine(), blocks=(masks.BlockRates(128, 1e9, 1e9, 1e9),)))
    yield
    masks.set_machine(None)


def counts_of(bound: masks.Bound) -> Tensor:
    """(H, N, N): the rule as FlexAttention would take it, which the pattern's own tests hold to its definition."""
    token, zero = torch.arange(bound.num_queries), torch.tensor(0)
    table = bound.mask_mod()(zero, zero, token[:, None], token[None]).long()
    return table.expand(bound.num_heads, -1, -1)


def test_attend_in_tiles_is_the_oracle(pairs_decide):
    """Chosen by the planner: tokens go in and come out in row-major order, and so do gradients."""
    bound = whole(GRID, RADIUS, num_heads=2)
    assert chosen(bound) == "tiled 4x2x16"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 1512, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (2, 1, 1)
    )

    def attend(q, k, v):
        return fd.attend(q, k, v, bound.pattern, scale=0.5, enable_gqa=True, engine="aten", return_lse=True)

    assert_agrees(attend, (q, k, v), counts_of(bound), scale=0.5)


def test_flex_in_tiles(pairs_decide):
    bound = whole(GRID, RADIUS, num_heads=2)
    q, k, v = torch.randn(3, 1, 2, 1512, 16, generator=torch.Generator().manual_seed(0))

    def nearer(score, b, h, q_idx, k_idx):
        return score - 0.01 * (q_idx - k_idx).abs()

    key = Call(bound.pattern.text, 2, 2, 1512, 1512, 0, 0, 0, 2, 1, (32, 32))
    found = attend_by(key, 0.25, score_mod=nearer)(q, k, v)
    expected = fd.attend(q, k, v, bound.pattern, engine="reference", score_mod=nearer, return_lse=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
