"""Tiled order: a permutation of a grid's tokens, over which neighbourhoods are counted exactly and compute less."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.blocks import UNKNOWN
from flexdilated.masks.orders import _tiling
from flexdilated.masks.orders._tiling import Tiled, Tiling
from flexdilated.masks.patterns._neighborhood import Neighborhood
from flexdilated.masks.planning._planner import plan
from flexdilated.masks.planning.lowering._layouts import best_tiles, shared_terms
from tests.masks.blocks.test_blocks import assert_alike, assert_lists, in_blocks
from tests.support import oracle
from tests.support.agreement import assert_agrees
from tests.support.strategies import Case, block_sides, whole_grids


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


def whole(grid: tuple[int, ...], radius: int | tuple[int, ...], num_heads: int = 1) -> masks.Bound:
    tokens = prod(grid)
    return masks.neighborhood(grid, radius).bind(num_heads=num_heads, num_queries=tokens, num_keys=tokens)


@given(tilings())
def test_order_is_tile_by_tile(order):
    def key(token: int) -> list[int]:
        sides = list(zip(places[token], order.tile, strict=True))
        return [at // side for at, side in sides] + [at % side for at, side in sides]

    places, tokens = list(product(*map(range, order.grid))), list(range(order.num_slots))
    assert order.positions().tolist() == sorted(tokens, key=key)
    assert order.slots()[order.positions()].tolist() == tokens
    assert order.is_natural == (order.positions().tolist() == tokens)


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
        (masks.neighborhood((256, 256), 3), 21.4, 36),
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


GRID, RADIUS = (6, 14, 18), 2


@pytest.fixture
def pairs_decide():
    """One rate for all lists: then the order that computes the fewest pairs is chosen."""
    masks.set_machine(replace(masks.machine(), blocks=(masks.BlockRates(128, 1e9, 1e9, 1e9),)))
    yield
    masks.set_machine(None)


def test_attend_in_tiles_is_the_oracle(pairs_decide):
    """Chosen by the planner: tokens go in and come out in row-major order, and so do gradients."""
    bound = whole(GRID, RADIUS, num_heads=2)
    assert plan(bound).options[0][0].layout == "tiled 4x2x16"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 1512, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (2, 1, 1)
    )

    def attend(q, k, v):
        return fd.attend(q, k, v, bound.pattern, scale=0.5, enable_gqa=True, engine="aten", return_lse=True)

    token, zero = torch.arange(1512), torch.tensor(0)
    table = bound.mask_mod()(zero, zero, token[:, None], token[None]).long()  # held to its definition elsewhere
    assert_agrees(attend, (q, k, v), table.expand(2, -1, -1), scale=0.5)
