"""The FLASH backend of FlexAttention, FlashAttention 4's CuTe kernels: the blocks they take, what they cannot do."""

from __future__ import annotations

from functools import cache
from importlib import metadata

import torch
from torch.torch_version import TorchVersion

from ..._torch_private import graph_constant
from ._capability import NOT_NVIDIA, capability

PACKAGE, OLDEST_PACKAGE = "flash-attn-4", "4.0.0b17"  # from which on functions may capture numbers
_OLDEST_TORCH = "2.14"  # before, block lists were ignored under a mask that is true everywhere
_ALIGNED = 8  # half-precision numbers in 16 bytes
_LEAST = 16  # head dim of FlexAttention on accelerators

# By major compute capability, for head dims up to the first number the sides of blocks, of queries and of keys: those
# of the kernels' tiles, forward and backward. From Blackwell on a block of keys may have several tiles.
_SIDES = {
    9: ((128, (128, 128)), (192, (128, 96)), (256, (128, 64))),
    10: ((128, (256, 128)),),
    11: ((128, (256, 128)),),
}


def flash_sides(device: torch.device, head_dim: int) -> tuple[int, int]:
    """The sides of the smallest blocks that the kernels take on this device."""
    return next(sides for most, sides in _SIDES[capability(device)[0]] if head_dim <= most)


def flash_cannot(device: torch.device, dtype: torch.dtype, head_dim: int, sides: tuple[int, ...] = ()) -> str | None:
    """Why engine "flash" cannot serve such tensors in blocks of these sides, and what can; or None.

    sides: none where they are left to the engine.
    """
    reason = _lacking(device, dtype)
    if reason is not None:
        return reason
    major, _ = capability(device)
    most, _ = _SIDES[major][-1]
    if head_dim % _ALIGNED or not _LEAST <= head_dim <= most:
        rule = f"flash takes head dims that are multiples of {_ALIGNED}, {_LEAST} to {most} on capability {major}.x"
        return f"{rule}; got {head_dim}: pad q, k and v with zeros and keep the scale, or engine='flex'"
    own = flash_sides(device, head_dim)
    if sides and not _fit(sides, own, major):
        keys = f"{own[1]}" if major == 9 else f"a multiple of {own[1]}"
        rule = f"flash takes blocks of a multiple of {own[0]} queries by {keys} keys on capability {major}.x"
        came = f"got {sides[0]} by {sides[1]}"
        return f"{rule} at head dim {head_dim}; {came}: take such blocks, or engine='flex'"
    return None


@graph_constant
def _lacking(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no such tensors are served on this device, a constant of graphs."""
    if capability(device) == NOT_NVIDIA:
        return f"flash runs on NVIDIA devices; got tensors on {device}. engine=None takes an engine that runs there"
    serves = f"engine={'reference' if dtype == torch.float64 else 'flex'!r} serves it"
    if torch.__version__ < _OLDEST_TORCH:
        return f"flash needs torch {_OLDEST_TORCH} or later; got {torch.__version__}. {serves}"
    found = _package()
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


def _fit(sides: tuple[int, ...], own: tuple[int, int], major: int) -> bool:
    keys_fit = sides[1] == own[1] if major == 9 else sides[1] % own[1] == 0
    return sides[0] % own[0] == 0 and keys_fit


@cache
def _package() -> str | None:
    """The package's version, if it is installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
