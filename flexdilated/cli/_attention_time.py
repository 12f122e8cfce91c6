"""Forward and backward time of the demo's attention beside dense attention, at the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from .._attend import attend
from ..masks import Mixture, Pattern
from ._interrupt import Interrupt

_REPETITIONS = 3
# Dense attention's time grows with the square of this: beyond, it alone would take minutes.
LONGEST_DENSE = 65536


@dataclass(frozen=True)
class AttentionTime:
    """Milliseconds of one layer's attention, forward and backward: medians of interleaved repetitions."""

    longnet_ms: float
    dense_ms: float
    repetitions: int

    @property
    def speed_up(self) -> float:
        return self.dense_ms / self.longnet_ms


def measure(
    pattern: Pattern | Mixture,
    *,
    num_heads: int,
    num_tokens: int,
    head_dim: int,
    device: torch.device,
    interrupt: Interrupt,
) -> AttentionTime | None:
    """Time `attend` against causal dense SDPA, after one warm-up each.

    None above LONGEST_DENSE tokens and where the user interrupts.
    """
    if num_tokens > LONGEST_DENSE:
        return None
    generator = torch.Generator().manual_seed(0)
    shape = (4, 1, num_heads, num_tokens, head_dim)
    q, k, v, grad = torch.randn(shape, generator=generator).to(device)
    contestants = (
        lambda a, b, c: attend(a, b, c, pattern),
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True),
    )
    times: list[list[float]] = []
    for _ in range(1 + _REPETITIONS):
        if interrupt.requested:
            return None
        times.append([_forward_backward_ms(contestant, (q, k, v), grad) for contestant in contestants])
    longnet_ms, dense_ms = (median(column) for column in zip(*times[1:], strict=True))
    return AttentionTime(longnet_ms, dense_ms, _REPETITIONS)


def _forward_backward_ms(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...], grad: Tensor
) -> float:
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    _synchronize(grad.device)
    start = perf_counter()
    attention(q, k, v).backward(grad)
    _synchronize(grad.device)
    return 1e3 * (perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
