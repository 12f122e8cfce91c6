"""What `tune` is asked: a device, and of a pattern its sizes, checked once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from ._asked_pattern import AskedPattern
from ._pattern_arguments import asked_from
from ._plan_settings import require_sizes
from ._settings import available_devices
from ._usage import UsageError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """`asked` None measures the device's constants."""

    asked: AskedPattern | None
    device: torch.device
    seconds: float
    out: Path | None
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    backward: bool


def settings_from(options: argparse.Namespace) -> TuneSettings:
    """Raises UsageError for a pattern that does not read and for sizes that do not fit together."""
    if options.device not in available_devices():
        raise UsageError(f"--device must be one of {', '.join(available_devices())}; got {options.device!r}")
    if not 0 < options.seconds <= 3600:
        raise UsageError(f"--seconds must be above 0 and at most 3600; got {options.seconds:g}")
    require_sizes(options, "head_dim", "kv_heads")
    asked = None if options.pattern is None else asked_from(options)
    num_heads = 1 if asked is None else asked.num_heads
    kv_heads = num_heads if options.kv_heads is None else options.kv_heads
    if num_heads % kv_heads:
        raise UsageError(f"--heads must be a multiple of --kv-heads; got {num_heads} and {kv_heads}")
    return TuneSettings(
        asked=asked,
        device=torch.device(options.device),
        seconds=options.seconds,
        out=options.out,
        num_kv_heads=kv_heads,
        head_dim=options.head_dim,
        dtype=_DTYPES[options.dtype],
        backward=not options.forward,
    )
