"""Blockwise and landmark tokens: what the suite's draws do not reach: exact counts, rows, heads, limits of parts."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._box import Box, Progression
from tests.support import oracle
from tests.support.strategies import sets

PARTS = {
    "causal": (masks.causal(), oracle.causal()),
    "window": (masks.local_window(left=1, right=2), oracle.local_window(1, 2)),
    "landmark rows": (masks.landmark_tokens(3, columns=False), oracle.landmark_tokens(3, True, False)),
    "dilated": (masks.dilated(40, 3, 1), oracle.dilated(40, 3, 1)),
}
positions = st.integers(0, 30)


@st.composite
def sides(draw, step: int) -> Progression:
    n = 4
    first, count = (draw(st.lists(each, min_size=n, max_size=n)) for each in (positions, st.integers(1, 14)))
    return Progression(torch.tensor(first), step, torch.tensor(count))


@given(st.sampled_from(sorted(PARTS)), st.sampled_from([1, 2, 4, 6]), st.data())
def test_counts_are_exact_where_steps_fit(name, block, data):
    """Steps that divide the block or are multiples of it; boxes that begin and end anywhere."""
    part, rule = PARTS[name]
    step = data.draw(st.sampled_from([step for step in range(1, 13) if block % step == 0 or step % block == 0]))
    box = Box(torch.zeros(4, dtype=torch.int64), data.draw(sides(step)), data.draw(sides(step)))
    bounds = masks.blockwise(part, block).count(box, num_heads=1)
    dense = oracle.blockwise(rule, block)
    for index in range(4):
        q, k = (side.first[index] + step * torch.arange(int(side.count[index])) for side in (box.q, box.k))
        assert bounds.low[index] == bounds.high[index] == dense(0, 1, q, k).sum()


@given(sets(1, 1), st.integers(1, 5), st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_rows_are_those_of_the_dense_rule(twin, block, query, start, stop):
    pattern = masks.blockwise(twin.pattern, block).for_head(0, 1)
    row = pattern.row(query, range(start, stop))
    if row is None:  # a part without a closed form has none
        assert pattern.part.row(query // block, range(start // block, -(-stop // block))) is None
        return
    seen = [key for keys in row for key in keys]
    expected = oracle.blockwise(twin.rule, block)(0, 1, torch.tensor([query]), torch.arange(stop))[0]
    assert sorted(seen) == [key for key in expected.nonzero().squeeze(1).tolist() if key >= start]
    assert all(row)


@given(st.integers(1, 9), st.sampled_from([(True, True), (True, False), (False, True)]), positions, st.integers(1, 40))
def test_rows_of_landmarks(stride, sides, query, stop):
    rows, columns = sides
    row = masks.landmark_tokens(stride, rows=rows, columns=columns).row(query, range(stop))
    assert row is not None
    expected = oracle.landmark_tokens(stride, rows, columns)(0, 1, torch.tensor([query]), torch.arange(stop))[0]
    assert sorted(key for keys in row for key in keys) == expected.nonzero().squeeze(1).tolist()


def test_a_window_of_blocks_by_hand():
    t = torch.arange(5)
    mod = (
        masks.blockwise(masks.local_window(left=1, right=0), 2).bind(num_heads=1, num_queries=5, num_keys=5).mask_mod()
    )
    assert mod(torch.tensor(0), torch.tensor(0), t[:, None], t[None, :]).long().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_fitting_blocks_are_never_in_doubt():
    """Blocks of 64 in kernel blocks of 128: every listed pair of a window of blocks is useful."""
    told = masks.describe(masks.blockwise(masks.local_window(left=3, right=2) & masks.causal(), 128), 4096, num_heads=2)
    assert told.waste == 1.0


def test_blocks_and_shifts():
    window, chunks = masks.local_window(left=1, right=0), masks.dilated(4, 2)
    assert masks.blockwise(window, 8).period() == 8
    assert masks.blockwise(chunks, 8).period() == 32
    assert masks.blockwise(chunks, 8).confined()
    assert not masks.blockwise(window, 8).confined()
    assert masks.blockwise(masks.first_tokens(2), 8).period() is None
    assert masks.landmark_tokens(6).period() == 6


def test_the_text_is_that_of_the_data():
    pattern = masks.blockwise(~masks.causal() | masks.landmark_tokens(3), 8)
    assert pattern.text == json.dumps(pattern.to_data(), separators=(",", ":"), sort_keys=True)


def test_what_a_part_forbids_is_forbidden():
    per_head = masks.blockwise(masks.per_head([masks.causal()] * 3), 4)
    with pytest.raises(ValueError, match="got 3 for 2 heads"):
        per_head.bind(num_heads=2, num_queries=8, num_keys=8)
    table = masks.blockwise(masks.block_list([[0], [1], [4]], block=1), 4)
    table.bind(num_heads=1, num_queries=12, num_keys=20)
    with pytest.raises(ValueError, match="row 2 names key block 4"):
        table.bind(num_heads=1, num_queries=12, num_keys=16)


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: masks.blockwise(masks.causal(), 0), ValueError, "block must be at least 1; got block=0"),
        (lambda: masks.blockwise(masks.causal(), 2.0), TypeError, "block must be an integer"),
        (lambda: masks.blockwise(3, 2), TypeError, "blockwise needs a set pattern; got 3"),
        (lambda: masks.blockwise(masks.longnet([4, 8], [1, 2]), 2), TypeError, "needs a set pattern; got longnet"),
        (lambda: masks.blockwise(masks.lengths("len"), 2), ValueError, r"without run-time tensors.*got lengths\('len'"),
        (lambda: masks.blockwise(masks.causal().per_document("ids"), 2), ValueError, "without run-time tensors"),
        (lambda: masks.landmark_tokens(0), ValueError, "stride must be at least 1; got stride=0"),
        (lambda: masks.landmark_tokens(4, rows=1), TypeError, "rows must be True or False; got rows=1"),
        (lambda: masks.landmark_tokens(4, rows=False, columns=False), ValueError, "rows=False and columns=False"),
        (lambda: masks.head_groups([]), ValueError, "at least 1 set pattern"),
    ],
)
def test_bad_parameters(build, error, says):
    with pytest.raises(error, match=says):
        build()
