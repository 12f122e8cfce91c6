"""Machine: the device constants of the cost model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ...core import TILE, device_kind, shown

BUILTIN = "builtin"


@dataclass(frozen=True)
class BlockRates:
    """FLOP/s of block lists of one side.

    runs: rows of adjacent blocks. plain: other rows whose blocks are all full. masked: other rows that need a mask.

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
    """Constants of a device: forward rates at head dim 64, copy rate, and overhead of a kernel call.

    Rates are for float32 on CPU and bfloat16 on accelerators, and are used for all dtypes.
    dense_flops_per_s: attention over all pairs. causal_flops_per_s: over slots k <= q, by the pairs in blocks of
    128 on and below the diagonal. blocks: rates of block lists by side, ascending; the planner compares these sides.
    bytes_per_s: gather and merge. launch_s: seconds of a kernel call. backward_ratio: time of a backward over its
    forward. calls_a_list: overhead of a table of blocks, in calls, as rows of another shape are separate calls and
    gather their keys. source: origin of the constants, ignored in comparisons.

    Raises ValueError unless all numbers are positive and finite.

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
        _require_positive(self, *NUMBERS)
        sides = [each.side if isinstance(each, BlockRates) else None for each in self.blocks]
        if not sides or None in sides or sides != sorted(set(sides)):  # pyright: ignore[reportArgumentType]
            raise ValueError(f"blocks must hold BlockRates of growing sides, at least one; got {self.blocks!r}")

    @property
    def sides(self) -> tuple[int, ...]:
        """Block sides that the planner compares."""
        return tuple(each.side for each in self.blocks)

    def rates(self, side: int) -> BlockRates:
        """Rates of blocks of this side, or of the nearest measured side."""
        return min(self.blocks, key=lambda each: abs(each.side - side))

    @cached_property
    def text(self) -> str:
        """All constants, for cache keys."""
        return repr(replace(self, source=""))


NUMBERS = tuple(each.name for each in fields(Machine) if each.name not in ("blocks", "source"))


def _require_positive(value: Any, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= sys.float_info.max:
            raise ValueError(f"{name} must be a positive finite number; got {name}={shown(number)}")


# Without measurement, orders of magnitude are enough: the options differ by factors.
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
# The only block side that FlexAttention's kernels accept on all accelerators.
ACCELERATOR = Machine(
    dense_flops_per_s=400e12,
    causal_flops_per_s=400e12,
    blocks=(BlockRates(TILE, 400e12, 400e12, 400e12),),
    bytes_per_s=3e12,
    launch_s=20e-6,
    backward_ratio=2.5,
)


def builtin_machine(kind: str) -> Machine:
    """The library's built-in constants for this kind of device."""
    return CPU if device_kind(kind).on_host else ACCELERATOR
