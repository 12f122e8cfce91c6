"""A training run: the model, its optimisers and its past, as one thing that saves and loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ._model import ByteModel
from ._optimizer import Optimizers


@dataclass
class Run:
    """`losses` holds the bits per byte of every training step so far; `before` the validation's at step 0."""

    model: ByteModel
    optimizers: Optimizers
    device: torch.device
    losses: list[float] = field(default_factory=list)
    before: float = float("nan")
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps behind."""
        return len(self.losses)

    def state(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Plain data and tensors; `identity` is what a run that goes on must share.

        No generator's state: after its parameters are drawn, a run draws nothing but its windows, and they
        are a function of seed and step.
        """
        return {
            "identity": identity,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state(),
            "losses": self.losses,
            "before": self.before,
            "seconds": self.seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizers.load(state["optimizers"])
        self.losses = state["losses"]
        self.before, self.seconds = state["before"], state["seconds"]
