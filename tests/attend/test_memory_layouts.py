"""Where numbers lie in memory changes no result, in low precision and where rows overlap.

`attend` in float64, caches, `attention_received`, ring, exchange and heads draw layouts in their own tests.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import MEMORY_LAYOUTS, laid_out

PATTERNS = {
    "dense": masks.every(),
    "causal": masks.causal(),
    "mixture": masks.longnet([16, 64], [1, 4]) & masks.causal(),
    "blocks": masks.local_window(left=9, right=0) | masks.global_tokens(3),
    "documents": masks.causal() & masks.documents(torch.arange(70) // 13),
    "lengths": masks.longnet([16, 64], [1, 4]) & masks.lengths(torch.tensor([70, 41])),
}


def assert_same_anywhere(pattern: masks.Pattern | masks.Mixture, *given: Tensor, **tolerance: float) -> None:
    """Results for q, k, v and the gradient of out as they lie are those for contiguous copies."""
    attend = partial(fd.attend, pattern=pattern, enable_gqa=True, return_lse=True)
    results = []
    for *leaves, grad in (given, [x.contiguous() for x in given]):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, lse = attend(*leaves)
        results.append((out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)))
    for found, truth in zip(*results, strict=True):
        assert_close(found, truth, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layouts", [MEMORY_LAYOUTS[:4], MEMORY_LAYOUTS[4:]], ids=str)
def test_every_dtype(layouts: tuple[str, ...], dtype: torch.dtype):
    """But for the last bits: a matrix product adds up otherwise where rows do not begin at whole words."""
    few, generator = 32 * torch.finfo(dtype).eps, torch.Generator().manual_seed(1)
    drawn = (torch.randn(2, heads, 70, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    given = [laid_out(x.to(dtype), layout) for x, layout in zip(drawn, layouts, strict=True)]
    for name in ("mixture", "blocks", "documents"):
        assert_same_anywhere(PATTERNS[name], *given, rtol=few, atol=few)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [4, 70])
def test_rows_that_share_memory(name: str, tokens: int):
    """Sliding windows over one buffer: every row begins one number after the one before it."""
    buffer = torch.randn(4, 2, 4, tokens + 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pattern = PATTERNS[name] if tokens == 70 else masks.causal()
    assert_same_anywhere(pattern, *(x.unfold(-1, 8, 1) for x in buffer), rtol=1e-12, atol=1e-12)
