"""Time and memory of one job: its forward, and its backward if it has one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from ._resident_memory import begin_peak, peak_bytes

_ROUNDS = 3  # after one that is not timed


@dataclass(frozen=True)
class Measured:
    """How far from the exact result, how long, how much; None for what cannot be measured here, or is not there.

    error: relative. forward_s and backward_s: medians. memory_bytes: what one step held at most beyond what was there
    before it: allocated on an accelerator, resident on the CPU.
    """

    error: float
    forward_s: float
    backward_s: float | None
    memory_bytes: int | None


def measure(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object] | None, device: torch.device
) -> tuple[float, float | None, int | None]:
    """(seconds forward, seconds backward, bytes). Both have run before, so nothing is built or compiled."""
    memory = _memory(lambda: _step(forward, backward), device)
    rounds = [_timed(forward, backward, device) for _ in range(_ROUNDS)]
    backward_s = None if backward is None else median(each[1] for each in rounds)
    return median(each[0] for each in rounds), backward_s, memory


def gradients(out: Tensor, grad: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of the inputs, for this gradient of the output."""
    return torch.autograd.grad(out, inputs, grad.to(out.device, out.dtype))


def _step(forward: Callable[[], Tensor], backward: Callable[[Tensor], object] | None) -> None:
    out = forward()
    if backward is not None:
        backward(out)


def _timed(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object] | None, device: torch.device
) -> tuple[float, float]:
    begin = perf_counter()
    out = forward()
    _synchronize(device)
    middle = perf_counter()
    if backward is not None:
        backward(out)
    _synchronize(device)
    return middle - begin, perf_counter() - middle


def _memory(step: Callable[[], None], device: torch.device) -> int | None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        step()
        _synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before
    try:
        # What was freed goes back to the system, or it would serve the step unseen.
        ctypes.CDLL(None).malloc_trim(0)
        before = begin_peak()
    except (OSError, AttributeError):  # no Linux, or not its usual C library
        return None
    step()
    return peak_bytes() - before


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
