"""Agreement of an attention with the dense oracle: output, lse, and the gradients through both."""

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
    return torch.autograd.grad(outputs, tensors, sent, retain_graph=again, materialize_grads=True, allow_unused=True)


def assert_agrees(
    attend: Attention,
    tensors: tuple[Tensor, ...],
    counts: Tensor,
    *,
    scale: float | Tensor | None = None,
    learned: tuple[Tensor, ...] = (),
    **features,
) -> None:
    """The attention is the oracle's, on float64 q, k, v and maybe sinks, with and without a gradient through lse.

    learned: leaves beside them, such as those that a score_mod reads, whose gradients are compared too.
    """
    q, k, v, *sinks = tensors
    found, truth = attend(*tensors), oracle.attention(q, k, v, counts, scale, *sinks, **features)
    assert_close(found, truth, **TIGHT)
    for through_lse in (True, False):
        how = {"through_lse": through_lse, "again": through_lse}
        grads, true_grads = (gradients_of(*each, (*tensors, *learned), **how) for each in (found, truth))
        names = (*("q", "k", "v", "sinks")[: len(tensors)], *("learned",) * len(learned))
        for name, grad, true_grad in zip(names, grads, true_grads, strict=True):
            assert_close(grad, true_grad, **TIGHT, msg=lambda text, name=name: f"d{name}: {text}")


def spoilt(x: Tensor, rows: Tensor, value: float) -> Tensor:
    """x with a value in all of some rows, as a leaf."""
    return x.detach().masked_fill(rows[..., None], value).requires_grad_(x.requires_grad)


def outcome(attend: Attention, leaves: list[Tensor], grad_out: Tensor, grad_lse: Tensor) -> list[Tensor]:
    """[out, lse, gradients of the leaves]."""
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))]


def assert_nothing_spreads(attend: Attention, given: tuple[Tensor, ...], counts: Tensor, value: float) -> None:
    """Results and gradients are to the last bit those of zeros in hidden slots, whose own gradients are 0."""
    q, k, v, *sinks = given
    seen = (counts > 0).expand(*q.shape[:3], -1)
    queries = ~seen.any(3)
    keys = ~seen.any(2).unflatten(1, (k.shape[1], -1)).any(2)
    generator = torch.Generator().manual_seed(0)
    grad_out = torch.randn(*q.shape[:3], v.shape[3], generator=generator, dtype=q.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_lse = torch.randn(q.shape[:3], generator=generator, dtype=wide).masked_fill(queries, 0.0)

    def run(bad: float) -> list[Tensor]:
        leaves = [spoilt(q, queries, bad), spoilt(k, keys, bad), spoilt(v, keys, bad), *sinks]
        return outcome(attend, leaves, spoilt(grad_out, queries, bad), grad_lse)

    clean, found = run(0.0), run(value)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, clean, strict=False):
        assert torch.equal(one, other), name
        assert not one.isnan().any(), name
    assert found[0][queries].eq(0).all()
    for grad, rows in zip(found[2:5], (queries, keys, keys), strict=True):
        assert grad[rows].eq(0).all()
