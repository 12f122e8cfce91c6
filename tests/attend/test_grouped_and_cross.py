"""Grouped key/value heads under patterns that differ by head, and queries over other keys: every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.engines.test_flex import attend_by, call_key
from tests.support import twins
from tests.support.agreement import assert_agrees
from tests.support.strategies import Case, block_sides, cases, leaves, tensors
from tests.support.twins import Twin

# B batch, H query heads, G key/value heads, N queries, M keys

ENGINES = ("aten", "reference", "portable", "flex")  # flex around a dense stand-in for its kernel


def by(engine: str, case: Case, kv_heads: int, side: int) -> Callable[..., Any]:
    if engine == "flex":
        return attend_by(call_key(case, kv_heads, side), 0.5)
    options = {"enable_gqa": True, "scale": 0.5, "engine": engine, "block_size": side, "return_lse": True}
    return lambda q, k, v: fd.attend(q, k, v, case.twin.pattern, **options, **case.sizes)


@st.composite
def one_a_head(draw: st.DrawFn, num_heads: int) -> Twin:
    """A pattern for each head, two of them at least different."""
    parts = [draw(leaves) for _ in range(num_heads)]
    assume(num_heads == 1 or len({part.pattern for part in parts}) > 1)
    return twins.per_head(parts)


@settings(max_examples=12)
@given(st.data(), block_sides)
@pytest.mark.parametrize("engine", ENGINES)
def test_heads_that_share_keys_look_in_different_places(engine, data, side):
    """All the heads or some of them, with fewer key/value heads."""
    case = data.draw(cases(one_a_head).filter(lambda case: case.num_heads > 1))
    drawn = data.draw(tensors(case).filter(lambda drawn: drawn[1].shape[1] < case.num_heads))
    assert_agrees(by(engine, case, drawn[1].shape[1], side), drawn, case.counts(), scale=0.5)


@given(st.data(), block_sides, st.sampled_from([1, 5, 1000]))
def test_only_the_distance_of_windows_counts(data, side, shift):
    """Queries and keys moved together see what they saw."""
    left, right = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    twin = twins.local_window(left=left, right=right)
    case = data.draw(cases(lambda num_heads: st.just(twin)))
    q, k, v = data.draw(tensors(case))
    moved = replace(case, q_offset=case.q_offset + shift, k_offset=case.k_offset + shift)
    for one, other in zip(*(by("aten", each, k.shape[1], side)(q, k, v) for each in (case, moved)), strict=True):
        assert_close(one, other)


def shared_keys(drawn: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v of one batch entry, all of them leaves."""
    q, k, v = (x.detach() for x in drawn)
    q, k, v = (x.requires_grad_() for x in (q, k[:1], v[:1]))
    return q, k, v


@settings(max_examples=12)
@given(st.data(), block_sides)
@pytest.mark.parametrize("engine", ["aten", "reference", "portable"])
def test_keys_of_batch_1_are_those_of_every_entry(engine, data, side):
    """Gradients are sums over the batch, also where entries hide different keys."""
    case = data.draw(cases())
    drawn = shared_keys(data.draw(tensors(case, batch=data.draw(st.integers(2, 3)))))
    pattern, counts = case.twin.pattern, case.counts()
    if data.draw(st.booleans()):
        real = torch.rand(len(drawn[0]), case.num_keys + case.k_offset) < 0.7
        pattern, counts = pattern & masks.visible_keys(real), counts * real[:, None, None, case.k_offset :]
    options = {"enable_gqa": True, "scale": 0.5, "engine": engine, "block_size": side, "return_lse": True}
    assert_agrees(lambda *qkv: fd.attend(*qkv, pattern, **options, **case.sizes), drawn, counts, scale=0.5)


BATCH_1 = {
    "score_mod": {"score_mod": lambda score, b, h, q_idx, k_idx: score * (b + 1) - k_idx},
    "dropout": {"dropout_p": 0.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "zero keys": {"pattern": masks.longnet([8, 16], [1, 3], padding="zeros")},
    "no entries": {"batch": 0},
}


@pytest.mark.parametrize("name", BATCH_1)
def test_keys_of_batch_1_with_every_feature(name):
    """Bit for bit the call with expanded keys, also of what follows attend's lse."""
    torch.manual_seed(0)
    given = dict(BATCH_1[name])
    batch = given.pop("batch", 3)
    pattern = given.pop("pattern", masks.local_window(left=5, right=2))
    q, k, v = (torch.randn(size, 2, 20, 8, dtype=torch.float64) for size in (batch, 1, 1))
    wide_k, wide_v = (x.repeat(batch, 1, 1, 1) for x in (k, v))

    def results(q, k, v):
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        torch.manual_seed(1)
        out = fd.attend(q, k, v, pattern, **given)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    found, wanted = results(q, k, v), results(q, wide_k, wide_v)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other.sum(0, keepdim=True) if len(one) != len(other) else other, rtol=0, atol=1e-12)
    if batch and not given:
        _, lse = fd.attend(q, k, v, pattern, return_lse=True)
        for call in (fd.attention_received, lambda *each: fd.block_mass(*each, block=4)):
            assert torch.equal(call(q, k, lse, pattern), call(q, wide_k, lse, pattern))
        assert torch.equal(fd.pooled_scores(q, k, block=4), fd.pooled_scores(q, wide_k, block=4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_keys_of_batch_1_compile_as_they_run(dynamic):
    pattern = masks.longnet([8, 16], [1, 2]) & masks.causal()
    compiled = torch.compile(
        lambda *qkv: fd.attend(*qkv, pattern), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for tokens in (20, 24):
        drawn = tuple(torch.randn(size, 2, tokens, 8, dtype=torch.float64, requires_grad=True) for size in (3, 1, 1))
        outs = [call(*drawn) for call in (compiled, lambda *qkv: fd.attend(*qkv, pattern))]
        grads = [torch.autograd.grad(out.square().sum(), drawn) for out in outs]
        assert_close((outs[0], *grads[0]), (outs[1], *grads[1]))


def test_a_module_hides_keys_by_entry_of_keys_of_batch_1():
    q, k, v = (torch.randn(size, 2, 12, 8, dtype=torch.float64) for size in (3, 1, 1))
    layer, hidden = fd.BlockSparseAttention(masks.causal()), torch.rand(3, 12) < 0.4
    wide = layer(q, *(x.expand(3, -1, -1, -1) for x in (k, v)), key_padding_mask=hidden)
    assert torch.equal(layer(q, k, v, key_padding_mask=hidden), wide)


@pytest.mark.parametrize("sizes", [(3, 2, 2), (3, 2, 1), (3, 1, 3), (3, 3, 1), (1, 3, 3)])
def test_other_batches_are_refused(sizes):
    q, k, v = (torch.randn(size, 2, 12, 8) for size in sizes)
    with pytest.raises(ValueError, match=r"k and v must have one shape|must agree in batch"):
        fd.attend(q, k, v, masks.causal())


def test_where_keys_of_batch_1_are_not_served_the_error_expands_them():
    q, k = torch.randn(3, 2, 12, 8), torch.randn(1, 2, 12, 8)
    selector = fd.BlockSelector(block=4, choose=fd.TopK(1))
    for call in (lambda k: selector(q, k), lambda k: fd.KVCache(masks.causal(), num_heads=2).attend(q, k, k)):
        with pytest.raises(ValueError, match=r"write k.expand\(3, -1, -1, -1\), and the same of v$"):
            call(k)
        call(k.expand(3, -1, -1, -1))
