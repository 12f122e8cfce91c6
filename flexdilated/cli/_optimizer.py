"""The optimisers of a run: Muon for the blocks' matrices, AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch

from ._model import ByteModel

_MATRIX_RATE, _OTHER_RATE = 0.04, 0.015


class Optimizers:
    """Two optimisers over disjoint parameters, stepped together with one factor on their learning rates.

    Muon makes every direction of a matrix's update count alike, which in a run of a few hundred steps is
    worth a multiple of them. Source: Keller Jordan, "Muon: an optimizer for hidden layers", 2024.
    """

    def __init__(self, model: ByteModel) -> None:
        matrices = [p for p in model.trunk.parameters() if p.dim() == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self._parts: tuple[tuple[torch.optim.Optimizer, float], ...] = (
            (torch.optim.Muon(matrices, lr=_MATRIX_RATE, momentum=0.9, weight_decay=0.0), _MATRIX_RATE),
            (torch.optim.AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0), _OTHER_RATE),
        )

    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` times the full learning rates, and clear them."""
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> list[dict[str, Any]]:
        """Plain data and tensors that `load` takes."""
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Go on from what `state` gave."""
        for (optimizer, _), part in zip(self._parts, state, strict=True):
            optimizer.load_state_dict(part)
