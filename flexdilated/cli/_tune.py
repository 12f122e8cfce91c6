"""tune: measure this device's constants, or the ways to compute one pattern, and store what was found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from .._call_key import CallKey
from .._tune import Trialled, Trials, measure
from .._tune_choices import Sight, remember
from .._tune_machine import KINDS, measure_machine
from .._tune_trial import Inputs
from ..masks._machine import Machine
from ..masks._machine_file import Measured, stored_path, write_json
from ..masks._machine_in_use import forget_machines
from ..masks._machine_key import MachineKey
from ..masks._pattern import Expression
from . import _extras
from ._plan_settings import read_pattern
from ._settings import available_devices
from ._sizes import parse_tokens
from ._usage import UsageError

_FAR_APART = 1.5  # slowest over fastest, beyond which constants say little
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class TuneSettings:
    """What the command line asks for; `pattern` None measures the device's constants."""

    pattern: str | None
    device: str
    seconds: float
    out: Path | None
    tokens: str
    heads: int
    kv_heads: int | None
    head_dim: int
    dtype: str
    forward: bool

    def __post_init__(self) -> None:
        if self.device not in available_devices():
            raise UsageError(f"--device must be one of {', '.join(available_devices())}; got {self.device!r}")
        if self.pattern is not None and self.out is not None:
            raise UsageError("--out is for the device's constants; what a pattern's ways took is stored beside these")
        if not 0 < self.seconds <= 3600:
            raise UsageError(f"--seconds must be above 0 and at most 3600; got {self.seconds:g}")
        for name in ("heads", "head_dim", "kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
        if self.heads % self.num_kv_heads:
            raise UsageError(f"--heads must be a multiple of --kv-heads; got {self.heads} and {self.num_kv_heads}")

    @property
    def num_tokens(self) -> int:
        return parse_tokens(self.tokens)

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads


def tune(settings: TuneSettings) -> int:
    """Measure, print, store; 0, or a UsageError where there is nowhere to store it."""
    device = torch.device(settings.device)
    if settings.pattern is None:
        return _tune_machine(settings, device)
    return _tune_pattern(settings, read_pattern(settings.pattern), device)


def _tune_machine(settings: TuneSettings, device: torch.device) -> int:
    path = settings.out or _stored(device)
    print(f"Measuring {MachineKey.of(device.type)}. Other work on this machine makes the numbers wrong.", flush=True)
    found = measure_machine(device, seconds=settings.seconds)
    try:
        write_json(path, found.to_data())
    except OSError as error:
        raise UsageError(f"the constants must be stored in a file that can be written; {path}: {error}") from None
    forget_machines()
    print(_table(found))
    if max(found.spread.values()) > _FAR_APART:
        print("\nRuns of one problem lay far apart: the machine was busy. Measure again when it is not.")
    print(f"\nStored in {path}.")
    if settings.out is not None:
        print(f"Plans use it where FLEXDILATED_MACHINE={path} is set.")
    return 0


def _stored(device: torch.device) -> Path:
    path = stored_path(MachineKey.of(device.type))
    if path is None:
        raise UsageError(f"{_extras.missing_line('platformdirs')}, or name a file: --out FILE")
    return path


def _table(found: Measured) -> str:
    now, spread = found.machine, found.spread
    rows = [
        ("dense attention", _rate(now.dense_flops_per_s), spread["dense"]),
        ("causal attention", _rate(now.causal_flops_per_s), spread["causal"]),
        *_block_rows(now, found),
        ("copies", f"{now.bytes_per_s / 1e9:.2f} GB/s", spread["copies"]),
        ("a kernel call", f"{now.launch_s * 1e6:.0f} µs", spread["launch"]),
        ("backward over forward", f"{now.backward_ratio:.2f}", spread["dense, forward and backward"]),
    ]
    lines = [(name, value, f"{ratio:.2f}") for name, value, ratio in rows]
    return tabulate(lines, ("constant", "measured", "slowest / fastest"), disable_numparse=True)


def _block_rows(now: Machine, found: Measured) -> list[tuple[str, str, float]]:
    return [
        (name, _rate(value), found.spread[name])
        for each in now.blocks
        for kind, value in zip(
            KINDS, (each.runs_flops_per_s, each.plain_flops_per_s, each.masked_flops_per_s), strict=True
        )
        for name in (f"{kind} blocks of {each.side}",)
    ]


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e9:,.1f} GFLOP/s"


def _tune_pattern(settings: TuneSettings, pattern: Expression, device: torch.device) -> int:
    heads, tokens, backward = settings.heads, settings.num_tokens, not settings.forward
    call = CallKey(pattern.text, heads, settings.num_kv_heads, tokens, tokens, 0, 0, 0, heads, 1, ())
    dtype, head_dim = DTYPES[settings.dtype], settings.head_dim
    try:
        bound = call.bound()
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        x = Inputs.of(bound, num_kv_heads=call.num_kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's for a tensor that does not fit
        sizes = f"{tokens} tokens, {heads} heads, head dim {head_dim}"
        raise UsageError(f"the inputs must fit into memory; got {sizes}: {str(error).partition(chr(10))[0]}") from None
    found = measure(bound, x, backward=backward, seconds=settings.seconds)
    print(_options_table(found))
    path = remember(Sight.of(call, x.q), found, backward=backward)
    print(f"\nStored in {path}." if path else "\nNot stored: run `python -m flexdilated tune` once before.")
    return 0


def _options_table(found: Trials) -> str:
    rows = [_line(each, found) for each in found.all]
    headers = ("branch", "computed as", "predicted ms", "measured ms", "slowest / fastest", "")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", "right", "right", "right", "left"))


def _line(each: Trialled, found: Trials) -> tuple[str, ...]:
    branch = "all" if each.branch is None else str(each.branch + 1)
    predicted, measured = (f"{1e3 * seconds:.3g}" for seconds in (each.predicted_s, each.times.median_s))
    return branch, each.name, predicted, measured, f"{each.times.spread:.2f}", "fastest" if found.won(each) else ""
