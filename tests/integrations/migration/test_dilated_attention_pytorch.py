"""dilated-attention-pytorch 0.2.0, its own code run, against what is written here in its place; and its fork, restated.

Sources: https://github.com/fkodom/dilated-attention-pytorch, https://github.com/DarcStar-Solutions-Tech/dilated-attention-pytorch
at commit f6094f7.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import flexdilated as fd
from flexdilated import masks
from tests.support.vision import FOLDER

SEGMENTS, RATES = (16, 64), (1, 4)


def xformers_ops() -> ModuleType:
    """What the package uses of xformers, dense and in plain PyTorch; tensors are (batch, tokens, heads, head dim)."""

    def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, op: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=attn_bias is not None).transpose(1, 2)

    ops: Any = ModuleType("xformers.ops")
    ops.AttentionOp, ops.LowerTriangularMask = object, object
    ops.memory_efficient_attention = memory_efficient_attention
    return ops


@pytest.fixture(scope="module")
def package() -> ModuleType:
    """The package's module of attention, whose import needs xformers."""
    where = FOLDER / "dilated_attention_pytorch"
    if not where.is_dir():
        pytest.skip(f"dilated-attention-pytorch, which `make test` installs into {FOLDER}, is not there")
    xformers: Any = ModuleType("xformers")
    xformers.ops = xformers_ops()
    with pytest.MonkeyPatch.context() as patch:
        for module in (xformers, xformers.ops):
            patch.setitem(sys.modules, module.__name__, module)
        spec: Any = importlib.util.spec_from_file_location("dilated_attention", where / "dilated_attention.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def heads_last(num_heads: int = 4, num_tokens: int = 128, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 2, num_tokens, num_heads, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))


def pattern_of(segment_lengths: Sequence[int], dilation_rates: Sequence[int], causal: bool = False) -> masks.Pattern:
    """The pairs of theirs, as docs/integrations/migration.md has them."""
    branches = zip(segment_lengths, dilation_rates, strict=True)
    groups = masks.head_groups([masks.dilated(w, r, offset=i % r) for i, (w, r) in enumerate(branches)])
    return groups & masks.causal() if causal else groups


def ours(qkv: Tensor, pattern: masks.Pattern) -> Tensor:
    q, k, v = qkv.transpose(2, 3)
    return fd.attend(q, k, v, pattern).transpose(1, 2)


def theirs(package: Any, qkv: Tensor, *, causal: bool = False, **options: Any) -> Tensor:
    return package.DilatedAttention(SEGMENTS, RATES, **options)(*qkv, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_pairs_are_theirs_until_they_divide(package: Any, causal: bool) -> None:
    """They divide each channel by its sum over all tokens, and by the number of branches."""
    out = ours(heads_last(), pattern_of(SEGMENTS, RATES, causal))
    torch.testing.assert_close(theirs(package, heads_last(), causal=causal), out / out.sum(1, keepdim=True) / 2)


def test_faults_that_the_page_names(package: Any) -> None:
    """Of theirs: later tokens change earlier rows, heads 10 and 11 of 12 stay empty, scale and dropout do nothing."""
    plain, changed = theirs(package, heads_last(), causal=True), heads_last().clone()
    changed[2, :, -1] += 1
    moved = theirs(package, changed, causal=True)
    assert int((plain != moved)[:, :-1].any(-1).any(-1).all(0).sum()) == 127
    empty = ~package.DilatedAttention((8, 16, 32, 64, 128), (1, 2, 4, 6, 12))(*heads_last(12)).any(1).any(-1).any(0)
    assert empty.nonzero().flatten().tolist() == [10, 11]
    for option in ({"softmax_scale": 9.0}, {"attention_dropout": 0.9}):
        assert torch.equal(theirs(package, heads_last(), causal=True, **option), plain)
    out = ours(heads_last(), pattern_of(SEGMENTS, RATES))
    turned = (theirs(package, heads_last()).sign() != out.sign())[out != 0].double().mean()
    assert turned == pytest.approx(0.494, abs=1e-3)
    with pytest.raises(Exception, match="can't divide axis"):
        theirs(package, heads_last(num_tokens=100))


def test_their_weights_load(package: Any, page: SimpleNamespace) -> None:
    """The module of the page has their parameters; with one branch over all, and no division, it is dense."""
    module = page.MagnetoAttention
    weights = package.MultiheadDilatedAttention(64, 4, RATES, SEGMENTS).state_dict()
    module(64, 4, pattern_of(SEGMENTS, RATES)).load_state_dict(weights)
    dense = module(64, 4, masks.every())
    dense.load_state_dict(weights)
    torch.manual_seed(0)
    x = torch.randn(2, 50, 64)
    q, k, v = (F.linear(x, weights[f"{n}.weight"], weights[f"{n}.bias"]) for n in ("q_proj", "k_proj", "v_proj"))
    heads = [y.unflatten(-1, (4, 16)).transpose(1, 2) for y in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    out = F.layer_norm(out, (64,), weights["norm.weight"], weights["norm.bias"])
    want = F.linear(out, weights["out_proj.weight"], weights["out_proj.bias"])
    torch.testing.assert_close(dense(x), want, rtol=1e-4, atol=1e-5)
