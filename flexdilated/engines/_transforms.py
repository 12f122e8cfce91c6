"""Forward mode and the transforms of torch.func: what an op has no rule for is refused, and never dropped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

_REMEDY = "engine='reference' has (in attend: dense, small inputs, eagerly, one rank)"


def is_transformed() -> bool:
    """Whether a level of forward mode or of torch.func is open: where none is, no tensor can be in one."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms(what: str, inputs: Iterable[Any]) -> None:
    """Raise ValueError where a derivative that `what` does not have would come through one of its inputs."""
    if not is_transformed():
        return
    in_func = peek_interpreter_stack() is not None
    for x in _tensors(inputs):
        if is_batchedtensor(x):
            refuse_vmap()
        if torch._VF._unpack_dual(x, level=0).tangent is not None:
            raise ValueError(f"{what} has no forward-mode derivative; {_REMEDY}")
        if in_func and x.requires_grad:
            raise ValueError(
                f"{what} has no gradient in the transforms of torch.func, only in autograd's backward; {_REMEDY}"
            )


def refuse_vmap(*_: Any) -> NoReturn:
    """The batching rule of an op that has none."""
    raise ValueError(
        f"no rule maps it over a dim, as torch.vmap asks: q, k and v have dims for batch and heads; {_REMEDY}"
    )


def _tensors(inputs: Iterable[Any]) -> Iterable[Tensor]:
    for x in inputs:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)
