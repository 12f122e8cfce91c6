"""Suspension of PyTorch modes that are active around a call, such as fake tensors or tracing, while plans are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ..._torch_private import (
    DisableTorchFunction,
    disable_current_modes,
    len_torch_dispatch_stack,
    len_torch_dispatch_stack_pre_dispatch,
    len_torch_function_stack,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def suspended_torch_modes() -> Iterator[None]:
    """Context manager that suspends the PyTorch modes that are active around it.

    These are fake tensors, tracing and other dispatch or function modes, default devices, transforms of torch.func and
    inference mode. New tensors inside have values, are on the CPU by default, and are no inference tensors.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(DisableTorchFunction())
        if _has_dispatch_modes():
            stack.enter_context(disable_current_modes())  # only if needed: it imports the compiler's tracing
        if peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        yield


def outside_torch_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it runs without the caller's PyTorch modes, such as fake tensors.

    The function must only plan a computation, for example by making block lists: operations on the caller's tensors
    have to be seen by the modes.
    """

    @wraps(function)
    def planned(*args: P.args, **kwargs: P.kwargs) -> T:
        if are_modes_on():
            with suspended_torch_modes():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return planned


def are_modes_on() -> bool:
    """Return True if there is a mode that `suspended_torch_modes` would suspend."""
    return len_torch_function_stack() > 0 or _has_dispatch_modes() or _has_inference_or_transforms()


def _has_dispatch_modes() -> bool:
    return len_torch_dispatch_stack() > 0 or len_torch_dispatch_stack_pre_dispatch() > 0


def _has_inference_or_transforms() -> bool:
    return torch.is_inference_mode_enabled() or peek_interpreter_stack() is not None
