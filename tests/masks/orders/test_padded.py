"""The active tokens of segments, each filled up to whole blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexdilated.masks.orders import Padded


@st.composite
def orders(draw: st.DrawFn) -> Padded:
    segment, step = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    begin = draw(st.integers(0, 9))
    start, end = begin - draw(st.integers(0, segment - 1)), begin + draw(st.integers(1, 60))
    offsets = tuple(draw(st.lists(st.integers(0, min(step, segment) - 1), min_size=1, max_size=3)))
    return Padded(offsets, step, segment, -(-segment // step), start, begin, end)


@given(orders(), st.integers(1, 8), st.integers(0, 5))
def test_each_active_token_has_its_slot(order: Padded, side: int, tokens: int):
    """Segment by segment, side by side in whole blocks; what `held` says, and moved, the same further on."""
    order = order.in_blocks_of(side)
    assert order.width % side == 0
    slots, (first, past) = order.tokens()[:, 0], order.held()
    assert slots.shape == (len(order.offsets), order.num_slots)
    for head, offset in enumerate(order.offsets):
        expected = {}
        for token in range(order.begin, order.end):
            segment, place = divmod(token - order.start, order.segment)
            if place >= offset and (place - offset) % order.step == 0:
                expected[segment * order.width + (place - offset) // order.step] = token
        assert {slot: token for slot, token in enumerate(slots[head].tolist()) if token >= 0} == expected
        held = {
            segment * order.width + place
            for segment in range(order.num_segments)
            for place in range(int(first[head, segment]), int(past[head, segment]))
        }
        assert held == set(expected)
    further = order.moved(tokens).tokens()[:, 0]
    assert ((slots == -1) == (further == -1)).all()
    assert (further - slots)[slots >= 0].eq(tokens).all()
