"""The aten engine: a million tokens, few tokens in one call under a mask, and keys that are hidden here and there."""

from dataclasses import replace
from time import process_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import WholeRows
from flexdilated.engines.aten import _aten_op
from flexdilated.engines.aten._aten_op import plan_aten, portion_limits_on
from flexdilated.engines.aten._program import make_program
from flexdilated.masks import Bound, Layout
from flexdilated.masks.patterns import KeySet
from flexdilated.masks.planning import CountedPairs
from flexdilated.masks.planning._planner import Plan
from flexdilated.masks.planning.lowering._layouts import masked_term
from tests.support.agreement import assert_agrees, assert_nothing_spreads
from tests.support.drawn_calls import BAD
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import cases, tensors


class RunPlan(torch.autograd.Function):
    """A program as a differentiable function: the engine without its op, for plans no one would choose."""

    @staticmethod
    def forward(ctx, program, q, k, v):
        out, lse = program.forward(q, k, v, 0.5)
        ctx.program = program
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        return None, *ctx.program.backward(q, k, v, WholeRows(out, lse, grad_out, grad_lse), 0.5)


def assert_plan_agrees(chosen: Plan, given_order: Layout, data: tuple[Tensor, ...], counts: Tensor, side: int) -> None:
    program = make_program(chosen, given_order, num_kv_heads=data[1].shape[1], block_size=(side, side))
    assert_agrees(lambda q, k, v: RunPlan.apply(program, q, k, v), data, counts, scale=0.5)


def test_a_program_over_a_million_tokens_is_made_in_seconds():
    """Hundreds of portions: what each adds must not be looked for among all rows."""
    tokens = Layout(1 << 20)
    pattern = masks.longnet([2048, 4096, 8192], [1, 2, 4]) & masks.causal()
    bound = pattern.bind(num_heads=16, num_queries=1 << 20, num_keys=1 << 20)
    plan = plan_aten(bound, tokens, "cpu", None)
    begin = process_time()
    program = make_program(plan, tokens, num_kv_heads=16, block_size=(), **portion_limits_on("cpu"))
    assert process_time() - begin < 15
    assert len(program.steps) > 100
    assert program.complete


def under_mask(bound: Bound, *_: object, **__: object) -> Plan:
    """The plan of one masked term, whatever other ways would cost."""
    return Plan(bound, Layout(bound.num_queries), (masked_term(bound.pattern, 1, bound),), ())


@pytest.mark.parametrize(
    "pattern", [masks.longnet([8, 16], [2, 4]) & masks.causal(), masks.local_window(left=31, right=0)], ids=str
)
def test_later_keys_may_have_infinite_scores(pattern):
    """As with xPos, whose queries shrink and keys grow: what a rule hides is never asked for by a causal one."""
    generator = torch.Generator().manual_seed(0)
    grown = 10 ** torch.linspace(-30, 30, 60)[:, None]
    q, k, v = torch.randn(3, 1, 4, 60, 16, generator=generator).unbind()
    leaves = [(q.abs() / grown).requires_grad_(), (k.abs() * grown).requires_grad_(), v.requires_grad_()]
    assert (leaves[0].detach() @ leaves[1].detach().mT).isinf().any()
    bound = pattern.bind(num_heads=4, num_queries=60, num_keys=60)
    program = make_program(under_mask(bound), Layout(60), num_kv_heads=4)
    out = RunPlan.apply(program, *leaves)[0]
    exact = fd.attend(*leaves, pattern, scale=0.5, engine="reference")
    torch.testing.assert_close(out, exact)
    grads = (torch.autograd.grad(each.square().sum(), leaves[2])[0] for each in (out, exact))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@given(cases(), st.data(), st.integers(1, 30), st.booleans())
def test_calls_of_other_lengths_share_the_mask(case, data, more, longer_first):
    """A call after, or before, one with more queries and as many more keys is the oracle, with gradients."""
    drawn, bound = data.draw(tensors(case, one_width=True)), case.bind()
    longer = replace(bound, num_queries=bound.num_queries + more, num_keys=bound.num_keys + more)
    masks.cache().clear()
    if longer_first:
        masked_term(longer.pattern, 1, longer).bias(torch.float64)
    assert_plan_agrees(under_mask(bound), Layout(case.num_queries), drawn, case.counts(), 8)
    whole = masked_term(longer.pattern, 1, longer).weights.counts()
    assert torch.equal(whole[:, : bound.num_queries, : bound.num_keys], CountedPairs(bound)._count_branches())
    assert torch.equal(whole, CountedPairs(longer)._count_branches())
    masks.cache().clear()


def test_windows_of_many_lengths_hold_one_mask():
    """The longest, which serves all shorter ones; the rest are plans of each length."""
    pattern = masks.local_window(left=15, right=0)
    masks.cache().clear()
    for tokens in range(17, 917, 30):
        q, k, v = torch.randn(3, 1, 1, tokens, 8)
        found, exact = (fd.attend(q, k, v, pattern, engine=engine) for engine in ("aten", "reference"))
        torch.testing.assert_close(found, exact)
    stats = masks.cache().stats()
    assert stats.evictions == 0
    assert stats.bytes < 8 << 20
    masks.cache().clear()


TOKENS = 6000


@pytest.fixture
def always_apart(without_masks, monkeypatch):
    """Keys are hidden apart from the rule however few they are, and in calls of any number of queries."""
    monkeypatch.setattr(KeySet, "are_scattered", True)
    monkeypatch.setattr(_aten_op, "needs_no_plan", lambda key: False)
    monkeypatch.setattr(_aten_op, "_joined_entries", lambda *_: None)


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
@settings(max_examples=12)
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
