"""Layouts: permutations that put the tokens of a residue class side by side, and their inverses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.orders._layout import Compact
from tests.masks.orders.test_tiling import tilings

tokens, layout_rates = st.integers(1, 70), st.integers(1, 12)


@given(tokens, layout_rates)
def test_order_is_residue_major(N, rate):
    expected = sorted(range(N), key=lambda token: (token % rate, token // rate))
    assert masks.Layout(N, rate).positions().tolist() == expected


@given(st.one_of(st.builds(masks.Layout, tokens, layout_rates), tilings()), st.sampled_from([0, 1, 2, -1, -2, -3]))
def test_invert_undoes_apply(layout, dim):
    N, shape = layout.num_slots, [2, 3, 4]
    shape[dim] = N
    assert layout.slots()[layout.positions()].tolist() == list(range(N))
    x = torch.randn(shape)
    assert torch.equal(layout.invert(layout.apply(x, dim=dim), dim=dim), x)
    assert torch.equal(layout.apply(layout.invert(x, dim=dim), dim=dim), x)
    assert torch.equal(layout.apply(x, dim=dim), x.index_select(dim, layout.positions()))


@given(tokens, layout_rates, st.integers(0, 9))
def test_pieces_give_positions(N, rate, origin):
    """The builder's view of a layout, runs of one step, names the same tokens."""
    layout = masks.Layout(N, rate)
    pieces = layout.pieces(origin)
    slot = torch.arange(N)
    assert torch.equal(pieces.position(torch.zeros_like(slot), slot), layout.positions() + origin)
    assert int(pieces.lengths.sum()) == N


def test_gradients_follow_tokens():
    layout = masks.Layout(10, 4)
    x = torch.randn(10, 2, requires_grad=True)
    weight = torch.arange(10.0)[:, None]
    layout.apply(x).mul(weight).sum().backward()
    assert torch.equal(x.grad, layout.invert(weight).expand(10, 2))


def test_natural_order_moves_nothing():
    x = torch.randn(5, 2)
    assert masks.Layout(5).apply(x) is x
    assert masks.Layout(5).positions().tolist() == [0, 1, 2, 3, 4]


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 6),
)
def test_compact_names_tokens(heads, step, slots, folds, stride, origin):
    starts = tuple(range(2, 2 + heads))
    layout = Compact(tuple(range(heads)), starts, step, slots, folds, stride)
    expected = [
        [[start + fold * stride + slot * step for slot in range(slots)] for fold in range(folds)] for start in starts
    ]
    assert layout.tokens().tolist() == expected
    pieces = layout.pieces(origin)
    table = torch.arange(heads)[:, None]
    assert torch.equal(pieces.position(table, torch.arange(slots)), layout.tokens()[:, 0] + origin)


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: masks.Layout(0), ValueError, "num_tokens must be at least 1; got num_tokens=0"),
        (lambda: masks.Layout(4, 0), ValueError, "rate must be at least 1; got rate=0"),
        (lambda: masks.Layout(4.0), TypeError, "num_tokens=4.0"),
        (lambda: masks.Layout(4, 2).apply(torch.zeros(3, 5)), ValueError, "4 tokens; got 3 along dim=-2"),
        (lambda: masks.Layout(4).invert(torch.zeros(4, 5), dim=1), ValueError, "4 tokens; got 5 along dim=1"),
    ],
)
def test_bad_input(build, error, says):
    with pytest.raises(error, match=says):
        build()
