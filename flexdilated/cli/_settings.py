"""Settings of a demo run, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch

from ._usage import UsageError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user chose. `data=None` is the standard library's source; `minutes` bounds the training alone.

    Raises UsageError for a context below 2, fewer than 0 steps or bytes to sample, a number of minutes that is not a
    positive number, a seed outside [0, 2**63), and a device that this machine does not have.
    """

    context: int
    steps: int
    minutes: float
    seed: int
    device: str
    out: Path
    data: Path | None
    resume: bool
    sample: int

    def __post_init__(self) -> None:
        if self.context < 2:
            raise UsageError(f"--context must be at least 2; got {self.context}")
        if self.steps < 0:
            raise UsageError(f"--steps must be at least 0; got {self.steps}")
        if not (isfinite(self.minutes) and self.minutes > 0):
            raise UsageError(f"--minutes must be a positive number; got {self.minutes}")
        if self.sample < 0:
            raise UsageError(f"--sample must be at least 0; got {self.sample}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be in [0, 2**63); got {self.seed}")
        _check_device(self.device)


def _check_device(name: str) -> None:
    choices = ", ".join(available_devices())
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device must be one of {choices}; got {name!r}") from None
    if device.type not in available_devices() or (device.index or 0) >= _count(device.type):
        raise UsageError(f"--device must be one of {choices}, as this machine has no other; got {name!r}")


def available_devices() -> tuple[str, ...]:
    """Kinds of device that this machine and this build of torch can compute on, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _count(device_type: str) -> int:
    return 1 if device_type == "cpu" else torch.accelerator.device_count()
