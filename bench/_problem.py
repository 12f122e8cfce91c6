"""The tensors a measurement runs on, and the jobs that are timed on them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ._timing import Job

# H heads, N tokens, D head dim; the batch is 1

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """How large, and how many timed rounds."""

    num_tokens: int
    num_heads: int
    head_dim: int = 64
    repeats: int = 5

    def __str__(self) -> str:
        return tokens_text(self.num_tokens)


@dataclass(frozen=True, eq=False)
class Problem:
    """Tensors to attend over and the gradient of the output, drawn from a seed."""

    q: Float[Tensor, "1 H N D"]
    k: Float[Tensor, "1 H N D"]
    v: Float[Tensor, "1 H N D"]
    grad: Float[Tensor, "1 H N D"]

    @classmethod
    def draw(cls, size: Size, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> "Problem":
        generator = torch.Generator(device).manual_seed(seed)
        shape = (1, size.num_heads, size.num_tokens, size.head_dim)
        kind = {"device": device, "dtype": dtype}
        return cls(*(torch.randn(shape, generator=generator, **kind) for _ in range(4)))

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as fresh leaves over the same storage, with gradients on."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v


def forward_job(name: str, attention: Attention, problem: Problem) -> Job:
    """Inference: nothing is kept for a backward."""

    def run(_: None) -> None:
        with torch.no_grad():
            attention(problem.q, problem.k, problem.v)

    return Job(name, run)


def training_job(name: str, attention: Attention, problem: Problem) -> Job:
    """Forward and backward to dq, dk and dv."""
    return Job(name, lambda _: train(attention, problem))


def backward_job(name: str, attention: Attention, problem: Problem) -> Job:
    """Backward alone, from a forward that is not timed."""

    def prepare() -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = problem.leaves
        return attention(*leaves), leaves

    return Job(name, lambda made: torch.autograd.grad(made[0], made[1], problem.grad), prepare)


def train(attention: Attention, problem: Problem) -> tuple[Tensor, ...]:
    """dq, dk and dv."""
    leaves = problem.leaves
    return torch.autograd.grad(attention(*leaves), leaves, problem.grad)


def tokens_text(num_tokens: int) -> str:
    """16384 as 16K; other numbers in full."""
    return f"{num_tokens // 1024}K" if num_tokens % 1024 == 0 else f"{num_tokens:,}"
