"""Windows of context + 1 bytes: the training order, and the fixed ones for validation."""

from __future__ import annotations

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor


def training_window(
    text: UInt8[Tensor, " n"], step: int, *, context: int, seed: int
) -> UInt8[Tensor, " context_plus_1"]:
    """The window of one step: every window of the text once in a drawn order, then again in another.

    A function of its arguments alone, so a run that goes on from a checkpoint sees what it would have seen.
    Windows start `context` apart; each pass shifts all of them by an amount drawn below the text's remainder.
    """
    spare = len(text) - context - 1
    count = spare // context + 1
    generator = torch.Generator().manual_seed(_mix(seed, step // count))
    order = torch.randperm(count, generator=generator)
    shift = int(torch.randint(spare % context + 1, (), generator=generator))
    start = int(order[step % count]) * context + shift
    return text[start : start + context + 1]


def validation_windows(text: UInt8[Tensor, " n"], *, context: int, limit: int) -> UInt8[Tensor, "w m"]:
    """At most `limit` windows, spread evenly over the text, none overlapping another."""
    size = context + 1
    available = len(text) // size
    chosen: Int64[Tensor, " w"] = torch.linspace(0, available - 1, min(limit, available)).round().long()
    return torch.stack([text[int(i) * size : (int(i) + 1) * size] for i in chosen])


def _mix(seed: int, epoch: int) -> int:
    """A seed for each pass: neighbouring seeds must not share passes."""
    return (seed * 1_000_003 + epoch) % 2**63
