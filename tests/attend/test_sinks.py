"""Attention sinks: their dtypes, gradients of theirs alone, and autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support import oracle
from tests.support.agreement import TIGHT

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

# Some heads of longnet([8, 16], [2, 4]) have rows without keys.
PATTERN = masks.longnet([8, 16], [2, 4]) & masks.causal()
RULE = oracle.both(oracle.longnet([8, 16], [2, 4]), oracle.causal())


def qkv(dtype: torch.dtype = torch.float64, heads: int = 4, kv_heads: int = 2, N: int = 37) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, count, N, 8).to(dtype).requires_grad_() for count in (heads, kv_heads, kv_heads))


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
