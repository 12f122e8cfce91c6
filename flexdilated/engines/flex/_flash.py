"""Limits of the FLASH backend of FlexAttention, the CuTe kernels of FlashAttention 4: block sizes and inputs."""

from __future__ import annotations

from functools import cache
from importlib import metadata

import torch
from torch.torch_version import TorchVersion

from ..._torch_private import graph_constant
from ...masks.core import device_kind

NOT_NVIDIA, HOPPER, BLACKWELL = (0, 0), (9, 0), (10, 0)


@graph_constant
def capability(device: torch.device) -> tuple[int, int]:
    """Return the (major, minor) compute capability of an NVIDIA device; NOT_NVIDIA for any other device.

    NOT_NVIDIA is less than every compute capability.
    """
    if not device_kind(device).is_cuda or torch.version.hip:
        return NOT_NVIDIA
    return torch.cuda.get_device_capability(device)


PACKAGE, OLDEST_PACKAGE = "flash-attn-4", "4.0.0b17"  # the first version whose functions may capture numbers
_OLDEST_TORCH = "2.14"  # before, block lists were ignored under a mask that is true everywhere
_HEAD_DIM_MULTIPLE = 8  # half-precision numbers in 16 bytes
_LEAST_HEAD_DIM = 16  # smallest head dim of FlexAttention on accelerators

# Major compute capability -> (largest head dim, (query side, key side)): the smallest blocks that are whole tiles of
# the forward and the backward kernel. On Blackwell and later a block may have several tiles of keys.
_SIDES = {
    9: ((128, (128, 128)), (192, (128, 96)), (256, (128, 64))),
    10: ((128, (256, 128)),),
    11: ((128, (256, 128)),),
}


def flash_sides(device: torch.device, head_dim: int) -> tuple[int, int]:
    """Return (queries, keys) of the smallest blocks that the FLASH kernels support on this device for this head dim.

    The device and head dim must be supported: see `flash_cannot`.
    """
    return next(sides for most, sides in _SIDES[capability(device)[0]] if head_dim <= most)


def flash_cannot(device: torch.device, dtype: torch.dtype, head_dim: int, sides: tuple[int, ...] = ()) -> str | None:
    """Return the reason that engine "flash" cannot serve this device, dtype, head dim and block size; None if it can.

    The text names an alternative.

    sides: (queries, keys) of a block; empty for the engine's default.
    """
    reason = _why_unavailable(device, dtype)
    if reason is not None:
        return reason
    major, _ = capability(device)
    most, _ = _SIDES[major][-1]
    if head_dim % _HEAD_DIM_MULTIPLE or not _LEAST_HEAD_DIM <= head_dim <= most:
        dims = f"multiples of {_HEAD_DIM_MULTIPLE}, {_LEAST_HEAD_DIM} to {most}"
        rule = f"flash takes head dims that are {dims} on capability {major}.x"
        return f"{rule}; got {head_dim}: pad q, k and v with zeros and keep the scale, or engine='flex'"
    own = flash_sides(device, head_dim)
    if sides and not _sides_fit(sides, own, major):
        keys = f"{own[1]}" if major == 9 else f"a multiple of {own[1]}"
        rule = f"flash takes blocks of a multiple of {own[0]} queries by {keys} keys on capability {major}.x"
        came = f"got {sides[0]} by {sides[1]}"
        return f"{rule} at head dim {head_dim}; {came}: take such blocks, or engine='flex'"
    return None


@graph_constant
def _why_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why engine "flash" cannot serve this device or dtype with the installed packages; None if it can."""
    if capability(device) == NOT_NVIDIA:
        return f"flash runs on NVIDIA devices; got tensors on {device}. engine=None chooses an engine for that device"
    serves = f"engine={'portable' if dtype == torch.float64 else 'flex'!r} serves it"
    if torch.__version__ < _OLDEST_TORCH:
        return f"flash needs torch {_OLDEST_TORCH} or later; got {torch.__version__}. {serves}"
    found = _installed_version()
    if found is None or TorchVersion(found) < OLDEST_PACKAGE:
        came = "it is not installed" if found is None else f"got {found}"
        how = f'pip install --pre "{PACKAGE}>={OLDEST_PACKAGE}"'
        return f"flash needs the package {PACKAGE}, {OLDEST_PACKAGE} or later; {came}: {how}. {serves}"
    if capability(device)[0] not in _SIDES:
        able, got = ", ".join(f"{each}.x" for each in _SIDES), ".".join(map(str, capability(device)))
        return f"flash has kernels with block lists for compute capability {able}; got {got}. {serves}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash has kernels for float16 and bfloat16; got {dtype}. {serves}"
    return None


def _sides_fit(sides: tuple[int, ...], own: tuple[int, int], major: int) -> bool:
    keys_fit = sides[1] == own[1] if major == 9 else sides[1] % own[1] == 0
    return sides[0] % own[0] == 0 and keys_fit


@cache
def _installed_version() -> str | None:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
