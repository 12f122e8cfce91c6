"""Keys and values of batch 1, which all batch entries of the queries share."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks


@pytest.mark.parametrize("batch", [3, 0])
def test_they_are_the_call_with_expanded_keys(batch):
    """With zero keys, without entries, and in what follows attend's lse."""
    pattern = masks.longnet([8, 16], [1, 3], padding="zeros")
    q, k, v = (torch.randn(size, 2, 20, 8, dtype=torch.float64, requires_grad=True) for size in (batch, 1, 1))
    wide_k, wide_v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    found, wanted = (fd.attend(q, *each, pattern, return_lse=True) for each in ((k, v), (wide_k, wide_v)))
    assert_close(found, wanted, rtol=0, atol=1e-12)
    grads = (torch.autograd.grad(each[0].square().sum(), (q, k, v)) for each in (found, wanted))
    assert_close(*grads, rtol=0, atol=1e-12)
    for call in (fd.attention_received, lambda *each: fd.block_mass(*each, block=4)) if batch else ():
        assert torch.equal(call(q, k, found[1], pattern), call(q, wide_k, found[1], pattern))
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


def test_where_keys_of_batch_1_are_not_served_the_error_expands_them():
    q, k = torch.randn(3, 2, 12, 8), torch.randn(1, 2, 12, 8)
    selector = fd.BlockSelector(block=4, choose=fd.TopK(1))
    for call in (lambda k: selector(q, k), lambda k: fd.KVCache(masks.causal(), num_heads=2).attend(q, k, k)):
        with pytest.raises(ValueError, match=r"write k.expand\(3, -1, -1, -1\), and the same of v$"):
            call(k)
        call(k.expand(3, -1, -1, -1))
