"""The calls of block lists: views where problems lie evenly, and few of them."""

from unittest import mock

import torch

from flexdilated import masks
from flexdilated.engines.aten import _tile_calls
from flexdilated.engines.aten._tile_calls import BlockRanges, Even, KernelCalls, plan_calls
from flexdilated.masks.planning.lowering._layouts import shared_terms


def calls_of(pattern: masks.Pattern, num_tokens: int, side: int, *, least: int = 1) -> KernelCalls:
    """least: pairs of a problem that is worth a call of its own."""
    bound = pattern.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens)
    (term,) = shared_terms(bound.pattern, 1, bound, 1)
    with mock.patch.object(_tile_calls, "_LEAST_PAIRS", least):
        return plan_calls(term, term.blocks(side, side))


def test_a_band_is_a_view_with_one_mask():
    """All rows but the first few and a last short one: no key is copied, one mask serves all."""
    calls = calls_of(masks.local_window(left=23, right=0), 163, 8, least=2 * 8 * 32)
    longest = max(calls.calls, key=lambda call: len(call.row))
    assert (longest.queries, longest.keys) == (Even(24, 8, 17, 8), Even(0, 8, 17, 32))
    assert longest.masks is not None
    assert len(longest.masks) == 1
    assert all(isinstance(call.keys, Even) for call in calls.calls)
    assert calls.complete
    assert calls.key_slots == 163


def test_rows_that_share_keys_are_a_view():
    """Global keys: tall problems over the same keys, which none of them copies."""
    calls = calls_of(masks.first_tokens(64), 64 * 33, 64)
    most, last = calls.calls if len(calls.calls[0].row) > 1 else calls.calls[::-1]
    assert (most.queries, most.keys, most.masks) == (Even(0, 1024, 2, 1024), Even(0, 0, 2, 64), None)
    assert (last.queries, last.keys, last.masks) == (Even(2048, 64, 1, 64), Even(0, 64, 1, 64), None)


def test_scattered_blocks_are_gathered():
    """Of rows whose masks agree, and of the others with a mask each."""
    places = [[0, 3, 5], [1, 4, 7], [2, 3, 6], [0, 1, 2, 3], [1, 2, 5], [0, 2, 6], [1, 3, 4], [0, 6, 7]]
    pattern = masks.block_list(places, block=8) & masks.local_window(left=30, right=35)
    calls = calls_of(pattern, 64, 8, least=3 * 8 * 24)
    listed = [call for call in calls.calls if isinstance(call.keys, BlockRanges)]
    assert any(call.masks is not None and len(call.masks) == len(call.row) > 1 for call in listed)


def test_a_run_begins_where_the_one_before_it_ends():
    """Bands of other slopes, by rows or by columns, and a stray row between: runs, and the rest together."""
    row = torch.tensor([0, 1, 2, 3, 9, 10, 12, 14, 16, 17, 18, 19])
    first = torch.tensor([0, 1, 2, 3, 0, 5, 6, 7, 8, 9, 10, 11])
    runs = list(_tile_calls._even_runs(row, torch.stack([first, first + 1], 1).int(), 3))
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3], [6, 7, 8], [9, 10, 11], [4, 5]]


def test_lists_of_masks_are_told_apart():
    """Whatever the order of their ids: all lists of five out of four, and the same ones again."""
    ids = torch.cartesian_prod(*[torch.arange(4)] * 5).repeat(2, 1)
    codes = _tile_calls._codes(ids.flatten(), torch.full((len(ids),), 5))
    assert torch.equal(codes[: 4**5], codes[4**5 :])
    assert len(codes.unique()) == 4**5


def test_broken_lists_are_in_no_run():
    columns = torch.tensor([[0, 2], [1, 3], [2, 4]]).int()
    (others,) = _tile_calls._even_runs(torch.arange(3), columns, 1)
    assert others.tolist() == [0, 1, 2]
