"""Layouts: permutations that put the tokens of a residue class side by side, and their inverses."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
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
