"""The tiles engine inside torch.func: gradients as autograd Functions; vmapped dims are folded into the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from ...masks.patterns import names, run_time_leaves
from ...masks.text import read_text
from .._call_key import CallKey
from .._merge import with_sinks
from .._ops import REMEDY
from ._tiles_op import tiles, tiles_backward

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


def transformed_tiles(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    sinks: Float[Tensor, " H"] | None,
    bindings: Sequence[Tensor],
    call: CallKey,
    scale: float,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """(out, lse) of `tiles` inside torch.func: `grad`, `vjp`, `jacrev`, `vmap` and their compositions.

    Raises ValueError for forward mode and for vmapped run-time tensors.
    """
    out, lse = _Attention.apply(q, k, v, call, scale, *bindings)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


class _Attention(torch.autograd.Function):
    """(out, lse) without sinks."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, call: CallKey, scale: float, *bindings: Tensor) -> Any:
        return tiles(q, k, v, None, list(bindings), *call, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, ctx.call, ctx.scale, *bindings = inputs
        ctx.save_for_backward(q, k, v, *output, *bindings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, bindings = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        found = _Gradients.apply(*grads, *rows, ctx.call, ctx.scale, *bindings)
        return *found, None, None, *[None] * len(bindings)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise ValueError(f"tiles has no forward-mode derivative; {REMEDY}")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _folded(_Attention, 3, info.batch_size, in_dims, arguments)


class _Gradients(torch.autograd.Function):
    """(dq, dk, dv) of `_Attention`."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        *operands, call, scale = arguments[:9]
        return tiles_backward(*operands, list(arguments[9:]), *call, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(f"tiles has no second derivative; {REMEDY}")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise ValueError(f"the gradient of tiles has no forward-mode derivative; {REMEDY}")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _folded(_Gradients, 7, info.batch_size, in_dims, arguments)


def _folded(
    function: type[torch.autograd.Function], number: int, size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Apply `function` with the mapped dim folded into the batch; the first `number` arguments are mapped tensors."""
    call, scale, *bindings = arguments[number:]
    if any(dim is not None for dim in in_dims[number + 2 :]):
        raise ValueError(f"run-time tensors are the same for all that torch.vmap maps; {REMEDY}")
    moved = (
        x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(arguments[:number], in_dims, strict=False)
    )
    pattern = read_text(call.pattern)
    by_entry = {
        name: any(leaf.differs_by_entry(x) for leaf in run_time_leaves(pattern) if leaf.name == name)
        for name, x in zip(names(pattern), bindings, strict=True)
    }
    bindings = [torch.cat([x] * size) if by_entry[name] else x for name, x in zip(by_entry, bindings, strict=True)]
    results = function.apply(*(x.flatten(0, 1) for x in moved), call, scale, *bindings)
    return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)
