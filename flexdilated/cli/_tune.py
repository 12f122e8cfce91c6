"""tune: measure this device's constants, or the ways to compute one pattern, and store what was found."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from ..engines import CallKey, TuningKey
from ..masks.planning import Machine, MachineKey, Measured, forget_machines, stored_path, write_json
from ..tuning import KINDS, Inputs, Trialled, Trials, keep, measure, measure_machine
from ._command_parser import CommandParser, UsageError
from ._machine import available_devices, missing_line
from ._pattern import MOST_HEADS, AskedPattern, add_pattern_arguments, asked_from, one_rule, require_sizes

_FAR_APART = 1.5  # slowest over fastest, beyond which constants say little
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Without a PATTERN: measure the constants by which this device's plans are made, and store them in the user's "
        "cache directory. With one: run the ways to compute it, print them, and use the fastest from now on."
    )
    of_pattern = ("pattern",)
    add_pattern_arguments(parser, tokens="16K", heads=4, needs=of_pattern, nargs="?")
    add = parser.argument
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--seconds", type=float, default=15.0, help="how long to repeat the timed runs (%(default)s)")
    add("--out", type=Path, metavar="FILE", excludes=of_pattern, help="store the constants here instead")
    add("--kv-heads", type=int, metavar="G", needs=of_pattern, help="key/value heads, a divisor of H (H)")
    add("--head-dim", type=int, default=64, metavar="D", needs=of_pattern, help="(%(default)s)")
    add("--dtype", choices=tuple(_DTYPES), default="fp32", needs=of_pattern, help="(%(default)s)")
    add("--forward", action="store_true", needs=of_pattern, help="time the forward alone")
    parser.set_defaults(command=tune)


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


def tune(options: argparse.Namespace) -> int:
    """Measure, print, store; 0, or a UsageError where there is nowhere to store it."""
    settings = _settings_from(options)
    if settings.asked is None:
        return _tune_machine(settings)
    return _tune_pattern(settings, settings.asked)


def _settings_from(options: argparse.Namespace) -> TuneSettings:
    """Raises UsageError for a pattern that does not read and for sizes that do not fit together."""
    if options.device not in available_devices():
        raise UsageError(f"--device must be one of {', '.join(available_devices())}; got {options.device!r}")
    if not 0 < options.seconds <= 3600:
        raise UsageError(f"--seconds must be above 0 and at most 3600; got {options.seconds:g}")
    require_sizes(options, head_dim=1 << 16, kv_heads=MOST_HEADS)
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


def _tune_machine(settings: TuneSettings) -> int:
    device = settings.device
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
        raise UsageError(f"{missing_line('platformdirs')}, or name a file: --out FILE")
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


def _tune_pattern(settings: TuneSettings, asked: AskedPattern) -> int:
    bound = one_rule(asked).bind(**asked.sizes)
    sizes = {"num_kv_heads": settings.num_kv_heads, "head_dim": settings.head_dim}
    try:
        x = Inputs.of(bound, **sizes, dtype=settings.dtype, device=settings.device)
    except RuntimeError as error:  # torch's for a tensor that does not fit
        given = f"{asked.num_tokens} tokens, {asked.num_heads} heads, head dim {settings.head_dim}"
        raise UsageError(f"the inputs must fit into memory; got {given}: {str(error).partition(chr(10))[0]}") from None
    found = measure(bound, x, backward=settings.backward, seconds=settings.seconds)
    print(_options_table(found))
    print(f"\n{_remembered(settings, asked, x, found)}")
    return 0


def _remembered(settings: TuneSettings, asked: AskedPattern, x: Inputs, found: Trials) -> str:
    """Where it is stored, or why it is not."""
    if asked.pattern.varies:
        return "Not stored: each batch of run-time tensors is another rule."
    heads, tokens = asked.num_heads, asked.num_tokens
    call = CallKey(asked.pattern.text, heads, settings.num_kv_heads, tokens, tokens, 0, 0, 0, heads, 1, ())
    path = keep(TuningKey.of(call, x.q), found, backward=settings.backward)
    return f"Stored in {path}." if path else "Not stored: run `python -m flexdilated tune` once before."


def _options_table(found: Trials) -> str:
    rows = [_line(each, found) for each in found.all]
    headers = ("branch", "computed as", "predicted ms", "measured ms", "slowest / fastest", "")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", "right", "right", "right", "left"))


def _line(each: Trialled, found: Trials) -> tuple[str, ...]:
    branch = "all" if each.branch is None else str(each.branch + 1)
    predicted, measured = (f"{1e3 * seconds:.3g}" for seconds in (each.predicted_s, each.times.median_s))
    return branch, each.name, predicted, measured, f"{each.times.spread:.2f}", "fastest" if found.won(each) else ""
