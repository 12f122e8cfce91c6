"""Keys that are hidden here and there: computed by the program of the rule without them, whatever their values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines.aten import _aten_op
from flexdilated.masks.patterns import KeySet
from tests.support.agreement import assert_agrees, assert_nothing_spreads
from tests.support.drawn_calls import BAD
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import tensors

TOKENS = 6000
EVERY_TENTH = torch.arange(TOKENS) % 10 > 0


@pytest.fixture
def always_apart(without_masks, monkeypatch):
    """Keys are hidden apart from the rule however few they are, and in calls of any number of queries."""
    monkeypatch.setattr(KeySet, "are_scattered", True)
    monkeypatch.setattr(_aten_op, "takes_rows", lambda key: False)
    monkeypatch.setattr(_aten_op, "_packed", lambda *_: None)


@st.composite
def scattered(draw):
    """(a drawn pattern & visible keys of each batch entry or of all, its counts, its tensors, offsets)."""
    packed = draw(packed_cases())
    positions = packed.k_offset + packed.num_keys
    longest = max(packed.q_offset + packed.num_queries, positions)
    entries = draw(st.sampled_from([1, packed.batch]))
    marks = st.lists(st.booleans(), min_size=longest, max_size=longest)
    visible = torch.tensor([draw(marks)[:positions] for _ in range(entries)])
    counts = packed.counts * visible[:, None, None, packed.k_offset :]
    drawn = draw(tensors(packed, batch=packed.batch))
    return packed.pattern & masks.visible_keys(visible, name="present"), counts, drawn, packed.offsets


def attention(pattern, offsets):
    def attend(q, k, v):
        options = {"enable_gqa": True, "return_lse": True, "engine": "aten"}
        return fd.attend(q, k, v, pattern, **options, **offsets)

    return attend


@pytest.mark.usefixtures("always_apart")
@given(scattered(), BAD)
def test_any_pattern_is_the_oracle(case, value):
    """And hidden slots reach nothing."""
    pattern, counts, drawn, offsets = case
    assert_agrees(attention(pattern, offsets), drawn, counts)
    assert_nothing_spreads(attention(pattern, offsets), drawn, counts, value)


@pytest.mark.parametrize("rule", [masks.causal(), masks.local_window(left=300, right=300)], ids=str)
def test_keys_that_are_hidden_have_no_gradient(rule):
    """Whatever the queries hold."""
    q, k, v = (torch.randn(1, 2, 1500, 16) for _ in range(3))
    q[:, :, 700] = torch.nan
    visible = torch.rand(1500) < 0.6
    k, v = k.requires_grad_(), v.requires_grad_()
    fd.attend(q, k, v, rule & masks.visible_keys(visible)).sum().backward()
    for grad in (k.grad, v.grad):
        assert grad is not None
        assert grad[:, :, ~visible].eq(0).all()
        assert grad[:, :, visible].isnan().any()


@pytest.mark.parametrize("rate", [2, 64])
def test_tokens_in_another_order(rate):
    x, visible, order = torch.randn(3, 2, 1, TOKENS, 8), torch.rand(2, TOKENS) < 0.5, masks.Layout(TOKENS, rate)
    rule = (masks.local_window(left=100, right=0) | masks.strided(64) & masks.causal()) & masks.visible_keys(visible)
    found = order.invert(fd.attend(*order.apply(x), rule, layout=order))
    torch.testing.assert_close(found, fd.attend(*x, rule), rtol=1e-4, atol=1e-5)
