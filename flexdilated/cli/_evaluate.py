"""Bits per byte of a model: one process's share of it, and the mean over fixed windows."""

from __future__ import annotations

from math import log

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from ._model import ByteModel
from ._team import Team


def loss_bits(model: ByteModel, window: UInt8[Tensor, " m"], device: torch.device) -> Float[Tensor, ""]:
    """Mean cross-entropy, in bits, of each of the window's bytes after the first; differentiable.

    Where several processes share the window, what this one adds to that mean.
    """
    tokens = window.to(device, torch.int64)
    logits, following = model(tokens[None, :-1])[0], tokens[1:]
    mine = following[model.positions(len(following))]
    return F.cross_entropy(logits, mine, reduction="sum") / (log(2) * len(following))


@torch.no_grad()
def mean_bits(model: ByteModel, windows: UInt8[Tensor, "w m"], team: Team) -> float:
    """Bits per byte over all windows, each read from its start with nothing before it."""
    bits = torch.stack([loss_bits(model, window, team.device) for window in windows])
    team.add_up([bits])
    return sum(bits.tolist()) / len(windows)
