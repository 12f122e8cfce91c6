"""No derivative of a model passes a tie that torch decides: equal tokens, weights of -1, 0 and 1, and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexdilated as fd
from flexdilated import masks
from flexdilated.integrations.torchscale import LongNetEncoder, LongNetEncoderConfig
from tests.support.ties import NoTies, tied

SIZES: dict[str, Any] = {
    **{"embed_dim": 16, "depth": 2, "num_heads": 4, "segment_lengths": (8, 16), "dilation_rates": (1, 2)},
}


def finite_gradients(module: nn.Module, *inputs: Tensor, **options: Any) -> None:
    """Calls the module under the watch, with all weights -1, 0 or 1, and asserts that its gradients are finite."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randint(-1, 2, weight.shape, generator=generator))
    with NoTies():
        out = module(*inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    for grad in torch.autograd.grad(out.sin().sum(), (*inputs, *module.parameters()), allow_unused=True):
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("norms", [{}, {"subln": True}, {"deepnorm": True}], ids=["plain", "subln", "deepnorm"])
def test_classifiers(pooling, norms):
    """One of the sequences is padding but for a token."""
    config = fd.LongNetConfig(**SIZES, **norms, vocab_size=None, causal=False)
    padding = torch.arange(21) >= torch.tensor([[21], [1]])
    module = fd.LongNetClassifier(config, 3, pooling=pooling, dtype=torch.float64)
    finite_gradients(module, tied(2, 21, 16, seed=0), key_padding_mask=padding)


def test_other_modules():
    x, y = tied(2, 21, 16, seed=0), tied(2, 4, 21, 4, seed=1)
    finite_gradients(fd.MultiheadDilatedAttention(16, 4, (8, 16), (1, 2), batch_first=True, dtype=x.dtype), x, x, x)
    finite_gradients(fd.BlockSparseAttention(masks.longnet([8, 16], [1, 2])), y, y, y)
    finite_gradients(LongNetEncoder(LongNetEncoderConfig(**SIZES)).double(), x)
