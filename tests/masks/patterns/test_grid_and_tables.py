"""Random blocks, block lists and neighbourhoods: the draw, laws, bounds of large tables, rows."""

from bisect import bisect_left
from math import prod
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.orders import Tiling
from flexdilated.masks.patterns import Neighborhood, _block_list, _grid, _random_blocks
from flexdilated.masks.patterns._grid import Axis
from flexdilated.masks.planning import plan
from tests.masks.core.test_boxes import BOXES, allowed, assert_sound, progressions
from tests.support import oracle
from tests.support.strategies import block_lists, neighborhoods, random_blocks
from tests.support.twins import Twin

CPU = torch.device("cpu")


def test_the_draw_is_pinned():
    """These numbers never change: a checkpoint's pattern means the same everywhere, on every rank and version."""

    def drawn(pattern: masks.Pattern, head: int, rows: int, block: int, num_tokens: int) -> list[list[int]]:
        """The key blocks that each of the first rows of blocks sees."""
        mod, keys = pattern.mask_mod(num_heads=head + 1, device=CPU), torch.arange(0, num_tokens, block)
        seen = (mod(torch.tensor(0), torch.tensor(head), torch.tensor(row * block), keys) for row in range(rows))
        return [(keys[each] // block).tolist() for each in seen]

    pattern = masks.random_blocks(1 << 20)
    assert drawn(pattern, 0, 3, 64, 1 << 20) == [[2123, 5088, 6755], [6312, 12378, 13562], [1510, 11982, 12161]]
    assert drawn(pattern, 1, 3, 64, 1 << 20) == [[801, 13374, 15720], [3597, 7668, 13858], [616, 983, 8983]]
    pattern = masks.random_blocks(6, block=1, count=2, seed=7)
    assert drawn(pattern, 5, 6, 1, 6) == [[3, 5], [3, 4], [4, 5], [2, 5], [4, 5], [2, 4]]


def test_tensors_are_tables():
    chosen = torch.tensor([[[True, False, True], [False, False, False]], [[False, True, False], [True, True, True]]])
    rows = [[[0, 2], []], [[1], [0, 1, 2]]]
    assert masks.block_list(chosen, block=4) == masks.block_list(rows, block=4)
    assert masks.block_list(chosen[0], block=4) == masks.block_list(rows[0], block=4)
    numbers = torch.tensor([[[2, 0]], [[1, 2]]])
    assert masks.block_list(numbers.int(), block=4) == masks.block_list([[[0, 2]], [[1, 2]]], block=4)
    assert masks.block_list(numbers[0], block=4) == masks.block_list([range(0, 3, 2)], block=4)


@given(neighborhoods(), st.integers(1, 400))
def test_tokens_beyond_a_grid_neither_see_nor_are_seen(twin: Twin, further: int):
    """They fill up the last block of a kernel, which has a rule of its own."""
    grid = twin.pattern.grid
    tokens = prod(grid)
    positions = torch.cat([torch.arange(min(tokens, 60)), tokens + torch.arange(0, further, 1 + further // 20)])
    inside = positions < tokens
    known = oracle.counts(twin.rule, range(1), 1, positions[inside], positions[inside])[0].bool()
    rules = [twin.pattern.mask_mod(num_heads=1, device=CPU)]
    if isinstance(twin.pattern, Neighborhood):
        rules.append(twin.pattern.packed_mask_mod(CPU))
    for rule in rules:
        found = rule(torch.tensor(0), torch.tensor(0), positions[:, None], positions)
        assert torch.equal(found[inside][:, inside], known)
        assert not found[~inside].any()
        assert not found[:, ~inside].any()


def test_a_grid_too_large_for_one_number_of_32_bits():
    assert masks.neighborhood((1024, 1024), 3).packed_mask_mod(CPU) is not None
    assert masks.neighborhood((1 << 15, 1 << 15), 3).packed_mask_mod(CPU) is None


def test_a_neighbourhood_is_written_in_one_way():
    """Without what says nothing: tables and JSON written before there were kernel sizes are found again."""
    plain, torus = masks.neighborhood((14, 14), 3), masks.neighborhood((14, 6), (3, 2), wrap=True)
    assert repr(plain) == "neighborhood(grid=(14, 14), radius=(3, 3), rate=(1, 1))"
    assert plain.text == '{"grid":[14,14],"kind":"neighborhood","radius":[3,3],"rate":[1,1]}'
    assert torus.text == '{"grid":[14,6],"kind":"neighborhood","radius":[3,2],"rate":[1,1],"wrap":[true,true]}'
    again = [
        masks.from_json('{"grid":[14,14],"kernel_size":[7,7],"kind":"neighborhood","rate":[1,1],"stride":[1,1]}'),
        masks.neighborhood([14, 14], (3, 3), rate=[1, 1]),
        masks.neighborhood((14, 14), kernel_size=(7, 7), stride=(1, 1), causal=(False, False), wrap=False),
    ]
    assert {(each, each.text) for each in again} == {(plain, plain.text)}
    assert masks.from_json(torus.text) == masks.parse(repr(torus)) == torus
    # A window that covers an axis is the whole axis, whether it wraps or not.
    covering = masks.neighborhood((14, 6), kernel_size=(7, 6), wrap=(True, False))
    assert masks.neighborhood((14, 6), 3, wrap=True) == covering
    assert masks.neighborhood((15, 5), 9, wrap=True) == masks.neighborhood((15, 5), kernel_size=(15, 5))


VIDEO = masks.neighborhood((6, 16, 16), kernel_size=(3, 8, 8), stride=(1, 8, 8), causal=(True, False, False))


def test_windows_of_whole_tiles_leave_nothing_in_vain():
    """Strides for which tiles and windows coincide, as generalized neighborhood attention has them for its kernels."""
    (term,) = plan(VIDEO.bind(num_heads=1, num_queries=1536, num_keys=1536)).terms
    assert term.q == Tiling((6, 16, 16), (2, 8, 8))
    assert masks.describe(VIDEO, 1536).waste == 1
    single = masks.neighborhood(VIDEO.grid, kernel_size=(3, 8, 8), causal=(True, False, False))
    assert masks.describe(single, 1536).waste > 2


@given(st.one_of(random_blocks(), block_lists()), st.data())
def test_bounds_from_coarse_cells_are_sound(twin, data):
    """Where a table has more blocks than the picture has cells, several share one."""
    with pytest.MonkeyPatch.context() as patch:
        for table in (_block_list._block_table, _random_blocks._draw_table):
            patch.setattr(f"{table.__module__}.{table.__name__}", table.__wrapped__)  # the picture is kept with a table
        patch.setattr(_block_list, "_MOST_CELLS", 10)
        patch.setattr(_block_list, "_EXACT_ROWS", 0)
        box = Box(torch.zeros(BOXES, dtype=torch.int64), data.draw(progressions()), data.draw(progressions()))
        found, truth = twin.pattern.count(box, num_heads=1), allowed(twin.rule, box, 1)
    assert_sound(found, truth, box.area)


WIDE = Axis(1 << 20, 1 << 16, stride=5000)  # in groups of thousands


@pytest.mark.parametrize(
    ("axis", "q", "k"),
    [
        (WIDE, range(1), range(70_000)),
        (WIDE, range(4_999, 10_001), range(10_000, 10_099)),
        (WIDE, range(123_456, 163_456), range(130_000, 195_536)),
        (WIDE, range(1_040_000, 1 << 20), range(990_000, 1_055_536)),
        # All queries of one group: their window is known, whatever the steps.
        (Axis(1000, 100, stride=50), range(500, 549, 7), range(400, 580, 3)),
    ],
)
def test_groups_of_many_queries_are_counted_exactly(axis, q, k):
    found = axis.count(progression([q]), progression([k]))
    assert found.low.tolist() == found.high.tolist() == [pairs_along(axis, q, k)]


def progression(ranges: list[range]) -> Progression:
    first, count = ([each.start for each in ranges], [len(each) for each in ranges])
    return Progression(torch.tensor(first), ranges[0].step, torch.tensor(count))


def pairs_along(axis: Axis, q: range, k: range) -> int:
    def seen(window: range) -> int:
        if window.step > 1:
            return sum(key in window for key in k)
        return bisect_left(k, window.stop) - bisect_left(k, window.start)

    return sum(seen(window) for query in q if query < axis.length for window in axis.seen(query, query))


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    rate, size = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    stride = draw(st.integers(1, size))
    if draw(st.booleans()):  # an axis that wraps and is longer than a window
        return Axis(rate * stride * (size // stride + draw(st.integers(1, 9))), size, rate, stride, wraps=True)
    return Axis(rate * size + draw(st.integers(0, 40)), size, rate, stride, draw(st.booleans()))


@settings(max_examples=24)
@given(axes(), st.data(), st.sampled_from([64, 1]))
def test_counts_along_an_axis(axis: Axis, data: st.DataObject, most: int):
    """Exact for equal steps of queries and keys if there are few residue classes, else bounds."""
    steps = [data.draw(st.integers(1, 12)) for _ in range(2)]
    # Near one another and of few places, as single pairs tell the most, or anywhere.
    reach, longest = data.draw(st.sampled_from([(axis.size * axis.rate, 2), (axis.length, 30)]))
    numbers = st.tuples(*(st.integers(*ends) for ends in ((0, axis.length + 5), (-reach, reach), (0, longest))))
    drawn = data.draw(st.lists(st.tuples(numbers, st.integers(0, longest)), min_size=20, max_size=20))
    q_step, k_step = steps[0], data.draw(st.sampled_from(steps))
    q = [range(first, first + q_step * count, q_step) for (first, _, count), _ in drawn]
    starts = [max(0, first + ahead) for (first, ahead, _), _ in drawn]
    k = [range(start, start + k_step * count, k_step) for start, (_, count) in zip(starts, drawn, strict=True)]
    truth = torch.tensor([pairs_along(axis, *each) for each in zip(q, k, strict=True)])
    with mock.patch.object(_grid, "_MOST_CLASSES", most):
        found = axis.count(progression(q), progression(k))
    assert_sound(found, truth, torch.tensor([len(a) * len(b) for a, b in zip(q, k, strict=True)]))
    if q[0].step == k[0].step and most > 1:
        assert torch.equal(found.low, found.high)


@settings(max_examples=10)
@given(axes(), st.sampled_from([64, 1]))
def test_every_pair_along_an_axis(axis: Axis, most: int):
    """One pair a box; single drawn boxes seldom stand at the edge of a window."""
    places = torch.cartesian_prod(*[torch.arange(axis.length)] * 2)
    truth = torch.zeros(axis.length, axis.length, dtype=torch.int64)
    for query in range(axis.length):
        for window in axis.seen(query, query):
            truth[query, torch.tensor(window)] = 1
    with mock.patch.object(_grid, "_MOST_CLASSES", most):
        found = axis.count(*(Progression(at, 1, torch.ones_like(at)) for at in places.unbind(1)))
    assert_sound(found, truth.flatten(), torch.ones(len(places), dtype=torch.int64))
