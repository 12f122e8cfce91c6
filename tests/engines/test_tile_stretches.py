"""Stretches of slots against plain indexing: reading, writing, adding, and finding what lies evenly."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flexdilated.engines.aten._tile_calls import BlockRanges, Even, Stretches, evenly


@st.composite
def evens(draw: st.DrawFn) -> Even:
    count = draw(st.integers(1, 4))
    return Even(draw(st.integers(0, 5)), draw(st.integers(0 if count > 1 else 1, 6)), count, draw(st.integers(1, 9)))


@st.composite
def lists(draw: st.DrawFn) -> BlockRanges:
    """Blocks of 3 slots, not in order and not distinct; the last one of a stretch may be cut."""
    count, length = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    blocks = draw(st.lists(st.integers(0, 8), min_size=count * length, max_size=count * length))
    return BlockRanges(torch.tensor(blocks).view(count, length), 3, length * 3 - draw(st.integers(0, 2)))


def slots_of(some: Stretches) -> torch.Tensor:
    """(n, L) slots, from the definition."""
    if isinstance(some, Even):
        return torch.tensor([[some.start + i * some.step + j for j in range(some.length)] for i in range(some.count)])
    every = [[block * some.side + j for block in row for j in range(some.side)] for row in some.blocks.tolist()]
    return torch.tensor(every)[:, : some.length]


rests = st.sampled_from([(), (1,), (5,)])


@given(st.one_of(evens(), lists()), st.integers(1, 3), rests, st.booleans())
def test_reading_and_adding(some, heads, rest, strided):
    """Of any strides; slots that several stretches share get the sum."""
    torch.manual_seed(0)
    x = torch.randn(40, heads, *rest, dtype=torch.float64).transpose(0, 1)
    x = x if strided else x.contiguous()
    slots = slots_of(some)
    assert torch.equal(some.of(x), x[:, slots])
    part = torch.randn(heads, *slots.shape, *rest, dtype=torch.float64)
    expected = x.clone()
    for index, slot in enumerate(slots.flatten().tolist()):
        expected[:, slot] += part.flatten(1, 2)[:, index]
    some.add(x, part)
    assert_close(x, expected)


@given(st.one_of(evens(), lists()), st.integers(1, 3), rests)
def test_writing(some, heads, rest):
    """Every slot of a stretch, and no other."""
    slots = slots_of(some)
    if len(slots.unique()) < slots.numel() or (isinstance(some, BlockRanges) and some.length % some.side):
        return  # queries are in one problem each, and whole blocks if they are listed
    x, part = torch.zeros(heads, 40, *rest), torch.rand(heads, *slots.shape, *rest) + 1
    some.put(x, part)
    expected = torch.zeros_like(x)
    expected[:, slots] = part
    assert torch.equal(x, expected)


@given(st.one_of(evens(), lists()), st.data())
def test_a_part(some, data):
    count = len(slots_of(some))
    begin = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(begin + 1, count + 2))
    assert torch.equal(slots_of(some.select(begin, end)), slots_of(some)[begin:end])


@given(evens())
def test_even_stretches_are_found(some):
    found = evenly(slots_of(some)[:, 0], some.length)
    assert found is not None
    assert torch.equal(slots_of(found), slots_of(some))


def test_uneven_stretches_are_not():
    assert evenly([0, 4, 9], 3) is None
    assert evenly([8, 4, 0], 3) is None
    assert evenly([7], 3) == Even(7, 3, 1, 3)
