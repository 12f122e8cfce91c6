"""What docs/integrations/migration.md writes in place of other libraries' attention.

dilated-attention-pytorch 0.2.0 (https://github.com/fkodom/dilated-attention-pytorch) is run itself. Restated are
NATTEN's neighbourhoods (https://github.com/SHI-Labs/NATTEN, its documentation of windows and dilation), by the oracle,
and xFormers' attention biases (https://github.com/facebookresearch/xformers, `xformers/ops/fmha/attn_bias.py` before
mslk).
"""

import importlib.util
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import flexdilated as fd
from bench._dense import counts
from bench._vision import FOLDER
from flexdilated import masks
from tests.project.test_docs import run
from tests.support import oracle

SEGMENTS, RATES = (16, 64), (1, 4)


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    """What the examples of the page define."""
    return SimpleNamespace(**run(Path(__file__).resolve().parents[3] / "docs" / "integrations" / "migration.md"))


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


NEIGHBORHOODS = {
    "one number": ((9, 9), 3, 2, 2, False),
    "a number for each axis": ((5, 6, 8), (3, 2, 4), (1, 3, 2), (2, 1, 3), (True, False, False)),
}


@pytest.mark.parametrize("name", NEIGHBORHOODS)
def test_neighborhoods_of_natten(page: SimpleNamespace, name: str) -> None:
    """Grids with heads last, every argument of theirs, fewer heads of k and v; outputs and gradients."""
    grid, *numbers = NEIGHBORHOODS[name]
    qkv = torch.randn(3, 2, *grid, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = inputs = [qkv[0].requires_grad_(), *(x[..., :1, :].requires_grad_() for x in qkv[1:])]
    options = dict(zip(("kernel_size", "dilation", "stride", "is_causal"), numbers, strict=True))
    found = page.neighborhood_attention(q, k, v, **options, scale=0.7, enable_gqa=True)
    axes = zip(
        grid, *(number if isinstance(number, tuple) else (number,) * len(grid) for number in numbers), strict=True
    )
    tokens = torch.arange(prod(grid))
    counts = oracle.counts(oracle.neighborhood([(*axis, False) for axis in axes]), range(2), 2, tokens, tokens)
    want, _ = oracle.attention(*(x.flatten(1, -3).transpose(1, 2) for x in inputs), counts, 0.7)
    want = want.transpose(1, 2).unflatten(1, grid)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), inputs) for out in (found, want)))


def band(num_queries: int, num_keys: int, left: int | None, right: int | None, bottom_right: bool = False) -> Tensor:
    """Keys from `left` before the query to `right` after it, both at their index or counted from the last ones."""
    shift = num_keys - num_queries if bottom_right else 0
    pairs = torch.ones(num_queries, num_keys, dtype=torch.bool)
    pairs = pairs if left is None else pairs.triu(shift - left)
    return pairs if right is None else pairs.tril(shift + right)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("q_lengths", [[2, 1, 3], [9, 1, 20]], ids=str)
def test_other_lengths_of_keys(page: SimpleNamespace, q_lengths: list[int], bottom_right: bool) -> None:
    k_lengths = [9, 5, 26]
    for causal, lookback in ((False, None), (True, None), (True, 1), (True, 6)):
        made = page.block_diagonal(q_lengths, k_lengths, causal=causal, bottom_right=bottom_right, lookback=lookback)
        limits = None if lookback is None else lookback - 1, 0 if causal else None, bottom_right
        blocks = (band(*sizes, *limits).long() for sizes in zip(q_lengths, k_lengths, strict=True))
        assert torch.equal(counts(made, sum(q_lengths), 40)[0], torch.block_diag(*blocks))


@pytest.mark.parametrize("window", [None, 4])
def test_padded_and_gappy_keys(window: int | None) -> None:
    """A query a row: theirs flat, (1, rows, heads, dim) and (1, rows * padding, heads, dim); here a batch of rows."""
    lengths, start = torch.tensor([5, 16, 9]), torch.tensor([0, 3, 8])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 3, 2, 8, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 1, 3 * 16, 2, 8, dtype=torch.float64, generator=generator)
    t = torch.arange(16)
    visible = t < lengths[:, None]
    if window is not None:
        visible &= t >= lengths[:, None] - window
    for seen in (visible, (t >= start[:, None]) & (t < lengths[:, None])):
        flat = torch.zeros(3, 3 * 16, dtype=torch.bool)
        for row in range(3):
            flat[row, row * 16 : (row + 1) * 16] = seen[row]
        want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=flat)
        rows = (x.unflatten(1, (3, -1)).squeeze(0).transpose(1, 2) for x in (q, k, v))
        found = fd.attend(*rows, masks.visible_keys(seen))
        torch.testing.assert_close(found[:, :, 0], want[0].transpose(0, 1))
