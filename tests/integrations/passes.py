"""What passes of models are held to: dense counts of pairs, gradients of a training step, dropout."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from flexdilated.masks import Mixture, Pattern

# H heads, N queries, M keys

Step = tuple[Tensor, dict[str, Tensor]]  # outputs, and gradients by the names of parameters


def counts(
    pattern: Pattern | Mixture, num_queries: int, num_keys: int | None = None, *, num_heads: int = 1, **offsets: int
) -> Tensor:
    """(H, N, M): how often each pair is allowed, by the pattern's own function."""
    num_keys = num_keys or num_queries
    bound = pattern.bind(num_heads=num_heads, num_queries=num_queries, num_keys=num_keys, **offsets)
    h, q, k = torch.meshgrid(*map(torch.arange, (num_heads, num_queries, num_keys)), indexing="ij")
    mods = [replace(bound, pattern=branch).mask_mod() for branch in bound.pattern.branches()]
    return torch.stack([mod(torch.tensor(0), h, q, k).expand(h.shape).long() for mod in mods]).sum(0)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_same_step(got: Step, want: Step) -> None:
    """Gradients may differ by parts of their largest number, and of that of all of them."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert got[1].keys() == want[1].keys()
    largest = max(float(x.abs().max()) for x in want[1].values())
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=0, atol=1e-4 * max(float(grad.abs().max()), 1e-3 * largest))


def assert_dropout_trains(model: nn.Module, call: Callable[[], Tensor]) -> None:
    """In training alone, every call drops other weights; equal seeds drop equal ones, and gradients come."""

    def out(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return call()

    model.eval()
    assert torch.equal(out(0), out(1))
    model.train()
    first, second, again = out(0), out(1), out(0)
    assert torch.equal(first, again)
    assert (first - second).abs().max() > 1e-6
    second.pow(2).sum().backward()
    assert any(bool(x.grad.any()) for x in model.parameters() if x.grad is not None)
