"""tune: measure this device's constants, or the ways to compute one pattern, and store what was found."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tabulate import tabulate

from ..engines import Call, TuningKey
from ..masks.core import seconds_text
from ..masks.planning import Machine, MachineKey, Measured, forget_machines, stored_path, write_json
from ..tuning import KINDS, Inputs, Trialled, Trials, keep, measure, measure_machine
from ._command_parser import CommandParser, UsageError
from ._machine import available_devices, find, missing_line
from ._pattern import MOST_HEADS, AskedPattern, add_pattern_arguments, asked_from, one_rule

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
    groups = "key/value heads, a divisor of H (H)"
    add("--kv-heads", type=int, least=1, most=MOST_HEADS, metavar="G", needs=of_pattern, help=groups)
    add("--head-dim", type=int, default=64, least=1, most=1 << 16, metavar="D", needs=of_pattern, help="(%(default)s)")
    add("--dtype", choices=tuple(_DTYPES), default="fp32", needs=of_pattern, help="(%(default)s)")
    add("--forward", action="store_true", needs=of_pattern, help="time the forward alone")
    parser.set_defaults(command=tune)


def tune(options: argparse.Namespace) -> int:
    """Measure, print, store; 0, or a UsageError where there is nowhere to store it, or sizes do not fit together."""
    if options.device not in available_devices():
        raise UsageError(f"--device must be one of {', '.join(available_devices())}; got {options.device!r}")
    if not 0 < options.seconds <= 3600:
        raise UsageError(f"--seconds must be above 0 and at most 3600; got {options.seconds:g}")
    return _tune_machine(options) if options.pattern is None else _tune_pattern(options, asked_from(options))


def _tune_machine(options: argparse.Namespace) -> int:
    path = options.out or _stored(options.device)
    print(f"Measuring {MachineKey.of(options.device)}. Other work on this machine makes the numbers wrong.", flush=True)
    found = measure_machine(torch.device(options.device), seconds=options.seconds)
    try:
        write_json(path, found.to_data())
    except OSError as error:
        raise UsageError(f"the constants must be stored in a file that can be written; {path}: {error}") from None
    forget_machines()
    print(_table(found))
    if max(found.spread.values()) > _FAR_APART:
        print("\nRuns of one problem lay far apart: the machine was busy. Measure again when it is not.")
    print(f"\nStored in {path}.")
    if options.out is not None:
        print(f"Plans use it where FLEXDILATED_MACHINE={path} is set.")
    return 0


def _stored(device: str) -> Path:
    path = stored_path(MachineKey.of(device)) if find("platformdirs") else None
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


def _tune_pattern(options: argparse.Namespace, asked: AskedPattern) -> int:
    kv_heads, dtype = options.kv_heads or asked.num_heads, _DTYPES[options.dtype]
    if asked.num_heads % kv_heads:
        raise UsageError(f"--heads must be a multiple of --kv-heads; got {asked.num_heads} and {kv_heads}")
    bound = one_rule(asked).bind(**asked.sizes)
    try:
        sizes = {"num_kv_heads": kv_heads, "head_dim": options.head_dim}
        x = Inputs.of(bound, **sizes, dtype=dtype, device=torch.device(options.device))
    except RuntimeError as error:  # torch's for a tensor that does not fit
        given = f"{asked.num_tokens} tokens, {asked.num_heads} heads, head dim {options.head_dim}"
        raise UsageError(f"the inputs must fit into memory; got {given}: {str(error).partition(chr(10))[0]}") from None
    backward = not options.forward
    found = measure(bound, x, backward=backward, seconds=options.seconds)
    print(_options_table(found))
    print(f"\n{_remembered(asked, kv_heads, x, found, backward=backward)}")
    return 0


def _remembered(asked: AskedPattern, kv_heads: int, x: Inputs, found: Trials, *, backward: bool) -> str:
    """Where it is stored, or why it is not."""
    if asked.pattern.varies:
        return "Not stored: each batch of run-time tensors is another rule."
    heads, tokens = asked.num_heads, asked.num_tokens
    call = Call(asked.pattern.text, heads, kv_heads, tokens, tokens, 0, 0, 0, heads, 1, ())
    path = keep(TuningKey.of(call, x.q), found, backward=backward)
    return f"Stored in {path}." if path else "Not stored: run `python -m flexdilated tune` once before."


def _options_table(found: Trials) -> str:
    rows = [_line(each, found) for each in found.all]
    headers = ("branch", "computed as", "predicted", "measured", "slowest / fastest", "")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", "right", "right", "right", "left"))


def _line(each: Trialled, found: Trials) -> tuple[str, ...]:
    branch = "all" if each.branch is None else str(each.branch + 1)
    predicted, measured = (seconds_text(seconds) for seconds in (each.predicted_s, each.times.median_s))
    return branch, each.name, predicted, measured, f"{each.times.spread:.2f}", "fastest" if found.won(each) else ""
