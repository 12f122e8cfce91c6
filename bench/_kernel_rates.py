"""The attention kernel by itself: problems of one shape, enough of them for a steady rate."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flexdilated.engines.kernels._kernel import flash_backward, flash_forward

from ._result import Timing
from ._timing import Job


@dataclass(frozen=True)
class Shape:
    """Problems of so many queries by so many keys, `pairs` in all."""

    queries: int
    keys: int
    pairs: int
    head_dim: int = 64

    def __str__(self) -> str:
        return f"{self.queries:,} × {self.keys:,}"

    @property
    def count(self) -> int:
        """Problems in a call."""
        return max(1, self.pairs // (self.queries * self.keys))

    def flops(self, a_pair: int) -> int:
        """FLOPs of a call that does `a_pair` times the head dim for each pair."""
        return a_pair * self.head_dim * self.count * self.queries * self.keys


def kernel_jobs(shape: Shape) -> tuple[Job, Job]:
    """Forward and backward, named after the shape."""
    generator = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, shape.count, 1, shape.queries, shape.head_dim, generator=generator)
    k, v = torch.randn(2, shape.count, 1, shape.keys, shape.head_dim, generator=generator)
    scale = shape.head_dim**-0.5
    out, lse = flash_forward(q, k, v, scale=scale)
    return (
        Job(f"kernel {shape}, forward", lambda _: flash_forward(q, k, v, scale=scale)),
        Job(f"kernel {shape}, backward", lambda _: flash_backward(grad, q, k, v, out, lse, scale=scale)),
    )


def kernel_rate(shape: Shape, direction: str, a_pair: int, timings: Mapping[str, Timing]) -> float:
    """FLOPs a second."""
    return shape.flops(a_pair) / timings[f"kernel {shape}, {direction}"].median_s
