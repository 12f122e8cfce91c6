"""Attention sinks: every engine against the dense oracle, gradients of the sinks included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.engines.test_flex import attend_by, call_key
from tests.support import oracle
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.strategies import block_sides, cases, inputs, whole_cases

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

# Some heads of longnet([8, 16], [2, 4]) have rows without keys.
PATTERN = masks.longnet([8, 16], [2, 4]) & masks.causal()
RULE = oracle.both(oracle.longnet([8, 16], [2, 4]), oracle.causal())


@given(st.data())
def test_the_reference_is_the_oracle(data):
    """Some of the heads, grouped keys, any queries over any keys, gradients through output and lse."""
    case = data.draw(cases())

    def attend(q, k, v, sinks=None):
        options = {"enable_gqa": True, "engine": "reference", "return_lse": True}
        return fd.attend(q, k, v, case.twin.pattern, sinks=sinks, **options, **case.sizes)

    assert_agrees(attend, data.draw(inputs(case)), case.counts())


@given(st.data(), block_sides)
def test_flex_around_its_kernel_is_the_oracle(data, side):
    """Its epilogue, where the kernel gives an lse: here a dense one does."""
    case = data.draw(cases())
    drawn = data.draw(inputs(case))
    attend = attend_by(call_key(case, drawn[1].shape[1], side), 0.5)
    assert_agrees(attend, drawn, case.counts(), scale=0.5)


@settings(max_examples=12)
@given(st.data(), st.integers(1, 7), block_sides)
@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_in_a_layout(engine, data, rate, side):
    """Tokens in residue-major order in and out: the oracle with its rows and columns permuted."""
    case = data.draw(whole_cases())
    layout = masks.Layout(case.num_keys, rate)
    counts = case.counts()[:, layout.positions()][:, :, layout.positions()]

    def attend(q, k, v, sinks=None):
        options = {"layout": layout, "enable_gqa": True, "engine": engine, "block_size": side, "return_lse": True}
        return fd.attend(q, k, v, case.twin.pattern, sinks=sinks, **options)

    assert_agrees(attend, data.draw(inputs(case)), counts)


def qkv(dtype: torch.dtype = torch.float64, heads: int = 4, kv_heads: int = 2, N: int = 37) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, count, N, 8).to(dtype).requires_grad_() for count in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_a_row_without_keys_has_its_sink_alone(engine):
    q, k, v = qkv()
    sinks = torch.tensor([1.5, -0.5, -torch.inf, 4.0], dtype=torch.float64)
    nothing = masks.dilated(4, 8, 5)  # offset 5 of a segment of 4: no token is active
    out, lse = fd.attend(q, k, v, nothing, sinks=sinks, enable_gqa=True, engine=engine, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert_close(lse, sinks[:, None].expand(2, 4, 37), **TIGHT)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_a_sink_of_minus_infinity_is_none(engine):
    q, k, v = qkv()
    options = {"enable_gqa": True, "engine": engine, "return_lse": True}
    found = fd.attend(q, k, v, PATTERN, sinks=torch.full((4,), -torch.inf), **options)
    for with_sinks, without in zip(found, fd.attend(q, k, v, PATTERN, **options), strict=True):
        assert_close(with_sinks, without, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_float_dtype(dtype, sink_dtype):
    """The output has q's dtype and the lse is wide, whatever the sinks are; each gradient has its tensor's dtype."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=sink_dtype, requires_grad=True)
    inputs = *qkv(dtype), sinks
    counts = oracle.counts(RULE, range(4), 4, torch.arange(37), torch.arange(37))
    truth, truth_lse = oracle.attention(*inputs[:3], counts, None, sinks)
    true_grads = torch.autograd.grad(truth.sum() + truth_lse[truth_lse.isfinite()].sum(), inputs)
    for engine in ("aten", "reference"):
        out, lse = fd.attend(*inputs[:3], PATTERN, sinks=sinks, enable_gqa=True, engine=engine, return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        near = 2e-2 if dtype == torch.bfloat16 else 5e-3 if dtype == torch.float16 else 1e-5
        assert (out.double() - truth).norm() <= near * truth.norm()
        assert (lse.double() - truth_lse).norm() <= near * truth_lse.norm()
        grads = torch.autograd.grad(out.double().sum() + lse.double().sum(), inputs)
        near = max(near, 1e-2 if sink_dtype == torch.bfloat16 else 0)
        for grad, true_grad, x in zip(grads, true_grads, inputs, strict=True):
            assert grad.dtype == x.dtype
            assert (grad.double() - true_grad).norm() <= near * true_grad.norm()


def test_only_the_sinks_may_want_a_gradient():
    q, k, v = (x.detach() for x in qkv())
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    grads = []
    for engine in ("aten", "reference"):
        out = fd.attend(q, k, v, PATTERN, sinks=sinks, enable_gqa=True, engine=engine)
        grads += torch.autograd.grad(out.square().sum(), sinks)
    assert_close(grads[0], grads[1], **TIGHT)
    assert grads[0].abs().min() > 0


def test_autocast_leaves_sinks_as_they_are():
    q, k, v = (x.detach().float() for x in qkv())
    sinks = torch.tensor([1.0001, 0.0, 0.0, 0.0])
    half = tuple(x.bfloat16() for x in (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        found = fd.attend(q, k, v, PATTERN, sinks=sinks, enable_gqa=True, return_lse=True)
    for one, other in zip(found, fd.attend(*half, PATTERN, sinks=sinks, enable_gqa=True, return_lse=True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("sinks", "error", "says"),
    [
        ([0.0] * 4, TypeError, "sinks must be a tensor or None; got list"),
        (1.0, TypeError, "sinks must be a tensor or None; got float"),
        (torch.zeros(4, dtype=torch.int64), TypeError, "sinks must be float32, .*; got torch.int64"),
        (torch.zeros(3), ValueError, r"one logit for each head of q, shape \(4,\); got \(3,\)"),
        (torch.zeros(2), ValueError, r"shape \(4,\); got \(2,\)"),
        (torch.zeros(()), ValueError, r"shape \(4,\); got \(\)"),
        (torch.zeros(1, 4), ValueError, r"shape \(4,\); got \(1, 4\)"),
        (torch.zeros(4, device="meta"), ValueError, "sinks must be on the device of q, cpu; got meta"),
    ],
)
def test_bad_sinks(sinks, error, says):
    before = masks.cache().stats()
    with pytest.raises(error, match=says):
        fd.attend(*qkv(), PATTERN, sinks=sinks, enable_gqa=True)
    assert masks.cache().stats() == before
