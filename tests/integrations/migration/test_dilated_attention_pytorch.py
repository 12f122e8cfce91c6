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
from flexdilated.masks import recipes
from tests.support import oracle
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


def test_a_later_token_changes_earlier_rows_there(package: Any) -> None:
    changed = heads_last().clone()
    changed[2, :, -1] += 1
    rows = slice(None, -1)
    before, after = (theirs(package, qkv, causal=True)[:, rows] for qkv in (heads_last(), changed))
    # The last token lies in the first branch alone, whose rows all change; of the second, every fourth token is active.
    assert int((before != after).any(-1).any(-1).all(0).sum()) == 127
    pattern = pattern_of(SEGMENTS, RATES, causal=True)
    assert torch.equal(ours(heads_last(), pattern)[:, rows], ours(changed, pattern)[:, rows])


def test_signs_turn_where_a_sum_is_negative(package: Any) -> None:
    out = ours(heads_last(), pattern_of(SEGMENTS, RATES))
    turned = (theirs(package, heads_last()).sign() != out.sign())[out != 0].double().mean()
    assert turned == pytest.approx(0.494, abs=1e-3)


def test_values_grow_where_a_sum_is_small(package: Any) -> None:
    largest = 0.0
    for seed in range(50):
        q, k, v = torch.randn(3, 1, 128, 4, 8, generator=torch.Generator().manual_seed(seed))
        largest = max(largest, float(package.DilatedAttention(SEGMENTS, RATES)(q, k, v).abs().max()))
        assert ours(torch.stack([q, k, v]), pattern_of(SEGMENTS, RATES)).abs().max() <= v.abs().max()
    assert largest > 50


def test_uneven_heads(package: Any) -> None:
    """12 heads over the paper's 5 branches, as their LongNet has it: there heads 10 and 11 stay empty."""
    segments, rates = (8, 16, 32, 64, 128), (1, 2, 4, 6, 12)
    qkv = heads_last(12)
    empty = ~package.DilatedAttention(segments, rates)(*qkv).any(1).any(-1).any(0)
    assert empty.nonzero().flatten().tolist() == [10, 11]
    assert ours(qkv, pattern_of(segments, rates)).any(1).any(-1).all()


def test_options_without_effect_there(package: Any) -> None:
    plain = theirs(package, heads_last())
    assert torch.equal(theirs(package, heads_last(), softmax_scale=9.0), plain)
    assert torch.equal(theirs(package, heads_last(), attention_dropout=0.9), plain)


def test_any_number_of_tokens_here(package: Any) -> None:
    with pytest.raises(Exception, match="can't divide axis"):
        theirs(package, heads_last(num_tokens=100))
    qkv = heads_last(num_tokens=100)
    rules = [oracle.dilated(w, r, i % r) for i, (w, r) in enumerate(zip(SEGMENTS, RATES, strict=True))]
    places = torch.arange(100)
    counts = oracle.counts(oracle.grouped(*rules), range(4), 4, places, places)
    want = oracle.attention(*qkv.transpose(2, 3), counts)[0].transpose(1, 2)
    torch.testing.assert_close(ours(qkv, pattern_of(SEGMENTS, RATES)), want)


def test_sizes_that_only_they_refuse(package: Any) -> None:
    with pytest.raises(ValueError, match="divisible by 8"):
        package.MultiheadDilatedAttention(36, 3, [1, 4], [16, 64])
    fd.MultiheadDilatedAttention(36, 3, (16, 64), (1, 4), batch_first=True)


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


def test_the_fork_divides_by_the_number_of_branches() -> None:
    """`DilatedAttention` of the fork, restated: no sum over tokens, and each head's output divided all the same."""
    q, k, v = heads_last()
    out = torch.zeros_like(q)
    for i, (w, r) in enumerate(zip(SEGMENTS, RATES, strict=True)):
        for begin in range(0, 128, w):
            held = slice(begin + i % r, begin + w, r)
            part = (x[:, held, 2 * i : 2 * i + 2].transpose(1, 2) for x in (q, k, v))
            out[:, held, 2 * i : 2 * i + 2] = F.scaled_dot_product_attention(*part).transpose(1, 2) / len(RATES)
    torch.testing.assert_close(out, ours(heads_last(), pattern_of(SEGMENTS, RATES)) / 2)


def test_the_fork_attends_over_heads() -> None:
    """`ImprovedDilatedAttention` and `RingDilatedAttention`, restated: SDPA is handed tensors with heads last."""
    qkv = heads_last()
    out = F.scaled_dot_product_attention(*qkv)
    changed = qkv.clone()
    changed[:, :, 5] += 1
    rows = (F.scaled_dot_product_attention(*changed) != out).any(-1).any(-1).any(0)
    assert rows.nonzero().flatten().tolist() == [5]  # no token sees another
    assert not torch.allclose(out, ours(qkv, masks.every()), atol=0.1)


def test_the_fork_adds_up_a_softmax_a_block() -> None:
    """`BlockSparseRingDilatedAttention`, restated: rows weigh as many values as there are blocks."""
    q, k, v = heads_last().transpose(2, 3)
    pattern = recipes.darcstar_local_window(local_window_size=32, block_size=16)
    ones = torch.ones_like(v)
    out = torch.zeros_like(v)
    for i, j in ((i, j) for i in range(8) for j in range(8) if abs(i - j) <= 1):
        part = (x[:, :, 16 * at : 16 * (at + 1)] for x, at in ((q, i), (k, j), (ones, j)))
        out[:, :, 16 * i : 16 * (i + 1)] += F.scaled_dot_product_attention(*part)
    assert out.amax() == pytest.approx(3)
    assert out.amin() == pytest.approx(2)
    torch.testing.assert_close(fd.attend(q, k, ones, pattern), ones)
