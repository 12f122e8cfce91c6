"""What passes of models are held to: gradients of a training step, dropout."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.cases._training import Step


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
