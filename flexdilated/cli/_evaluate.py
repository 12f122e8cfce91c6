"""Bits per byte of a model on fixed windows."""

from __future__ import annotations

from math import log

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F


def loss_bits(model: nn.Module, window: UInt8[Tensor, " m"], device: torch.device) -> Float[Tensor, ""]:
    """Mean cross-entropy, in bits, of each of the window's bytes after the first; differentiable."""
    tokens = window.to(device, torch.int64)
    logits = model(tokens[None, :-1])[0]
    return F.cross_entropy(logits, tokens[1:]) / log(2)


@torch.no_grad()
def mean_bits(model: nn.Module, windows: UInt8[Tensor, "w m"], device: torch.device) -> float:
    """Bits per byte over all windows, each read from its start with nothing before it."""
    return sum(loss_bits(model, window, device).item() for window in windows) / len(windows)
