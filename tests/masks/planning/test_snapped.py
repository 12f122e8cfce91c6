"""snapped: pairs that are allowed stay, there are no fewer, and kernels waste no more on them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.engines import multiplicity
from flexdilated.masks.planning import compact_terms, shared_terms, term_blocks
from tests.support.strategies import grammar

HEADS = 2
sides = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
both_sides = st.one_of(sides, st.tuples(sides, sides))
reach = st.integers(0, 40)
windows = st.builds(lambda left, right: masks.local_window(left=left, right=right), reach, reach)
dilated = st.builds(
    lambda rate, places, offset: masks.dilated(rate * places, rate, offset % rate),
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(0, 3),
)
blocks_of_windows = st.builds(
    lambda reach, block: masks.blockwise(masks.local_window(left=reach, right=0), block),
    st.integers(0, 3),
    st.integers(1, 12),
)


def selected(q_block, k_block):
    return masks.selected_blocks("chosen", block=(q_block, k_block), most=2)


GIVEN = masks.selected_blocks(torch.zeros(1, 2, 1, dtype=torch.int64), block=(1, 48), most=1)


def counts(pattern, num_tokens):
    """(H, N, N): how often each pair is allowed."""
    bound = pattern.bind(num_heads=HEADS, num_queries=num_tokens, num_keys=num_tokens)
    return multiplicity(bound, torch.device("cpu"))[0]


def computed(pattern, num_tokens, side, *, compact=False):
    """Pairs in the blocks that hold any, over tokens in natural order, or over the active ones of each segment."""
    bound = pattern.bind(num_heads=HEADS, num_queries=num_tokens, num_keys=num_tokens)
    terms = compact_terms(pattern, 1, bound) if compact else shared_terms(bound.union, 1, bound, 1)
    total, sides = 0, side if isinstance(side, tuple) else (side, side)
    for term in terms or ():
        blocks = term_blocks(term, sides)
        total += sum(int((blocks.table == table).sum()) for table in blocks.heads) * sides[0] * sides[1] * term.folds
    return total


composed = st.one_of(
    windows,
    st.builds(lambda a, b: a & b, windows, st.just(masks.causal())),
    st.builds(lambda a, b: a | b, windows, windows),
    st.builds(lambda a, b: a | (b & masks.dilated_window(left=3, right=3, rate=2)), windows, windows),
    st.builds(lambda a, b: masks.per_head([a, b]), windows, windows),
    st.builds(lambda a, b: a + (b & masks.causal()) + a, windows, windows),
    st.builds(lambda a, start: a.after(start), windows, st.integers(0, 9)),
    st.builds(lambda a, b: a & ~b, windows, windows),
)


def snapped(pattern, side, is_causal=False):
    found = masks.snapped(pattern, side).pattern
    return tuple(each & masks.causal() if is_causal else each for each in (pattern, found))


@given(composed, both_sides, st.integers(1, 50))
def test_windows_lose_no_pair(pattern, side, num_tokens):
    _, found = snapped(pattern, side)
    assert bool((counts(found, num_tokens) >= counts(pattern, num_tokens)).all())
    assert masks.snapped(found, side).pattern == found


@given(windows, both_sides, st.integers(1, 80), st.booleans())
def test_windows_fill_the_blocks_that_were_computed(pattern, side, num_tokens, is_causal):
    old, new = snapped(pattern, side, is_causal)
    assert computed(new, num_tokens, side) == computed(old, num_tokens, side)


@given(dilated, both_sides, st.integers(1, 120), st.integers(1, 3), st.booleans())
def test_segments_have_more_pairs_and_whole_ones_waste_nothing(pattern, side, num_tokens, times, is_causal):
    """In the order that the planner computes them in: the active tokens of a segment side by side."""
    _, found = snapped(pattern, side)
    assert (found.rate, found.offset, found.segment % found.rate) == (pattern.rate, pattern.offset, 0)
    assert found.segment >= pattern.segment
    old, new = snapped(pattern, side, is_causal)
    assert counts(new, num_tokens).sum() >= counts(old, num_tokens).sum()
    num_tokens = times * found.segment
    of_old, of_new = (computed(each, num_tokens, side, compact=True) for each in (old, new))
    useful = [int(counts(each, num_tokens).sum()) for each in (old, new)]
    assert of_new * useful[0] <= of_old * useful[1]
    assert is_causal or of_new == useful[1]
    assert pattern.rate > 1 or is_causal or computed(new, num_tokens, side) == useful[1]


@given(blocks_of_windows, both_sides, st.integers(1, 80), st.integers(1, 5))
def test_whole_blocks_have_more_pairs_and_waste_nothing(pattern, side, num_tokens, times):
    _, found = snapped(pattern, side)
    assert counts(found, num_tokens).sum() >= counts(pattern, num_tokens).sum()
    whole = times * found.block
    assert computed(found, whole, side) == counts(found, whole).sum()


@given(grammar(HEADS).patterns(), sides)
def test_any_pattern_is_taken(twin, side):
    """What is changed is named, and so is what is left; a second time nothing is changed."""
    try:
        found = masks.snapped(twin.pattern, side)
    except ValueError as error:
        if "the blocks of a block_list cannot be rounded" not in str(error):
            raise
        return
    changed = [line for line in found.changes if "->" in line]
    assert bool(changed) == (found.pattern != twin.pattern)
    assert [line for line in masks.snapped(found.pattern, side).changes if "->" in line] == []


@pytest.mark.parametrize(
    ("pattern", "side", "expected"),
    [
        (masks.local_window(left=1000, right=0), 128, masks.local_window(left=1023, right=0)),
        (masks.local_window(left=1, right=65), (64, 128), masks.local_window(left=63, right=127)),
        (masks.chunked(100), (64, 96), masks.chunked(192)),
        (masks.longnet((500, 3000), (1, 4)) & masks.causal(), 128, masks.longnet((512, 3072), (1, 4)) & masks.causal()),
        (masks.blockwise(masks.causal(), 48), 64, masks.blockwise(masks.causal(), 64)),
        (masks.block_list([[0]], block=192), 64, masks.block_list([[0]], block=192)),
        (masks.chunked(100).per_document("ids"), 64, masks.chunked(128).per_document("ids")),
        (selected(64, 130), (64, 128), selected(64, 256)),
        (selected(65, 32), (64, 128), selected(128, 32)),
        (GIVEN, 128, GIVEN),
    ],
)
def test_what_becomes_of_each(pattern, side, expected):
    assert masks.snapped(pattern, side).pattern == expected


def test_what_was_done_is_told():
    pattern = (masks.local_window(left=100, right=0) | masks.first_tokens(4) | ~masks.local_window(left=9, right=9)) & (
        masks.causal()
    )
    assert masks.snapped(pattern, 64).changes == (
        "local_window(left=100, right=0) -> local_window(left=127, right=0)",
        "first_tokens(4) is unchanged: there is no rule to round its sizes",
        "~local_window(left=9, right=9) is unchanged: rounding up sizes under ~ would allow fewer pairs",
    )
    uneven = masks.snapped(masks.dilated(10, 4) + masks.longnet((16,), (2,), padding="zeros"), 64)
    assert uneven.pattern == masks.dilated(10, 4) + masks.longnet((16,), (2,), padding="zeros")
    assert len(uneven.changes) == 2
