"""Neighbourhoods with kernel sizes, strides and causal axes: laws, how they are written, counts along an axis."""

from __future__ import annotations

from math import prod
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.orders._tiling import Tiling
from flexdilated.masks.patterns import _grid
from flexdilated.masks.patterns._grid import Axis
from flexdilated.masks.planning._planner import plan
from tests.masks.patterns.test_patterns import evaluated

# --- laws ---


# --- one way to write each rule ---


def test_a_rule_is_written_in_one_way():
    """As it was before there were kernel sizes, where that says it all: tables and JSON of then are found again."""
    before = masks.neighborhood((14, 14), 3)
    assert repr(before) == "neighborhood(grid=(14, 14), radius=(3, 3), rate=(1, 1))"
    assert before.text == '{"grid":[14,14],"kind":"neighborhood","radius":[3,3],"rate":[1,1]}'
    assert masks.neighborhood([14, 14], (3, 3), rate=[1, 1]) == before
    assert masks.neighborhood((14, 14), kernel_size=7, stride=1, causal=False) == before
    assert masks.neighborhood((14, 14), kernel_size=(7, 7), stride=(1, 1), causal=(False, False)).text == before.text
    assert masks.from_json(before.text) == before
    torus = masks.neighborhood((14, 6), (3, 2), wrap=True)
    assert torus.text == '{"grid":[14,6],"kind":"neighborhood","radius":[3,2],"rate":[1,1],"wrap":[true,true]}'
    assert masks.from_json(torus.text) == masks.parse(repr(torus)) == torus
    assert masks.neighborhood((14, 14), 3, wrap=(False, False)).text == before.text
    # A window that covers an axis is the whole axis, whether it wraps or not.
    covering = masks.neighborhood((14, 6), kernel_size=(7, 6), wrap=(True, False))
    assert masks.neighborhood((14, 6), 3, wrap=True) == covering
    assert masks.neighborhood((15, 5), 9, wrap=True) == masks.neighborhood((15, 5), kernel_size=(15, 5))
    written = '{"grid":[14,14],"kernel_size":[7,7],"kind":"neighborhood","rate":[1,1],"stride":[1,1]}'
    assert masks.from_json(written) == before


# --- counts along an axis ---


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    rate, size = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    stride = draw(st.integers(1, size))
    if draw(st.booleans()):  # an axis that wraps and is longer than a window
        return Axis(rate * stride * (size // stride + draw(st.integers(1, 9))), size, rate, stride, wraps=True)
    return Axis(rate * size + draw(st.integers(0, 40)), size, rate, stride, draw(st.booleans()))


@given(axes(), st.data())
def test_counts_along_an_axis(axis: Axis, data: st.DataObject):
    """Counts are exact for equal steps of queries and keys if there are few residue classes, else they are bounds."""
    steps = [data.draw(st.integers(1, 12)) for _ in range(2)]
    places = st.lists(st.integers(0, axis.length + 5), min_size=20, max_size=20)
    counts = st.lists(st.integers(0, 30), min_size=20, max_size=20)
    q, k = (
        Progression(torch.tensor(data.draw(places)), step, torch.tensor(data.draw(counts)))
        for step in (steps[0], data.draw(st.sampled_from(steps)))
    )
    listed = [
        [range(first, first + side.step * count, side.step) for first, count in zip(*pair, strict=True)]
        for side in (q, k)
        for pair in [(side.first.tolist(), side.count.tolist())]
    ]
    truth = torch.tensor(
        [
            sum(
                key in part
                for query in queries
                if query < axis.length
                for part in axis.seen(query, query)
                for key in keys
            )
            for queries, keys in zip(*listed, strict=True)
        ]
    )
    most = data.draw(st.sampled_from([64, 64, 1]))
    with mock.patch.object(_grid, "_MOST_CLASSES", most):
        found = axis.count(torch.zeros(20, dtype=torch.int64), q, k)
    assert (found.low <= truth).all()
    assert (truth <= found.high).all()
    assert (found.high <= q.count * k.count).all()
    if q.step == k.step and most > 1:
        assert torch.equal(found.low, found.high)


@given(axes(), st.data())
def test_boxes_that_are_alike_have_equal_masks(axis: Axis, data: st.DataObject):
    """Boxes of one size and step at random places of the axis, also beyond its end."""
    (q_step, k_step), (rows, columns) = (data.draw(st.tuples(*[st.integers(1, 4)] * 2)) for _ in range(2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    firsts = torch.randint(axis.length + 3, (2, 300), generator=generator)
    sides = zip(firsts, (q_step, k_step), (rows, columns), strict=True)
    q, k = (Progression(first, step, torch.full_like(first, count)) for first, step, count in sides)
    seen = [{key for part in axis.seen(place, place) for key in part} for place in range(axis.length)]
    known: dict[tuple[int, ...], list[bool]] = {}
    for place, ahead, query, key in torch.stack([*axis.likeness(q, k), q.first, k.first], 1).tolist():
        queries = (query + q_step * row for row in range(rows))
        keys = [key + k_step * column for column in range(columns)]
        mask = [each < axis.length and other in seen[each] for each in queries for other in keys]
        assert known.setdefault((place, ahead), mask) == mask


def test_on_a_circle_all_places_are_alike():
    """On an axis that wraps, single pairs of one distance differ only by the query modulo rate * stride."""
    first, one = torch.arange(24), torch.ones(24, dtype=torch.int64)
    q, k = Progression(first, 1, one), Progression((first + 5) % 24, 1, one)
    for rate, stride in ((1, 1), (2, 1), (1, 4), (2, 3)):
        columns = Axis(24, 5, rate, stride, wraps=True).likeness(q, k)
        assert len(torch.stack(columns, 1).unique(dim=0)) == rate * stride


def test_groups_of_many_are_counted_in_three_sums():
    """A stride of thousands, over runs of any length."""
    axis = Axis(1 << 20, 1 << 16, stride=5000)
    first, count = torch.tensor([0, 4_999, 123_456, 1_040_000]), torch.tensor([1, 5_002, 40_000, 8_576])
    k = Progression(torch.tensor([0, 10_000, 130_000, 990_000]), 1, torch.tensor([70_000, 99, 1 << 16, 1 << 16]))
    found = axis.count(torch.zeros(4, dtype=torch.int64), Progression(first, 1, count), k)
    truth = []
    ends = (each.tolist() for each in (first, count, k.first, k.count))
    for begin, number, key, keys in zip(*ends, strict=True):
        windows = (window for query in range(begin, begin + number) for window in axis.seen(query, query))
        truth.append(sum(max(0, min(each.stop, key + keys) - max(each.start, key)) for each in windows))
    assert found.low.tolist() == found.high.tolist() == truth


def test_queries_of_one_group_are_counted_at_unlike_steps():
    """All queries of one group: their window is known, whatever the steps."""
    axis = Axis(1000, 100, stride=50)
    q = Progression(torch.tensor([500]), 7, torch.tensor([7]))
    k = Progression(torch.tensor([400]), 3, torch.tensor([60]))
    found = axis.count(torch.tensor([0]), q, k)
    seen = sum(475 <= key < 575 for key in range(400, 580, 3))
    assert found.low.tolist() == found.high.tolist() == [7 * seen]


# --- attention ---

VIDEO = masks.neighborhood((6, 16, 16), kernel_size=(3, 8, 8), stride=(1, 8, 8), causal=(True, False, False))


def test_windows_of_whole_tiles_leave_nothing_in_vain():
    """Strides for which tiles and windows coincide, as generalized neighborhood attention has them for its kernels."""
    tokens = prod(VIDEO.grid)
    (term,) = plan(VIDEO.bind(num_heads=1, num_queries=tokens, num_keys=tokens)).terms
    assert term.q == Tiling((6, 16, 16), (2, 8, 8))
    assert masks.describe(VIDEO, tokens).waste == 1
    single = masks.neighborhood(VIDEO.grid, kernel_size=(3, 8, 8), causal=(True, False, False))
    assert masks.describe(single, tokens).waste > 2


def test_attend_in_tiles_is_the_reference():
    q, k, v = torch.randn(3, 1, 1, 1536, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = fd.attend(q, k, v, VIDEO, engine="aten")
    torch.testing.assert_close(found, fd.attend(q, k, v, VIDEO, engine="reference"), rtol=1e-12, atol=1e-12)


def test_a_box_of_one_step_counts_what_is_there():
    """Whole rows and parts of rows of a grid, in one box each."""
    runs = Progression(torch.tensor([0, 300]), 1, torch.tensor([1536, 700]))
    box = Box(torch.zeros(2, dtype=torch.int64), runs, runs)
    table = evaluated(VIDEO.bind(num_heads=1, num_queries=1536, num_keys=1536))[0]
    found = VIDEO.count(box, num_heads=1)
    assert found.low.tolist() == found.high.tolist() == [int(table.sum()), int(table[300:1000, 300:1000].sum())]
