"""Commands `doctor` (test engines on this machine) and `tune` (measure cost constants of its devices)."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from .. import __version__, masks
from .._attend import attend
from .._engine_choice import ENGINES, default_engine
from ..engines import missing_compiler
from ..masks import Mixture, Pattern
from ..masks.core import device_kind
from ..masks.plan_cache import BYTES_VARIABLE, ENTRIES_VARIABLE, bytes_from_environment, entries_from_environment
from ..observe import VARIABLE as PROFILE_VARIABLE
from ..observe import folder_from_environment
from ..tuning import KINDS, MeasuredMachine, device_text, measure_machine
from ._terminal import EXTRAS, CommandParser, UsageError, missing_line, optional_package, require_file, write_file

Finding = tuple[str, str]

_OLDEST_TORCH, _NEWEST_TRIED_TORCH = "2.11", "2.15"
_PREFIX = "FLEXDILATED_"
# Environment variable -> its reader, which raises ValueError for a value that does not parse.
_VARIABLES = {
    BYTES_VARIABLE: bytes_from_environment,
    ENTRIES_VARIABLE: entries_from_environment,
    PROFILE_VARIABLE: folder_from_environment,
}

# An engine is tested in training, or, if it does not support training, in inference with one set pattern.
_USES: dict[str, Pattern | Mixture] = {
    "training": masks.longnet((64, 256), (1, 4)) & masks.causal(),
    "inference": masks.local_window(left=99, right=0),
}
_SHAPE = (1, 4, 300, 64)  # B, H, N, D; no segment length divides N
_FAR_APART = 1.5  # slowest over fastest, beyond which constants say little
_LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def add_doctor_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Print versions, devices and optional packages, and try each engine on each device against the reference. "
        "The exit status is 0 if the default engine of every device works, else 1."
    )
    parser.set_defaults(command=lambda options: doctor())


def doctor() -> int:
    """Test each engine on each device, and print a table of the results, versions, packages and variables.

    Returns exit status 0 if the default engine of every device works and attention's environment variables are valid,
    else 1.
    """
    trials: list[Finding] = []
    variables, works = _check_variables()
    for device in available_devices():
        default = default_engine(device)
        for engine in ENGINES:
            is_sound, verdict = _trial(engine, device)
            works = works and (is_sound or engine != default)
            trials.append((f"{engine} on {device}{', the default' * (engine == default)}", verdict))
    extras = [(package, "found" if optional_package(package) else missing_line(package)) for package in EXTRAS]
    findings = [*_versions(), ("C++ compiler", missing_compiler() or "found"), *extras, *variables, *trials]
    print(tabulate(findings, tablefmt="plain", disable_numparse=True))
    print("\nAttention works on this machine." if works else "\nAttention does not work on this machine.")
    return 0 if works else 1


def _versions() -> list[Finding]:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    oldest, newest = (tuple(map(int, text.split("."))) for text in (_OLDEST_TORCH, _NEWEST_TRIED_TORCH))
    if (major, minor) < oldest:
        support = f"too old: {_OLDEST_TORCH} or newer is needed"
    elif (major, minor) > newest:
        support = f"newer than {_NEWEST_TRIED_TORCH}, the newest tried"
    else:
        support = "supported"
    return [
        ("flexdilated", __version__),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__}, {support}"),
        ("devices", f"{', '.join(available_devices())}; {torch.get_num_threads()} CPU threads"),
    ]


def _check_variables() -> tuple[list[Finding], bool]:
    """Check the FLEXDILATED_* environment variables; return ([(name, verdict) of each that is set], True if valid).

    If none is set, the list has one item that says so. Unknown variables and an invalid profile folder count as valid,
    because calls of `attend` do not read them.
    """
    findings, all_parse = [], True
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        try:
            verdict = f"is read as {_VARIABLES[name]()}" if name in _VARIABLES else "is unknown, and has no effect"
        except ValueError as error:
            verdict, all_parse = f"does not parse: {error}", all_parse and name == PROFILE_VARIABLE
        findings.append((name, verdict))
    return findings or [("environment", f"no {_PREFIX}* variable is set ({', '.join(_VARIABLES)} may be)")], all_parse


def _trial(engine: str, device: str) -> tuple[bool, str]:
    """Test an engine in training or, if it does not train, in inference; return (True if results are right, text).

    The text has the use, "training" or "inference", and the numeric error, or the reason of a failure.
    """
    dtype, refusal = torch.bfloat16 if engine == "flash" else torch.float32, ""
    for use in _USES:
        try:
            error = _relative_error(engine, device, dtype, use)
        except ValueError as refused:
            refusal = _first_line(refused)
        except Exception as failure:  # of any kind: it is the finding
            return False, f"fails in {use}: {type(failure).__name__}: {_first_line(failure)}"
        else:
            is_sound = error <= _LARGEST_ERROR[dtype]
            wrong = "" if is_sound else f", and must be at most {_LARGEST_ERROR[dtype]:.0e}"
            return is_sound, f"{'serves' if is_sound else 'is wrong in'} {use}, error {error:.0e}{wrong}"
    return False, f"does not serve: {refusal}"


def _relative_error(engine: str, device: str, dtype: torch.dtype, use: str) -> float:
    """Return the largest error of output and, in training, gradients, relative to the largest magnitude in its tensor.

    use: "training" or "inference".

    Errors are differences from the engine "reference" in float64.
    """
    pairs = zip(
        _attend_results(engine, device, dtype, use),
        _attend_results("reference", "cpu", torch.float64, use),
        strict=True,
    )
    return float(torch.stack([(found - exact).abs().amax() / exact.abs().amax() for found, exact in pairs]).amax())


def _attend_results(engine: str, device: str, dtype: torch.dtype, use: str) -> list[Tensor]:
    """Run `attend` on fixed inputs; return [out], and for use "training" [out, dq, dk, dv], in float64 on the CPU."""
    numbers = torch.randn(4, *_SHAPE, generator=torch.Generator().manual_seed(0))
    q, k, v, grad = numbers.bfloat16().to(device, dtype)  # the same numbers in every dtype
    leaves = [x.requires_grad_(use == "training") for x in (q, k, v)]
    out = attend(q, k, v, _USES[use], engine=engine)
    gradients = torch.autograd.grad(out, leaves, grad) if use == "training" else ()
    return [x.detach().cpu().double() for x in (out, *gradients)]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def available_devices() -> tuple[str, ...]:
    """Return the kinds of device that torch can use on this machine, such as ("cpu", "cuda")."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def add_tune_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Measure the constants by which plans are made for this device, and write them to a file, "
        'which masks.set_machine("FILE") reads.'
    )
    add = parser.argument
    add("file", type=Path, metavar="FILE", help="the file to write, such as machine.json")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--seconds", type=float, default=15.0, help="how long to repeat the timed runs (%(default)s)")
    parser.set_defaults(command=tune)


def tune(options: argparse.Namespace) -> int:
    """Run the command `tune`: measure the cost constants of a device, write them to a file and print them.

    Returns exit status 0. Raises UsageError for invalid options and a file that cannot be written.
    """
    if options.device not in available_devices():
        raise UsageError(f"--device must be one of {', '.join(available_devices())}; got {options.device!r}")
    if default_engine(options.device) == "portable":
        raise UsageError(f"tune measures engines aten and flex, and the default on {options.device} is portable")
    if not 0 < options.seconds <= 3600:
        raise UsageError(f"--seconds must be above 0 and at most 3600; got {options.seconds:g}")
    require_file("FILE", options.file, (".json",))
    device = torch.device(options.device)
    print(f"Measuring {device_text(device)}. Other work on this machine makes the numbers wrong.", flush=True)
    found = measure_machine(device, seconds=options.seconds)
    write_file(options.file, (json.dumps(found.to_data(), indent=1) + "\n").encode())
    print(_constants_table(found))
    if max(found.spread.values()) > _FAR_APART:
        print("\nRuns of one problem lay far apart: the machine was busy. Measure again when it is not.")
    given = "" if device_kind(device).on_host else f", device={options.device!r}"
    print(f"\nStored in {options.file}. Plans use it after masks.set_machine({str(options.file)!r}{given}).")
    return 0


def _constants_table(found: MeasuredMachine) -> str:
    now, spread = found.machine, found.spread
    rates = [
        ("dense attention", now.dense_flops_per_s, "dense"),
        ("causal attention", now.causal_flops_per_s, "causal"),
    ]
    for each in now.blocks:
        measured = (each.runs_flops_per_s, each.plain_flops_per_s, each.masked_flops_per_s)
        names = [f"{kind} blocks of {each.side}" for kind in KINDS]
        rates += zip(names, measured, names, strict=True)
    rows = [
        *((name, f"{rate / 1e9:,.1f} GFLOP/s", of) for name, rate, of in rates),
        ("copies", f"{now.bytes_per_s / 1e9:.2f} GB/s", "copies"),
        ("a kernel call", f"{now.launch_s * 1e6:.0f} µs", "launch"),
        ("backward over forward", f"{now.backward_ratio:.2f}", "dense, forward and backward"),
    ]
    lines = [(name, value, f"{spread[of]:.2f}") for name, value, of in rows]
    return tabulate(lines, ("constant", "measured", "slowest / fastest"), disable_numparse=True)
