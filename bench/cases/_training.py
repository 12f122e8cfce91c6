"""A training step of a model: its loss, and what it gives."""

import torch
from torch import Tensor, nn

Step = tuple[Tensor, dict[str, Tensor]]  # outputs, and gradients by the names of parameters


def loss(out: Tensor) -> Tensor:
    """A norm alone would be constant where the last layer is one of RMS."""
    return (out - torch.linspace(-1, 1, out.numel()).view_as(out)).pow(2).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
