"""Machine: device constants of the cost model, built in or measured; and the constants in use."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..core import TILE, advises, device_kind, shown
from ..text import read_json

BUILTIN = "builtin"
FORMAT, VERSION = "flexdilated machine constants", 2


@dataclass(frozen=True)
class BlockRates:
    """Rates, in FLOP/s, of attention over block lists with square blocks of `side` queries and `side` keys.

    runs_flops_per_s: in query blocks whose listed blocks are adjacent.
    plain_flops_per_s: in other query blocks, if all their blocks are full.
    masked_flops_per_s: in other query blocks with a partial block.

    Raises ValueError unless the side is a positive integer and the rates are positive and finite.

    >>> [rates.side for rates in masks.machine().blocks]
    [64, 128, 256]
    """

    side: int
    runs_flops_per_s: float
    plain_flops_per_s: float
    masked_flops_per_s: float

    def __post_init__(self) -> None:
        if isinstance(self.side, bool) or not isinstance(self.side, int) or self.side < 1:
            raise ValueError(f"side must be a whole number, 1 or more; got side={self.side!r}")
        _require_positive(self, "runs_flops_per_s", "plain_flops_per_s", "masked_flops_per_s")


@dataclass(frozen=True)
class Machine:
    """Constants of a device for the planner's cost model: rates of attention forward passes, copy rate, call overhead.

    Rates are those at head dim 64, in float32 on CPU and bfloat16 on accelerators, and are used for all calls. Built-in
    rates are right only in their order of magnitude.

    dense_flops_per_s: attention over all pairs.
    causal_flops_per_s: causal attention, counting the pairs in blocks of 128 on and below the diagonal.
    blocks: rates of block lists by block size, ascending; the planner compares these sizes.
    bytes_per_s: rate of gather and merge.
    launch_s: seconds of overhead of a kernel call.
    backward_ratio: time of a backward pass divided by that of its forward pass.
    calls_a_list: number of kernel calls for a block list, as some kernels need separate calls for different kinds of
        query blocks.
    source: origin of the constants, "builtin" or the path of a file; ignored in comparisons.

    Raises ValueError unless all numbers are positive and finite, and `blocks` has one or more sizes in ascending order.

    >>> machine = masks.machine()
    """

    dense_flops_per_s: float
    causal_flops_per_s: float
    blocks: tuple[BlockRates, ...]
    bytes_per_s: float
    launch_s: float
    backward_ratio: float
    calls_a_list: int = 1
    source: str = field(default=BUILTIN, compare=False)

    def __post_init__(self) -> None:
        _require_positive(self, *(each.name for each in fields(self) if each.name not in ("blocks", "source")))
        sides = [each.side if isinstance(each, BlockRates) else None for each in self.blocks]
        if not sides or None in sides or sides != sorted(set(sides)):  # pyright: ignore[reportArgumentType]
            raise ValueError(
                f"blocks must hold at least one BlockRates, in ascending order of side; got {self.blocks!r}"
            )

    @property
    def sides(self) -> tuple[int, ...]:
        """Block sides that have rates, ascending."""
        return tuple(each.side for each in self.blocks)

    def rates(self, side: int) -> BlockRates:
        """Return the rates of blocks of this side, or else of the nearest side; of two equally near, the smaller."""
        return min(self.blocks, key=lambda each: abs(each.side - side))

    @cached_property
    def text(self) -> str:
        """All constants except `source` as text, for cache keys."""
        return repr(replace(self, source=""))


def _require_positive(value: Any, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= sys.float_info.max:
            raise ValueError(f"{name} must be a positive finite number; got {name}={shown(number)}")


# Orders of magnitude, for use without measurement: the costs of options differ by factors.
CPU = Machine(
    dense_flops_per_s=85e9,
    causal_flops_per_s=77e9,
    blocks=(
        BlockRates(64, runs_flops_per_s=62e9, plain_flops_per_s=52e9, masked_flops_per_s=50e9),
        BlockRates(128, runs_flops_per_s=66e9, plain_flops_per_s=60e9, masked_flops_per_s=58e9),
        BlockRates(256, runs_flops_per_s=71e9, plain_flops_per_s=67e9, masked_flops_per_s=65e9),
    ),
    bytes_per_s=9e9,
    launch_s=65e-6,
    backward_ratio=2.6,
    calls_a_list=4,
)
# The only block size that FlexAttention's kernels accept on all accelerators.
ACCELERATOR = Machine(
    dense_flops_per_s=400e12,
    causal_flops_per_s=400e12,
    blocks=(BlockRates(TILE, 400e12, 400e12, 400e12),),
    bytes_per_s=3e12,
    launch_s=20e-6,
    backward_ratio=2.5,
)
_in_use: dict[str, Machine] = {}  # by kind of device


def builtin_machine(kind: str) -> Machine:
    """Return the built-in constants for a kind of device, such as "cpu" or "cuda"."""
    return CPU if device_kind(kind).on_host else ACCELERATOR


def machine(device: torch.device | str = "cpu") -> Machine:
    """Return the cost constants used in plans for this kind of device: set by `set_machine`, or else built in.

    >>> masks.machine().source
    'builtin'
    """
    return machine_of(torch.device(device).type)


def machine_of(kind: str) -> Machine:
    """Return the constants that `machine` returns for devices of this kind, such as "cpu"."""
    return _in_use.get(kind) or _in_use.setdefault(kind, builtin_machine(kind))


@advises()
def set_machine(value: Machine | str | os.PathLike[str] | None, *, device: torch.device | str = "cpu") -> None:
    """Use these cost constants for plans on this kind of device, in this process from now on.

    value: a Machine; None for the built-in constants; or the path of a file that `python -m flexdilated tune FILE`
        wrote, whose constants are valid for the device, torch version and number of threads named in the file.

    Cached plans made with other constants are no longer used.

    Raises ValueError for a file that cannot be read or has no constants of this kind of device, TypeError for other
    values.

    >>> masks.set_machine(None)
    """
    kind = torch.device(device).type
    if value is None:
        value = builtin_machine(kind)
    if not isinstance(value, Machine | str | os.PathLike):
        raise TypeError(f"set_machine needs a Machine, the path of a file, or None; got {type(value).__name__}")
    _in_use[kind] = value if isinstance(value, Machine) else read_machine(Path(value), kind)


def sources_in_use() -> dict[str, str]:
    """Return the origin of the cost constants that were set or used in this process, by kind of device.

    For example {"cpu": "builtin"}. An origin is `Machine.source`: the path of a file for constants read from it.
    """
    return {kind: each.source for kind, each in _in_use.copy().items()}


def read_machine(path: Path, kind: str) -> Machine:
    """Return the cost constants of a kind of device from a file that `python -m flexdilated tune FILE` wrote.

    Raises ValueError if the file cannot be read or has no constants of this kind of device.
    """
    try:
        data = read_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} holds no JSON: {error}") from None
    try:
        for name, wanted in {"format": FORMAT, "version": VERSION, "kind": kind}.items():
            if data[name] != wanted:
                raise ValueError(f"{name} must be {wanted!r}; got {data[name]!r:.80}")
        blocks = tuple(BlockRates(**each) for each in data["constants"]["blocks"])
        return Machine(**data["constants"] | {"blocks": blocks}, source=str(path))
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # also of fields that are missing or unknown
        raise ValueError(f"{path} holds no constants that `python -m flexdilated tune` wrote: {error}") from None
