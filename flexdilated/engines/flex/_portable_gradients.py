"""Autograd functions of engine "portable": a call with a score_mod, its backward, and second derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ... import _torch_private
from .._merge import WholeRows, sinks_gradient
from .._ops import refusing_backward
from ._portable_run import Portable

# B batch, H query heads, N queries, E head dim of values

_NO_THIRD = "the portable engine has no third derivative; engine='reference' has (dense, small inputs)"


def run_with_score_mod(
    run: Portable, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Return (out in q's dtype, natural lse in float32 or wider) of a `Portable` with a score_mod, run eagerly.

    Raises ValueError for a q of a FakeTensorMode.
    """
    if isinstance(q, _torch_private.FakeTensor):
        raise ValueError(
            "an eager call with a score_mod computes values, which q of a FakeTensorMode lacks: give tensors on the "
            "meta device, or call in a function that torch.compile compiles"
        )
    out, lse = _ScoreModAttention.apply(run.reading(()).with_sinks(None), q, k, v, run.features.sinks, *run.tensors)
    return out, lse


class _ScoreModAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Portable, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *read: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = run.reading(read).with_sinks(sinks).forward(q, k, v)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *read)
        ctx.run = run
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks, out, lse, *read = ctx.saved_tensors
        learned = ctx.needs_input_grad[5:]
        found = _Gradients.apply(ctx.run, learned, *grads, q, k, v, out, lse, *read)
        of_sinks = None if sinks is None else sinks_gradient(sinks, WholeRows(out, lse, *grads))
        of_read = iter(found[3:])
        return None, *found[:3], of_sinks, *(next(of_read) if each else None for each in learned)


class _Gradients(torch.autograd.Function):
    """Backward of `_ScoreModAttention`, an autograd function itself so that second derivatives exist.

    It returns (dq, dk, dv, gradient of each tensor that is learned).

    learned: for each tensor that score_mod reads (`read`), True if it gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Portable,
        learned: Sequence[bool],
        grad_out: Tensor,
        grad_lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *read: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(grad_out, grad_lse, q, k, v, out, lse, *read)
        ctx.run, ctx.learned = run, learned
        with torch.autocast(q.device.type, enabled=False):
            run = run.reading(_leaves(read, learned))
            return run.backward(q, k, v, WholeRows(out, lse, grad_out, grad_lse))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        return None, None, *second_gradients(ctx.run, ctx.saved_tensors, incoming, ctx.learned)


def _leaves(tensors: Sequence[Tensor], learned: Sequence[bool]) -> list[Tensor]:
    return [x.detach().requires_grad_(each) for x, each in zip(tensors, learned, strict=True)]


def second_gradients(
    run: Portable, given: Sequence[Tensor], incoming: Sequence[Tensor], learned: Sequence[bool] = ()
) -> list[Tensor | None]:
    """Return the gradient of each tensor in `given`, the inputs of `Portable.backward`.

    None stands for a gradient of 0, and for a tensor that score_mod reads but that gets no gradient.

    given: (grad_out, grad_lse, q, k, v, out, lse, *tensors that score_mod reads).
    incoming: gradient of each result of `Portable.backward`.
    learned: for each tensor that score_mod reads, True if it gets a gradient.
    """
    with torch.enable_grad(), torch.autocast(incoming[0].device.type, enabled=False):
        leaves = _leaves(given, (*[True] * (len(given) - len(learned)), *learned))
        grad_out, grad_lse, q, k, v, out, lse, *read = leaves
        run = run.reading(read)
        parts = run.forward(q, k, v, recorded=True)
        if not parts[0].requires_grad:  # no pair is allowed
            return [None] * len(given)
        grads = WholeRows(out, lse, grad_out, grad_lse).gradients_of(*parts)
        inputs = (q, k, v, *run.learned)
        first = torch.autograd.grad(parts, inputs, grads, create_graph=True, materialize_grads=True)
    kept = [index for index, x in enumerate(first) if x.requires_grad]
    outputs, of_outputs = ([each[index] for index in kept] for each in (first, incoming))
    wanted = [index for index, x in enumerate(leaves) if x.requires_grad]
    some = torch.autograd.grad(outputs, [leaves[index] for index in wanted], of_outputs, allow_unused=True)
    found: list[Tensor | None] = [None] * len(given)
    for index, x in zip(wanted, some, strict=True):
        # With create_graph=True, a derivative of this one is refused.
        found[index] = _RefuseDerivative.apply(x, *given, *incoming) if x is not None and torch.is_grad_enabled() else x
    return found


class _RefuseDerivative(torch.autograd.Function):
    """Autograd function (x, *inputs) -> copy of x, where x is a derivative computed from `inputs`.

    Autograd thereby records that x depends on `inputs`: the backward of a further derivative reaches this function,
    which raises RuntimeError.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        return x.clone()

    backward = staticmethod(refusing_backward(_NO_THIRD))
