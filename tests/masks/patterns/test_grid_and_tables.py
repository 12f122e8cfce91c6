"""Random blocks, block lists and neighbourhoods: the draw, laws, bounds of large tables, rows."""

import json
from dataclasses import astuple
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.orders._layout import Layout
from flexdilated.masks.patterns import _block_list
from tests.masks.core.test_boxes import BOXES, allowed, assert_sound, progressions
from tests.masks.patterns.test_patterns import evaluated
from tests.support import oracle
from tests.support.strategies import block_lists, neighborhoods, random_blocks
from tests.support.twins import Twin

CPU = torch.device("cpu")


# --- the draw ---


def drawn(pattern: masks.Pattern, head: int, row: int, block: int, num_tokens: int) -> list[int]:
    """The key blocks that one row of blocks sees."""
    mod = pattern.mask_mod(num_heads=head + 1, device=torch.device("cpu"))
    keys = torch.arange(0, num_tokens, block)
    seen = mod(torch.tensor(0), torch.tensor(head), torch.tensor(row * block), keys)
    return (keys[seen] // block).tolist()


def test_the_draw_is_pinned():
    """These numbers never change: a checkpoint's pattern means the same everywhere, on every rank and version."""
    pattern = masks.random_blocks(1 << 20)
    assert [drawn(pattern, 0, row, 64, 1 << 20) for row in range(3)] == [
        [2123, 5088, 6755],
        [6312, 12378, 13562],
        [1510, 11982, 12161],
    ]
    assert [drawn(pattern, 1, row, 64, 1 << 20) for row in range(3)] == [
        [801, 13374, 15720],
        [3597, 7668, 13858],
        [616, 983, 8983],
    ]
    pattern = masks.random_blocks(6, block=1, count=2, seed=7)
    assert [drawn(pattern, 5, row, 1, 6) for row in range(6)] == [[3, 5], [3, 4], [4, 5], [2, 5], [4, 5], [2, 4]]


# --- block lists ---


def test_tensors_are_tables():
    chosen = torch.tensor([[[True, False, True], [False, False, False]], [[False, True, False], [True, True, True]]])
    rows = [[[0, 2], []], [[1], [0, 1, 2]]]
    assert masks.block_list(chosen, block=4) == masks.block_list(rows, block=4)
    assert masks.block_list(chosen[0], block=4) == masks.block_list(rows[0], block=4)
    numbers = torch.tensor([[[2, 0]], [[1, 2]]])
    assert masks.block_list(numbers.int(), block=4) == masks.block_list([[[0, 2]], [[1, 2]]], block=4)
    assert masks.block_list(numbers[0], block=4) == masks.block_list([range(0, 3, 2)], block=4)


def test_a_table_a_head():
    tables = [[[0, 3], [1]], [[2]], [[], [0], [1, 2]]]
    bound = masks.block_list(tables, block=3).bind(num_heads=2, num_queries=11, num_keys=11, head_offset=1)
    queries = torch.arange(11)
    assert torch.equal(
        evaluated(bound).long(), oracle.counts(oracle.block_list(tables, 3), range(1, 3), 3, queries, queries)
    )
    (last,) = masks.block_mask(masks.block_list(tables, block=3), 11, num_heads=3, block_size=3).to_dense()[0, 2:]
    assert last.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_long_rows_are_searched():
    """Rows of more blocks than are compared one by one, beside short and empty ones."""
    rows = [range(0, 40, 3), range(1, 40, 2), [5], [], range(40)]
    mask = evaluated(masks.block_list(rows, block=2).bind(num_heads=1, num_queries=10, num_keys=81))
    expected = oracle.counts(oracle.block_list([rows], 2), range(1), 1, torch.arange(10), torch.arange(81))
    assert torch.equal(mask.long(), expected)


def test_the_order_of_a_row_does_not_matter():
    one, other = masks.block_list([[2, 0, 1]], block=4), masks.block_list(((0, 1, 2),), block=4)
    assert one == other
    assert hash(one) == hash(other)
    assert one != masks.block_list([[0, 1]], block=4)
    assert one != masks.block_list([[0, 1, 2]], block=5)


@given(block_lists())
def test_the_text_is_canonical_json(twin):
    """Written without looking at the numbers one by one, as tables can be large."""
    for pattern in (twin.pattern, masks.block_list([twin.pattern.rows, ((),)], block=3)):
        assert pattern.text == json.dumps(pattern.to_data(), separators=(",", ":"), sort_keys=True)


# --- neighbourhoods ---


@given(neighborhoods(), st.integers(1, 5))
def test_other_tokens_stand_before_or_behind_a_grid_as_the_error_says(twin, others):
    """Both remedies give the grid's own pairs, and none of the other tokens."""
    grid = prod(twin.pattern.grid)
    tokens = grid + others
    sizes = {"num_heads": 1, "num_queries": tokens, "num_keys": tokens}
    with pytest.raises(
        ValueError, match=r"before the grid write pattern.after\(number\), .* pattern.per_document\(ids\)"
    ):
        twin.pattern.bind(**sizes)
    own = evaluated(twin.pattern.bind(num_heads=1, num_queries=grid, num_keys=grid))[0]
    ids = torch.cat([torch.zeros(grid), -torch.ones(others)]).long()
    for rule, first in ((twin.pattern.after(others), others), (twin.pattern.per_document(ids), 0)):
        expected = torch.zeros(tokens, tokens, dtype=torch.bool)
        expected[first : first + grid, first : first + grid] = own
        assert torch.equal(evaluated(rule.bind(**sizes))[0], expected)


@given(neighborhoods(), st.integers(1, 400))
def test_tokens_beyond_a_grid_neither_see_nor_are_seen(twin: Twin, further: int):
    """They fill up the last block of a kernel, which has a rule of its own."""
    grid = twin.pattern.grid
    tokens = prod(grid)
    positions = torch.cat([torch.arange(min(tokens, 60)), tokens + torch.arange(0, further, 1 + further // 20)])
    inside = positions < tokens
    known = oracle.counts(twin.rule, range(1), 1, positions[inside], positions[inside])[0].bool()
    for rule in (twin.pattern.mask_mod(num_heads=1, device=CPU), twin.pattern.packed(CPU)):
        found = rule(torch.tensor(0), torch.tensor(0), positions[:, None], positions)
        assert torch.equal(found[inside][:, inside], known)
        assert not found[~inside].any()
        assert not found[:, ~inside].any()


def test_a_grid_too_large_for_one_number_of_32_bits():
    assert masks.neighborhood((1024, 1024), 3).packed(CPU) is not None
    assert masks.neighborhood((1 << 15, 1 << 15), 3).packed(CPU) is None


@given(neighborhoods())
def test_windows_are_whole_and_axes_may_be_swapped(twin):
    """The same picture with its axes in reverse order, tokens permuted along."""
    pattern, grid = twin.pattern, twin.pattern.grid
    sizes = {"num_heads": 1, "num_queries": prod(grid), "num_keys": prod(grid)}
    mask = evaluated(pattern.bind(**sizes))[0]
    window = prod(axis.size for axis in pattern.axes)
    assert (mask.sum(1) <= window if pattern.causal else mask.sum(1) == window).all()
    assert mask.diagonal().all()
    grid_of, size, rate, stride, causal, wrap = zip(*(astuple(axis) for axis in reversed(pattern.axes)), strict=True)
    other = masks.neighborhood(grid_of, kernel_size=size, rate=rate, stride=stride, causal=causal, wrap=wrap)
    order = torch.arange(prod(grid)).view(grid).permute(*reversed(range(len(grid)))).flatten()
    assert torch.equal(evaluated(other.bind(**sizes))[0], mask[order][:, order])


def test_a_grid_over_documents():
    """A batch of images packed side by side: the grid begins anew with each, and ends with its last token."""
    pattern = masks.neighborhood((4, 3), 1)
    ids = torch.arange(3).repeat_interleave(12)
    packed = evaluated(pattern.per_document(ids).bind(num_heads=1, num_queries=36, num_keys=36))[0]
    alone = evaluated(pattern.bind(num_heads=1, num_queries=12, num_keys=12))[0]
    assert torch.equal(packed, torch.block_diag(alone, alone, alone).bool())


# --- counts ---


@given(st.one_of(random_blocks(), block_lists()), st.data())
def test_the_coarse_picture_is_sound(twin, data):
    """Where a table has more blocks than the picture has cells, several share one."""
    _block_table_of(twin)  # a table of its own: the picture is kept with it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_block_list, "_PICTURE_CELLS", 10)
        patch.setattr(_block_list, "_EXACT_ROWS", 0)
        box = Box(torch.zeros(BOXES, dtype=torch.int64), data.draw(progressions()), data.draw(progressions()))
        found, truth = twin.pattern.count(box, num_heads=1), allowed(twin.rule, box, 1)
    _block_table_of(twin)
    assert_sound(found, truth, box.area)


def _block_table_of(twin: Twin) -> None:
    from flexdilated.masks.patterns import _block_list, _random_blocks

    _block_list._table.cache_clear()
    _random_blocks._table.cache_clear()


def test_the_picture_prunes():
    """Far from every listed block nothing is possible, and a table that lists all is full."""
    whole = masks.block_list([range(200)] * 200, block=2)
    box = Box(torch.zeros(1, dtype=torch.int64), *[Progression(torch.tensor([40]), 1, torch.tensor([300]))] * 2)
    assert whole.count(box, num_heads=1).low.tolist() == box.area.tolist()
    diagonal = masks.block_list([[row] for row in range(200)], block=2)
    far = Box(box.head, box.q, Progression(torch.tensor([360]), 1, torch.tensor([40])))
    assert diagonal.count(far, num_heads=1).high.tolist() == [0]


@pytest.mark.parametrize("rate", [1, 2, 3])
def test_neighbourhoods_leave_no_doubt_in_residue_order(rate):
    """Blocks of a dilated neighbourhood in its layout are known without looking at a pair."""
    pattern = masks.neighborhood((12, 12), 1, rate=rate)
    assert masks.layout(pattern, 144) == Layout(144, rate)
    for layout in (Layout(144), Layout(144, rate)):
        mask = masks.block_mask(pattern, 144, num_heads=1, block_size=8, layout=layout)
        positions = layout.positions()
        dense = oracle.neighborhood([(12, 3, rate, 1, False, False)] * 2)(0, 1, positions, positions)
        listed = dense.view(18, 8, 18, 8).sum((1, 3)) > 0
        assert torch.equal(mask.to_dense()[0, 0].bool(), listed)
