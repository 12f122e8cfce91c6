"""CUDA compute capability, by which kernels are chosen."""

import torch

from ..._torch_private import graph_constant
from ...masks.core import device_kind

NOT_NVIDIA, HOPPER, BLACKWELL = (0, 0), (9, 0), (10, 0)


@graph_constant
def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) compute capability; NOT_NVIDIA, less than any other, for devices of other vendors and CPUs."""
    if not device_kind(device).is_cuda or torch.version.hip:
        return NOT_NVIDIA
    return torch.cuda.get_device_capability(device)
