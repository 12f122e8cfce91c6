"""The gradient of an attention op, which is another op: of its inputs, its outcome, and what came in for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..masks.text import kept_functions
from ._sinks import sinks_gradient

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def set_gradient(op: CustomOpDef, backward_op: CustomOpDef, *, refusal: str, over_ranks: bool = False) -> None:
    """Makes `backward_op` the gradient of `op`, and a RuntimeError with these words the gradient of that.

    op: (q, k, v, sinks, bindings, *options) to (out, lse), and after them the keys and values that it used, where they
    are others; the first option is the pattern in JSON. backward_op: (grad_out, grad_lse, q, k, v, out, lse, bindings,
    *options), with the keys and values that were used, to (dq, dk, dv). over_ranks: other ranks wait for what this one
    sends, so that it runs its backward although nothing came in.
    """

    def remember(ctx, inputs, output) -> None:
        q, k, v, sinks, bindings, *options = inputs
        out, lse, *used = output
        ctx.save_for_backward(q, *(used or (k, v)), sinks, out, lse, *copies(bindings))
        ctx.options = options
        ctx.kept = kept_functions(options[0])
        ctx.set_materialize_grads(False)

    def backward(ctx, grad_out, grad_lse, *_):
        q, k, v, sinks, out, lse, *bindings = ctx.saved_tensors
        without = no_gradients(bindings, ctx.options)
        if grad_out is None and grad_lse is None and not over_ranks:
            return None, None, None, None, *without
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = backward_op(grad_out, grad_lse, q, k, v, out, lse, bindings, *ctx.options)
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            grad_sinks = sinks_gradient(sinks, out, lse, grad_out, grad_lse)
        return *grads, grad_sinks, *without

    op.register_autograd(backward, setup_context=remember)
    backward_op.register_autograd(refuse(refusal))


def copies(bindings: Sequence[Tensor]) -> list[Tensor]:
    """Run-time tensors as a forward read them, for its backward: what writes to them may count no version."""
    return [x.detach().clone() for x in bindings]


def no_gradients(bindings: Sequence[Tensor], options: Sequence[Any]) -> tuple[Any, ...]:
    """What stands for the gradients of an op's run-time tensors and plain values."""
    # An empty list, such as a block size that was left open, counts as a list of tensors there.
    return [None] * len(bindings), *([] if option == [] else None for option in options)


def refuse(words: str) -> Callable[..., NoReturn]:
    """The gradient of an op that has none."""

    def backward(ctx, *grads) -> NoReturn:
        raise RuntimeError(words)

    return backward
