"""Blocks of one number allow the same places, in every order of tokens; of unions they are few, however many blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.blocks import BlockPlaces, alike, evaluate
from flexdilated.masks.planning.lowering._layouts import compact_terms, shared_terms
from flexdilated.masks.planning.lowering._term import Term
from tests.masks.orders.test_tiling import in_tiles, tiled_cases
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import block_sides, cases, sets


def assert_alike(term: Term, q_block: int, k_block: int) -> int:
    """How many kinds of blocks there are, where all blocks of each are checked to be the same."""
    rule, shape = term.table_rule(), (term.q.num_slots, term.k.num_slots, q_block, k_block)
    sides = [-(-slots // side) for slots, side in zip(shape[:2], shape[2:], strict=True)]
    everywhere = [torch.arange(number) for number in (len(rule.heads), *sides)]
    places = BlockPlaces(*torch.cartesian_prod(*everywhere).unbind(1))
    number, one_of_each = alike(rule, places, shape)
    tiles = torch.cat(list(evaluate(rule, places, shape)))
    assert torch.equal(number[one_of_each], torch.arange(len(one_of_each)))
    assert torch.equal(tiles[one_of_each][number], tiles)
    return len(one_of_each)


@given(cases(sets), st.integers(1, 7), block_sides, block_sides)
def test_blocks_of_a_number_are_the_same(case, rate, q_block, k_block):
    bound = case.bind()
    terms = shared_terms(case.twin.pattern, 1, bound, rate) + (compact_terms(case.twin.pattern, 1, bound) or [])
    for term in terms:
        assert_alike(term, q_block, k_block)


@settings(max_examples=14)
@given(packed_cases(), st.integers(1, 3), block_sides)
def test_with_run_time_tensors(case, rate, side):
    for entry in range(case.batch):
        bound = case.bind().entry(entry)
        for branch in dict.fromkeys(bound.pattern.branches()):
            for term in shared_terms(branch, 1, bound, rate):
                assert_alike(term, side, side)


@given(tiled_cases(), block_sides, block_sides)
def test_in_tiles(drawn, q_block, k_block):
    assert_alike(in_tiles(*drawn), q_block, k_block)


PARTS = masks.local_window(left=16, right=16), masks.dilated_window(left=4, right=4, rate=16), masks.global_tokens(3)


@pytest.mark.parametrize(
    "pattern", [PARTS[0] | PARTS[1] | PARTS[2], PARTS[2] & ~PARTS[0] & ~PARTS[1]], ids=["union", "rest"]
)
def test_kinds_do_not_grow_with_the_sequence(pattern):
    """Global tokens have no period; far from both windows and from them all blocks are alike."""
    kinds = []
    for num_tokens in (1024, 2048):
        bound = pattern.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens)
        kinds.append(assert_alike(shared_terms(pattern, 1, bound, 1)[0], 16, 16))
    assert kinds[0] == kinds[1] < 80


def test_kinds_of_tiles_do_not_grow_with_the_grid():
    kinds = []
    for length in (16, 32):
        pattern = masks.neighborhood((8, length, length), (1, 2, 1))
        bound = pattern.bind(num_heads=1, num_queries=8 * length**2, num_keys=8 * length**2)
        order = masks.orders.Tiling(pattern.grid, (2, 4, 4))
        (term,) = shared_terms(pattern, 1, bound, 1)
        tiled = Term.of(bound, pattern, "blocks", 1, order, order, heads=term.heads)
        if length == 16:
            assert_alike(tiled, 32, 32)
        places = tiled.blocks(32, 32)
        partial = (~places.full).nonzero().squeeze(1)
        kinds.append(len(alike(tiled.table_rule(), places.places(partial), places.shape)[1]))
    assert kinds[1] == kinds[0]
