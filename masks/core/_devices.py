"""What differs between kinds of devices: the only place where their names are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

TILE = 128  # queries, and keys, of the largest tile of any kernel: it has to divide the blocks of accelerators


@dataclass(frozen=True)
class DeviceKind:
    """How a kind of device computes attention.

    engine: of calls that name none. dtype: of calls of which nothing is known. on_host: tensors are in the host's
    memory, so that reading a value waits for no kernel. runs_cpu_kernels: also without values, on "meta". is_cuda:
    torch.cuda tells its memory and its name. flex_trains: FlexAttention's kernels have an lse and a backward, read
    block lists of any width, count in 32 bits and serve all lengths; those on CPU do none of it.
    """

    engine: str
    dtype: torch.dtype
    on_host: bool = False
    runs_cpu_kernels: bool = False
    is_cuda: bool = False
    flex_trains: bool = True


_CPU = DeviceKind("tiles", torch.float32, on_host=True, runs_cpu_kernels=True, flex_trains=False)
_ACCELERATOR = DeviceKind("flex", torch.bfloat16)
_KINDS = {
    "cpu": _CPU,
    "cuda": replace(_ACCELERATOR, is_cuda=True),
    "meta": replace(_ACCELERATOR, runs_cpu_kernels=True),
}


def device_kind(device: torch.device | str) -> DeviceKind:
    """The kind of a device, or of the devices with this name."""
    return _KINDS.get(device if isinstance(device, str) else device.type, _ACCELERATOR)
