"""Branches that nest are computed together: every pair once, weighted by how many branches allow it."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.planning._candidates import ANYTHING, Allowed
from flexdilated.masks.planning._planner import Plan, plan
from flexdilated.masks.planning.lowering import _nested
from tests.engines.test_aten import Layout, assert_plan_agrees
from tests.masks.planning.test_planner import weight_of_all
from tests.support import twins
from tests.support.strategies import Case, tensors

pytestmark = pytest.mark.usefixtures("without_masks")


@st.composite
def nested(draw: st.DrawFn) -> Case:
    """Segments and rates that divide the next ones, a branch twice, the past only, any heads of all, any N."""
    size = draw(st.integers(2, 4))
    rates = list(accumulate(draw(st.lists(st.integers(1, 3), min_size=size, max_size=size)), lambda a, b: a * b))
    ratios = draw(st.lists(st.integers(1, 4), min_size=size - 1, max_size=size - 1))
    first = rates[-1] * draw(st.integers(1, 3))
    segments = list(accumulate([first, *ratios], lambda a, b: a * b))
    order = draw(st.permutations(range(size)))
    branches = [(segments[i], rates[i]) for i in order] + [(segments[0], rates[0])] * draw(st.booleans())
    widths, steps = zip(*branches, strict=True)
    twin = twins.longnet(widths, steps)
    twin = twin & twins.causal() if draw(st.booleans()) else twin
    N, heads = draw(st.integers(1, 64)), draw(st.integers(1, 5))
    first_head = draw(st.integers(0, 3))
    return Case(twin, heads, N, N, 0, 0, first_head, first_head + heads + draw(st.integers(0, 2)))


@pytest.fixture(autouse=True, scope="module")
def short_strips():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_nested, "_STRIP_ROWS", 4)
        masks.cache().clear()
        yield
    masks.cache().clear()


def together(case: Case) -> Plan | None:
    """The plan that computes all branches together, whether or not it is the cheapest."""
    planned = plan(case.bind())
    return replace(planned, terms=planned.together[0].terms) if planned.together else None


@settings(max_examples=12)
@given(nested())
def test_terms_are_the_dense_rule(case):
    chosen, counts = together(case), case.counts()
    assert (chosen is None) == (len(set(case.bind().pattern.branches())) == 1)
    if chosen is not None:
        assert torch.equal(weight_of_all(chosen.terms, counts.shape), counts)
        once = [replace(term, multiplicity=1, weights=None) for term in chosen.terms]
        assert torch.equal(weight_of_all(once, counts.shape), (counts > 0).long())


@st.composite
def partly_nested(draw: st.DrawFn) -> Case:
    """Nested branches beside others, and offsets under which only some nest."""
    case = draw(nested())
    offsets, left = draw(st.sampled_from(["interleaved", "contiguous"])), draw(st.integers(0, 9))
    other, window = twins.longnet([16, 18], [4, 3], offsets=offsets), twins.local_window(left=left, right=0)
    return replace(case, twin=case.twin + other + window)


@settings(max_examples=10)
@given(st.data())
def test_attention_is_the_oracle(data):
    case = data.draw(st.one_of(nested(), partly_nested()))
    chosen = together(case)
    if chosen is not None:
        assert_plan_agrees(chosen, Layout(case.num_queries), data.draw(tensors(case, one_width=True)), case.counts(), 8)


WINDOW = masks.local_window(left=3, right=3)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        (masks.longnet([8, 12], [1, 2]), {}),  # 8 does not divide 12
        (masks.longnet([6, 24], [1, 4]), {}),  # a segment of 6 starts within a period of 4
        (masks.longnet([12, 24], [2, 3]), {}),  # 2 does not divide 3
        (masks.longnet([8, 40], [1, 2]), {}),  # five times as long: too many terms
        (masks.longnet([8, 16], [2, 4], offsets="contiguous"), {}),  # head 2 is active at 0, then at 1
        (masks.longnet([8, 16], [1, 2]) & WINDOW, {}),
        (masks.longnet([8], [1]) + WINDOW, {}),
        (masks.longnet([8], [1]), {}),
        (masks.longnet([8, 16], [1, 2]), {"q_offset": 8}),
        (masks.longnet([8, 16], [1, 2]), {"num_keys": 32}),
    ],
)
def test_what_does_not_nest_or_an_engine_cannot_run_is_not_offered(pattern, sizes):
    bound = pattern.bind(**{"num_heads": 8, "num_queries": 48, "num_keys": 48, **sizes})
    assert not plan(bound).together
    bound = masks.longnet([8, 16], [1, 2]).bind(num_heads=2, num_queries=48, num_keys=48)
    assert plan(bound, allowed=ANYTHING).together
    assert not plan(bound, allowed=Allowed(key_weights=False)).together
    assert not plan(bound, allowed=Allowed(shared_rows=False)).together


def test_shared_pairs_are_computed_once():
    """Segments and rates that double: 2,944 distinct pairs of 3,840 a query, found in the plan and in the table."""
    pattern, N = masks.longnet([2048, 4096, 8192, 16384], [1, 2, 4, 8]), 16384
    told = masks.describe(pattern, N, num_heads=2)
    assert told.useful_pairs == 2 * N * 3840
    assert told.computed_pairs == 2 * N * 2944
    assert "nested" in str(told)
    assert "branch by branch" in str(told.to_data())


def test_reduced_precision():
    """Weights are exact where q, k and v are not: the error is that of one rounding of the output."""
    pattern, N, dtype = masks.longnet([512, 1024], [1, 2]), 1280, torch.bfloat16
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, N, 16, dtype=dtype) for _ in range(3))
    assert plan(pattern.bind(num_heads=2, num_queries=N, num_keys=N)).options[0][0].layout == "nested"
    found = fd.attend(q, k, v, pattern)
    truth = fd.attend(q, k, v, pattern, engine="reference")
    assert_close(found, truth, rtol=0.0, atol=4 * torch.finfo(dtype).eps)
