"""Agreement of an attention with the dense oracle: output, lse, and the gradients through both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.testing import assert_close

from flexdilated.testing._closeness import cotangents
from flexdilated.testing._inputs import MEMORY_LAYOUTS, laid_out
from tests.support import oracle

Attention = Callable[..., tuple[Tensor, Tensor]]

# float64 kernels against a float64 oracle: only the order of sums differs.
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def gradients(attend: Attention, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of a fixed functional of output and lse."""
    return gradients_of(*attend(*tensors), tensors)


def gradients_of(
    out: Tensor, lse: Tensor, tensors: tuple[Tensor, ...], *, through_lse: bool = True, again: bool = False
) -> tuple[Tensor, ...]:
    """Those of what came of one call, which may be asked again; without the lse nothing flows into it at all."""
    if not out.requires_grad:
        return tuple(torch.zeros_like(x) for x in tensors)
    grad_out, grad_lse = cotangents(out, lse, through_lse=through_lse)
    # A layout that the drawn numbers choose, as nothing else is drawn here.
    layout = int(tensors[0].detach().double().abs().sum() * 1e3) % len(MEMORY_LAYOUTS)
    grad_out = laid_out(grad_out, MEMORY_LAYOUTS[layout])
    outputs, sent = [out], [grad_out.to(out.dtype)]
    if through_lse:
        outputs, sent = [out, lse], [*sent, grad_lse.to(lse.dtype)]
    return torch.autograd.grad(outputs, tensors, sent, retain_graph=again)


def assert_agrees(
    attend: Attention, tensors: tuple[Tensor, ...], counts: Tensor, *, scale: float | None = None, **features
) -> None:
    """The attention is the oracle's, on float64 q, k, v and maybe sinks, with and without a gradient through lse."""
    q, k, v, *sinks = tensors
    found, truth = attend(*tensors), oracle.attention(q, k, v, counts, scale, *sinks, **features)
    for one, true in zip(found, truth, strict=True):
        assert_close(one, true, **TIGHT)
    for through_lse in (True, False):
        how = {"through_lse": through_lse, "again": through_lse}
        grads, true_grads = (gradients_of(*each, tensors, **how) for each in (found, truth))
        names = ("q", "k", "v", "sinks")[: len(tensors)]
        for name, grad, true_grad in zip(names, grads, true_grads, strict=True):
            assert_close(grad, true_grad, **TIGHT, msg=lambda text, name=name: f"d{name}: {text}")
