"""What run-time tensors must be, whatever rule they make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def missing(name: str) -> str:
    return (
        f"the pattern needs the run-time tensor {name!r}: build it with the tensor itself, "
        f"or pass bindings={{{name!r}: tensor}} to attend"
    )


def require_values(name: str, tensor: Any) -> Tensor:
    """The tensor itself, if it is a dense one that has values."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"bindings must hold tensors; got {type(tensor).__name__} for {name!r}")
    kind = _kind_without_values(tensor)
    if kind is not None:
        raise ValueError(f"the run-time tensor {name!r} must be a dense one with values; got a tensor that is {kind}")
    return tensor


def _kind_without_values(tensor: Tensor) -> str | None:
    """What the tensor is in place of a dense one with values; None for a dense one."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return f"{tensor.layout} on {tensor.device}"
    return None


def integers(name: str, tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The tensor on the CPU in int64, if it holds integers in one of these numbers of dims."""
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must hold integers; got a tensor of {tensor.dtype}")
    if tensor.dim() not in dims:
        shapes = " or ".join({0: "()", 1: "(tokens,)", 2: "(batch, tokens)"}[dim] for dim in dims)
        raise ValueError(f"{name} must have shape {shapes}; got {tuple(tensor.shape)}")
    return tensor.detach().to("cpu", torch.int64)
