"""Patterns that differ between batch entries: a choice of pattern, and the position of the first query."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import strategies as fst

B, H, N, M = 3, 4, 5, 90
STARTS = torch.tensor([85, 0, 41])


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((B, H, N, 8), (B, 2, M, 8), (B, 2, M, 16))
    q, k, v = (torch.randn(size, generator=draw, dtype=dtype).requires_grad_() for size in sizes)
    return q, k, v


def sample_by_sample(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Results of a separate call attend(index, q, k, v) for each batch entry, concatenated."""
    return torch.cat([attend(b, q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(len(q))])


@given(
    fst.patterns(num_heads=H, max_positions=M), st.lists(st.integers(0, M - N), min_size=B, max_size=B), st.booleans()
)
def test_queries_from_another_position_in_each_sample(pattern, starts, hides):
    q, k, v = tensors()
    visible = torch.rand(B, M, generator=torch.Generator().manual_seed(1)) < 0.7
    whole = pattern & masks.visible_keys(visible) if hides else pattern

    def alone(b: int, *x: Tensor) -> Tensor:
        rule = pattern & masks.visible_keys(visible[b]) if hides else pattern
        return fd.attend(*x, rule, q_offset=starts[b], enable_gqa=True)

    out = fd.attend(q, k, v, whole, q_offset=torch.tensor(starts), enable_gqa=True)
    expected = sample_by_sample(q, k, v, alone)
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)), strict=True):
        assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_score_mod_gets_positions(engine):
    q, k, v = tensors()
    table = torch.randn(H, 61, dtype=torch.float64, requires_grad=True)
    how = {"engine": engine, "enable_gqa": True, "score_mod": fd.biases.relative(table)}
    rule = masks.causal()
    out = fd.attend(q, k, v, rule, q_offset=STARTS, **how)
    expected = sample_by_sample(q, k, v, lambda b, *x: fd.attend(*x, rule, q_offset=int(STARTS[b]), **how))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    mine, theirs = (torch.autograd.grad(x.square().sum(), table)[0] for x in (out, expected))
    assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_one_position_serves_all_samples(engine):
    q, k, v = tensors()
    weight = torch.arange(B, dtype=torch.float64)
    how = {"engine": engine, "enable_gqa": True, "score_mod": lambda s, b, h, i, j: s + weight[b] * (i - j)}
    out = fd.attend(q, k, v, masks.causal(), q_offset=STARTS[:1], **how)
    assert_close(out, fd.attend(q, k, v, masks.causal(), q_offset=int(STARTS[0]), **how), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "how",
    [{}, {"engine": "portable"}, {"score_mod": lambda s, b, h, i, j: s - (i - j).abs()}],
    ids=["aten", "portable", "score_mod"],
)
def test_positions_may_change_in_place(how):
    """As in a loop of decoding: earlier gradients, and later calls from the earlier positions, are not affected."""
    _, q, v = tensors()
    k = q
    expected = fd.attend(q, k, v, masks.causal(), q_offset=STARTS, **how)
    of_expected = torch.autograd.grad(expected.square().sum(), (q, v))
    masks.cache().clear()
    starts = STARTS.clone()
    with torch.no_grad():
        fd.attend(q, k, v, masks.causal(), q_offset=starts, **how)
    starts -= starts.clamp(max=3)
    out = fd.attend(q, k, v, masks.causal(), q_offset=STARTS.clone(), **how)
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    starts.copy_(STARTS)
    out = fd.attend(q, k, v, masks.causal(), q_offset=starts, **how)
    starts -= starts.clamp(max=3)
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), (q, v)), of_expected, strict=True):
        assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_each_sample_its_own_pattern_by_default():
    q, k, v = tensors()
    rules = [masks.causal(), masks.every(), masks.local_window(left=1, right=1)]
    out = fd.attend(q, k, v, masks.per_sample(rules), enable_gqa=True, q_offset=40)
    expected = sample_by_sample(q, k, v, lambda b, *x: fd.attend(*x, rules[b], enable_gqa=True, q_offset=40))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_texts_name_the_tensors():
    rule = masks.per_sample([masks.causal(), masks.every()], "which").queries_from
    with pytest.raises(ValueError, match=r"queries_from needs .* other than visible_keys, .* masks.same_document"):
        rule("starts")
    for pattern in (
        masks.per_sample([masks.causal(), masks.every()], "which") & masks.causal(),
        (masks.longnet([8, 16], [1, 2]) & masks.causal()).queries_from("starts") & masks.visible_keys("seen"),
    ):
        assert masks.parse(repr(pattern)) == pattern
        assert masks.from_json(masks.to_json(pattern)) == pattern
