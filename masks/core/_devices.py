"""Properties of kinds of devices, in a table by name, such as "cpu"."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

TILE = 128  # side of the largest tile of any kernel; must divide the sides of blocks on accelerators


@dataclass(frozen=True)
class DeviceKind:
    """Properties of a kind of device, such as "cuda", that decide how attention is computed on it.

    engine: name of the default engine: "aten" for CPU, "flex" (FlexAttention) for "cuda", "xpu" and "meta",
        "portable" for others.
    dtype: dtype of q, k and v that is assumed if no tensor is known.
    on_host: tensors are in host memory, so reading a value waits for no kernel.
    kernels: the family of `engines/kernels` that engine "aten" calls, "cpu" (also for device "meta") or "cuda"; "" for
        none.
    is_cuda: torch.cuda reports its memory and name.
    flex_trains: FlexAttention's kernels return a log-sum-exp, have a backward pass, read block lists of any width,
        index in 32 bits and accept all lengths. False only for CPU.
    has_streams: kernels are queued in streams.
    """

    engine: str
    dtype: torch.dtype
    on_host: bool = False
    kernels: str = ""
    is_cuda: bool = False
    flex_trains: bool = True
    has_streams: bool = True


_CPU = DeviceKind("aten", torch.float32, on_host=True, kernels="cpu", flex_trains=False, has_streams=False)
_WITH_TRITON = DeviceKind("flex", torch.bfloat16)
_OTHER = replace(_WITH_TRITON, engine="portable")
_KINDS = {
    "cpu": _CPU,
    "cuda": replace(_WITH_TRITON, kernels="cuda", is_cuda=True),
    "xpu": _WITH_TRITON,
    "meta": replace(_WITH_TRITON, kernels="cpu", has_streams=False),
}


def device_kind(device: torch.device | str) -> DeviceKind:
    """Return the properties of a device, or of a device type such as "cuda".

    An unknown type counts as an accelerator without Triton, and so does a string with an index, such as "cuda:0".
    """
    return _KINDS.get(device if isinstance(device, str) else device.type, _OTHER)
